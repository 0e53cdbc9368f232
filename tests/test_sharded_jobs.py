"""Elastic jobs with comm.state=sharded: through planned changes of the workers, and checkpoints, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_job import Job, assert_same_training, chaos, run_job, undisturbed_job, until, words

from kfuse.elastic.supervisor import Supervisor

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.06 train.clip_norm=0.5 lr.base=0.003 workers.max=4 model=mlp data=digits",
    "model.hidden=[200,100] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.epochs=2",
    "train.eval_every=20",
)
SHARDED = ["comm.state=sharded"]


def schedule(folder: Path, *changes: tuple[int, int]) -> list[str]:
    """Settings: from each step on, so many workers; the change is over before the next one."""
    phases = [{"step": step, "workers": workers} for step, workers in changes]
    gates = [{"step": step + 10, "workers": workers} for step, workers in changes]
    return chaos(folder, phases=phases, gates=gates)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """The training with these settings on one worker, with replicated state, that nothing disturbs."""
    made: dict[str, Job] = {}

    def of(*settings: str) -> Job:
        key = " ".join(settings)
        if key not in made:
            made[key] = undisturbed_job(tmp_path_factory.mktemp("undisturbed"), [*TRAINING, *settings])
        return made[key]

    return of


LAMB = ["optimizer=lamb", "train.precision=bf16-true"]


@pytest.mark.full
def test_workers_join_and_leave(undisturbed: Callable[..., Job], tmp_path: Path) -> None:
    changes = schedule(tmp_path, (5, 2), (20, 3), (35, 1), (50, 4))
    job = run_job(tmp_path / "run", [*TRAINING, *SHARDED, *LAMB, *changes])
    assert_same_training(job, undisturbed(*LAMB))
    assert [len(view["workers"]) for view in job.views] == [1, 2, 3, 1, 4]
    assert job.of_kind("failure") == []


@pytest.mark.full
def test_a_worker_joins_while_a_checkpoint_is_due(undisturbed: Callable[..., Job], tmp_path: Path) -> None:
    """The leader still writes the last one, so the next one has to wait. The worker that joins asks for it too."""
    slow = {"step": 2, "moment": "checkpoint_write", "rank": 0, "how": "linger", "workers": 1}
    phases, gates = [{"step": 4, "workers": 2}], [{"step": 15, "workers": 2}]
    settings = [*SHARDED, "checkpoint.every_steps=1", *chaos(tmp_path, events=[slow], phases=phases, gates=gates)]
    job = run_job(tmp_path / "run", [*TRAINING, "train.steps=30", *settings])
    assert_same_training(job, undisturbed("train.steps=30"))
    assert [len(view["workers"]) for view in job.views] == [1, 2]
    assert job.of_kind("failure") == []
    joined = job.views[1]["step"]
    written = [event["step"] for event in job.of_kind("checkpoint")]
    assert [step for step in written if step < joined][-1] < joined - 1, "others were due before the view changed"


@pytest.mark.full
def test_saved_on_three_workers_and_resumed_on_others(undisturbed: Callable[..., Job], tmp_path: Path) -> None:
    """Also with replicated state: a checkpoint does not depend on where the state lies."""
    settings, plain = [*TRAINING, *LAMB], chaos(tmp_path)
    saving = chaos(tmp_path, checkpoints={"directory": str(tmp_path / "first" / "checkpoints"), "every": 15})
    first = run_job(
        tmp_path / "first",
        [*settings, *saving, *SHARDED, "workers.count=3", "checkpoint.every_steps=15", "train.steps=40"],
    )
    assert first.error is None, first.told()
    saved = sorted(path.name for path in (first.directory / "checkpoints").iterdir())
    assert saved == ["step-00000015", "step-00000030", "step-00000040"]
    for workers, state in ((4, SHARDED), (1, [])):
        resume = f"checkpoint.resume={first.directory / 'checkpoints' / saved[1]}"
        job = run_job(tmp_path / f"on {workers}", [*settings, *plain, *state, f"workers.count={workers}", resume])
        assert job.error is None, job.told()
        assert [event["step"] for event in job.of_kind("resumed")] == [30]
        assert job.summary["params_sha256"] == undisturbed(*LAMB).summary["params_sha256"], workers


@pytest.mark.full
@pytest.mark.jobs
def test_one_is_lost_as_another_is_about_to_leave(undisturbed: Callable[..., Job], tmp_path: Path) -> None:
    """Worker 0 is lost, which mirrors the shards of the last one. That one was to leave, and stays in its place."""
    lost = {"step": 20, "moment": "handing over", "rank": 0, "how": "kill", "workers": 3}
    fewer = {"step": 20, "workers": 2}
    settings = [*SHARDED, "workers.count=3", "train.steps=60", "elastic.replace=false"]
    job = run_job(tmp_path / "run", [*TRAINING, *settings, *chaos(tmp_path, events=[lost], phases=[fewer])])
    assert_same_training(job, undisturbed("train.steps=60"))
    assert [event["worker"] for event in job.of_kind("failure")] == [0], "the one that was to leave has not failed"
    assert not job.of_kind("went_back")
    pids = [[worker["pid"] for worker in view["workers"]] for view in job.views]
    assert pids == [pids[0], pids[0][1:]]
    assert [job.statuses[pid] for pid in pids[1]] == [0, 0]


@pytest.mark.full
@pytest.mark.jobs
def test_one_that_is_replaced_stays_until_a_loss_is_recovered_from(
    undisturbed: Callable[..., Job], tmp_path: Path
) -> None:
    """Worker 1 is lost as worker 0 hands over, whose shards it mirrors. Then worker 0 leaves after all."""
    lost = {"step": 10, "moment": "handing over", "rank": 1, "how": "kill", "workers": 3}
    end = tmp_path / "end"

    async def replace(supervisor: Supervisor, job: Job) -> None:
        await until("10 steps", lambda: len(job.metrics) >= 10)
        await supervisor.views.replace(0)
        await until("it to be replaced", lambda: len(job.views) > 2 and 0 not in members(supervisor))
        await until("three workers", lambda: len(job.views[-1]["workers"]) == 3)
        end.touch()

    settings = [*SHARDED, "workers.count=3", "train.steps=60"]
    policy = chaos(tmp_path, events=[lost], until=str(end))
    job = run_job(tmp_path / "run", [*TRAINING, *settings, *policy], replace)
    assert_same_training(job, undisturbed("train.steps=60"))
    assert [event["worker"] for event in job.of_kind("failure")] == [1]
    assert not job.of_kind("went_back")
    replaced = job.views[0]["workers"][0]["pid"]
    assert job.views[1]["reason"] == "failure" and replaced in [each["pid"] for each in job.views[1]["workers"]]
    assert replaced not in [each["pid"] for each in job.views[-1]["workers"]] and job.statuses[replaced] == 0


def members(supervisor: Supervisor) -> list[int]:
    return [worker.number for worker in supervisor.processes.members()]
