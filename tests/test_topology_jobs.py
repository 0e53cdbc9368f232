"""Elastic jobs: a list of parents is dropped when the workers change, and each view's links are measured."""

from __future__ import annotations

from pathlib import Path

from chaos import Chaos
from elastic_job import assert_exact, chaos, run_job, words

import kfuse as kf

TRAINING = words(
    "comm.bucket_mb=0.002 workers.max=4 model=mlp data=digits model.hidden=[24] batch.size=16 batch.micro=4",
    "batch.max=16 train.epochs=1 comm.tree=latency",
)


class Lists(Chaos):
    """Chaos, and a list of parents at step 10."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        decision = super().decide(signals) or kf.Decision()
        if signals.step == 10:
            decision = decision.merged(kf.Decision(tree=[2, 2, 2]))
        return None if decision.is_empty else decision


def test_a_list_is_dropped_and_the_links_are_measured_when_a_worker_is_lost(tmp_path: Path) -> None:
    arguments = {
        "adaptive": False,
        "topologies": [{"step": 4, "topology": "tree"}],
        "events": [{"step": 40, "moment": "between_reduction_and_update", "rank": 1, "how": "kill", "workers": 3}],
    }
    policy = [word.replace("chaos.Chaos", "test_topology_jobs.Lists") for word in chaos(tmp_path, **arguments)]
    job = run_job(tmp_path / "run", [*TRAINING, "workers.count=3", "workers.min=2", *policy])
    assert_exact(job)
    views = [(view["reason"], len(view["workers"])) for view in job.views]
    assert views[:2] == [("start", 3), ("failure", 2)], job.told()
    lost = job.views[1]["step"]
    trees = [(event["tree"], event.get("why")) for event in job.of_kind("decision") if "tree" in event]
    assert trees == [([2, 2, 2], None), ("latency", "the workers have changed")]
    [*_, dropped] = [event["step"] for event in job.of_kind("decision") if "tree" in event]
    assert lost - 1 <= dropped <= lost
    measured = job.of_kind("links")
    assert [len(event["latency_s"]) for event in measured] == [len(view["workers"]) for view in job.views]
    for event in measured:
        size = len(event["latency_s"])
        for a in range(size):
            for b in range(size):
                known = event["bytes_per_s"][a][b]
                assert (known is None and event["latency_s"][a][b] == 0) if a == b else known > 0
