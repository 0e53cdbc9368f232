"""A job goes on without hosts that are cut off in the middle of a step, and the workers on those hosts end."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_job import assert_same_training, chaos, run_job, words
from hosts import HostLauncher, network, why_not

pytestmark = pytest.mark.full

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 lr.base=0.003 workers.max=3 model=mlp data=digits model.hidden=[24]",
    "batch.size=16 batch.micro=4 batch.max=64 train.epochs=2 train.heldout_every=20",
    "elastic.heartbeat_timeout_s=4 elastic.replace=false",
)
CUTS = [
    {"step": 12, "moment": "mid_reduction", "rank": 0, "how": "silence", "workers": 3},
    {"step": 40, "moment": "between_reduction_and_update", "rank": 1, "how": "unplug", "workers": 2},
]


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def test_hosts_that_are_cut_off_are_left_behind(tmp_path: Path) -> None:
    """Of three, the leader's falls silent, then another's link goes down; the last one ends with the same bits."""
    alone = run_job(tmp_path / "alone", [*TRAINING, *chaos(tmp_path / "none")])
    policy = chaos(tmp_path, events=CUTS)
    with network(3) as (first, hosts):
        launcher = HostLauncher(first.address, hosts, tmp_path)
        job = run_job(tmp_path / "run", [*TRAINING, *policy, "workers.count=3"], launcher=launcher)
    assert_same_training(job, alone)
    assert [len(view["workers"]) for view in job.views] == [3, 2, 1]
    failures = job.of_kind("failure")
    assert len(failures) == 2 and all("and cannot be reached" in failure["how"] for failure in failures)
    # Their processes have ended too: see run_job.
    ends = [path.read_text().splitlines()[-1:] for path in tmp_path.glob("worker-*.log")]
    assert sum("ends: the supervisor is gone" in "".join(end) for end in ends) == 2


def test_two_hosts_that_do_not_reach_each_other_are_parted(tmp_path: Path) -> None:
    """Both reach the supervisor. The leader's stays, with the third one, and the other one's worker ends."""
    alone = run_job(tmp_path / "alone", [*TRAINING, *chaos(tmp_path / "none")])
    with network(3) as (first, hosts):
        cut = {"step": 12, "moment": "mid_reduction", "rank": 0, "how": f"apart_from {hosts[1].address}", "workers": 3}
        launcher = HostLauncher(first.address, hosts, tmp_path)
        more = ["workers.count=3", "comm.timeout_s=5"]
        job = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path, events=[cut]), *more], launcher=launcher)
    assert_same_training(job, alone)
    assert [worker["pid"] for worker in job.views[-1]["workers"]] == [
        worker["pid"] for rank, worker in enumerate(job.views[0]["workers"]) if rank != 1
    ]
    [event], [failure] = job.of_kind("cut"), job.of_kind("failure")
    lost = failure["worker"]
    assert event["evicted"] == [lost] and [lost in pair for pair in event["workers"]] == [True]
    assert "did not reach worker" in failure["how"]
