"""launcher=ray survives lost actors and lost nodes, on a real cluster of several nodes (raylets) on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_job import (
    DEADLINE_S,
    Job,
    assert_none_left,
    assert_same_training,
    chaos,
    command_line,
    is_alive,
    parent,
    pids,
    reference,
    run_job,
    until,
    words,
)

from kfuse.elastic.launchers import RayLauncher
from kfuse.elastic.supervisor import Supervisor

pytestmark = pytest.mark.full

ray = pytest.importorskip("ray", reason="Ray is not installed")

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 workers.max=3 model=mlp data=digits",
    "model.hidden=[24] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.epochs=4",
    "train.heldout_every=20",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node, which has no room for workers, and two nodes with room for one each."""
    from ray.cluster_utils import Cluster

    config = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": config}
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_actors_and_nodes_come_and_go(cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An actor is killed and replaced; the third worker waits for a node; that node is lost. The same bits."""
    actors: set[int] = set()

    async def events(supervisor: Supervisor, job: Job) -> None:
        await until("10 steps", lambda: len(job.metrics) >= 10)
        actors.update(map(parent, pids(job.views[-1])))
        os.kill(parent(pids(job.views[-1])[1]), signal.SIGKILL)
        await until("a worker in its place", lambda: len(job.views) == 3)
        actors.update(map(parent, pids(job.views[-1])))
        await until("the third worker to be asked for", lambda: len(supervisor.processes.workers) == 4)
        assert len(supervisor.processes.members()) == 2
        node = cluster.add_node(num_cpus=1)  # here, though it takes seconds: Ray is no friend of other threads
        await until("a worker on the new node", lambda: len(job.views) == 4)
        newest = pids(job.views[-1])[2]
        actors.add(parent(newest))
        assert parent(parent(newest)) == node.all_processes["raylet"][0].process.pid
        await until("the gate that wants three", lambda: len(job.metrics) > 60)
        cluster.remove_node(node, allow_graceful=False)
        await until("the rest to go on", lambda: len(job.views) == 5)

    gates = [{"step": step, "workers": workers} for step, workers in ((32, 2), (60, 3), (85, 2))]
    policy = chaos(tmp_path, phases=[{"step": 40, "workers": 3}], gates=gates, pace_s=0.02)
    settings = [*TRAINING, "workers.count=2", "elastic.heartbeat_timeout_s=5", *policy]
    job = run_job(tmp_path / "run", settings, events, launcher=RayLauncher())
    assert_same_training(job, reference(TRAINING))
    views = job.views
    sizes = [("start", 2), ("failure", 1), ("grow", 2), ("grow", 3), ("failure", 2)]
    assert [(view["reason"], len(view["workers"])) for view in views] == sizes
    assert pids(views[1]) == pids(views[0])[:1] and pids(views[3])[:2] == pids(views[2]) == pids(views[4])
    # Of members: a newcomer that Ray has placed on the lost node, before it noticed, ends too.
    members = [event for event in job.of_kind("failure") if event["rank"] is not None]
    assert len(members) == 2 and all(event["how"].startswith("was lost with its host ") for event in members)
    assert any(text.startswith("ray: ") for text in caplog.messages), "Ray says what became of an actor"
    assert len(actors) == 4
    assert_none_left(actors)


def test_the_worker_on_a_drained_node_leaves_and_nothing_is_repeated(cluster: Any, tmp_path: Path) -> None:
    """As the autoscaler drains it, or a pod's preStop hook. Another worker comes where there is room."""
    from ray._raylet import GcsClient

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    actors: set[int] = set()

    async def events(supervisor: Supervisor, job: Job) -> None:
        launcher: Any = supervisor.processes._launcher
        await until("10 steps", lambda: len(job.metrics) >= 10)
        actors.update(map(parent, pids(job.views[-1])))
        added = cluster.add_node(num_cpus=1)
        preempted = 2  # the reason's number in Ray's protocol
        assert GcsClient(cluster.address).drain_node(nodes[0], preempted, "the machine is needed", 0)[0]
        await until("a worker in its place", lambda: len(job.views) >= 3 and len(job.views[-1]["workers"]) == 2)
        actors.update(map(parent, pids(job.views[-1])))
        assert sorted(launcher._nodes.values()) == sorted([nodes[1], added.node_id])

    policy = chaos(tmp_path, gates=[{"step": 12, "workers": 2}, {"step": 85, "workers": 2}], pace_s=0.02)
    settings = [*TRAINING, "workers.count=2", "workers.max=2", *policy]
    job = run_job(tmp_path / "run", settings, events, launcher=RayLauncher())
    assert_same_training(job, reference(TRAINING))
    assert job.of_kind("failure") == [] and len(job.of_kind("notice")) == 1
    assert not {"failure", "restart"} & {view["reason"] for view in job.views}
    assert_none_left(actors)


def test_the_command_line_shows_training_and_none_of_ray(cluster: Any, tmp_path: Path) -> None:
    settings = [*TRAINING, "train.epochs=1", "policy=none", "launcher=ray", f"launcher.address={cluster.address}"]
    with command_line(tmp_path / "run", settings) as (process, job):
        assert process.wait(DEADLINE_S) == 0
        assert_none_left(job.pids)
    (view,) = job.views
    assert not is_alive(pids(view)[0])
    assert job.lines[0].startswith("kfuse  ") and not any("ray" in line.lower() for line in job.lines), job.lines
