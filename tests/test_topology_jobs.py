"""Elastic jobs: a list of parents is dropped when the workers change, and each view's links are measured."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from chaos import Chaos
from elastic_job import assert_exact, chaos, run_job, words

import kfuse as kf

TRAINING = words(
    "comm.bucket_mb=0.002 workers.max=4 model=mlp data=digits model.hidden=[24] batch.size=16 batch.micro=4",
    "batch.max=16 train.epochs=1 comm.tree=latency",
)


class Lists(Chaos):
    """Chaos, a list of parents at step 24, and one that is no tree. Links have been measured."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        decision = super().decide(signals) or kf.Decision()
        if tree := {22: [0, 1, 2], 24: [2, 2, 2]}.get(signals.step):
            assert signals.link_latencies is not None and signals.link_throughputs is not None
            assert (signals.link_latencies[1][1], signals.link_throughputs[1][1]) == (0.0, None)
            decision = decision.merged(kf.Decision(tree=tree))
        return None if decision.is_empty else decision


@pytest.mark.full
def test_each_view_is_measured_and_a_list_is_dropped_when_a_worker_is_lost(tmp_path: Path) -> None:
    """Two workers, three, two. A joiner comes to the same messages as those who are there."""
    arguments = {
        "adaptive": False,
        "topologies": [{"step": 14, "topology": "tree"}],
        "phases": [{"step": 2, "workers": 3}],
        "gates": [{"step": 12, "workers": 3}],
        "events": [{"step": 40, "moment": "between_reduction_and_update", "rank": 1, "how": "kill", "workers": 3}],
    }
    policy = [word.replace("chaos.Chaos", "test_topology_jobs.Lists") for word in chaos(tmp_path, **arguments)]
    job = run_job(tmp_path / "run", [*TRAINING, "workers.count=2", "workers.min=2", *policy])
    assert_exact(job)
    views = [(view["reason"], len(view["workers"])) for view in job.views]
    assert views[0] == ("start", 2) and views[1][1] == 3 and views[2] == ("failure", 2), job.told()
    [note] = [event["note"] for event in job.of_kind("clipped")]
    assert note.startswith("tree [0, 1, 2]: must have one") and note.endswith("; it stays as it is")
    lost = job.views[2]["step"]
    trees = [(event["tree"], event.get("why")) for event in job.of_kind("decision") if "tree" in event]
    assert trees == [([2, 2, 2], None), ("latency", "the workers have changed")]
    [*_, dropped] = [event["step"] for event in job.of_kind("decision") if "tree" in event]
    assert lost - 1 <= dropped <= lost
    measured = job.of_kind("links")
    assert [len(event["latency_s"]) for event in measured] == [len(view["workers"]) for view in job.views]
    for event in measured:
        for a, b in product(range(len(event["latency_s"])), repeat=2):
            known = event["bytes_per_s"][a][b]
            assert (known is None and event["latency_s"][a][b] == 0) if a == b else known > 0
    chosen = job.of_kind("schedule")
    assert [event["workers"] for event in chosen] == [2, 3], "later the tree is decided upon"
    assert all(event["schedule"] in event["predicted_s"] and event["probe_s"] > 0 for event in chosen)
    assert chosen[0]["probe_s"] == chosen[1]["probe_s"], "on the same machine nothing is measured again"
