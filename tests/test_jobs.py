"""Jobs that are disturbed train as one worker to which nothing happens, bit by bit, and each sample is used once.

A row of the table is a training, what happens to its workers (`chaos.Chaos`'s arguments; all of it must have happened,
and been seen for what it was), more settings, the number of workers at first, and what else is expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import cycle, groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, assert_same_training, changes, chaos, events, pids, reference, run_job, words
from hosts import NamedHosts

SEEN_AS = {
    "kill": "was ended by SIGKILL",
    "exception": "ended with exit status 1",
    "exit": "ended with exit status 3",
    "stop": "and was killed",
    "stuck_gil": "sent no heartbeat",
}

# -- trainings --------------------------------------------------------------------------------------------------------

ALL = "workers.max=4 comm=reproducible data=digits lr.base=0.003 batch.size=16 batch.micro=4"
ADAPTS = f"{ALL} batch.max=64 train.clip_norm=0.5 train.heldout_every=20"
MLP = "model=mlp model.dropout=0.1"
SMALL = f"{ADAPTS} {MLP} model.hidden=[24] comm.bucket_mb=0.002"
FEW = f"{SMALL} batch.micro=16 batch.max=16 train.epochs=1"
WIDE = f"{ADAPTS} {MLP} model.hidden=[200,100] comm.bucket_mb=0.06"
LAMB = f"{WIDE} train.epochs=2 optimizer=lamb train.precision=bf16-true"
NORMALISED = f"{ADAPTS} model._target_=faulty.Faulty comm.bucket_mb=0.002"  # with BatchNorm and dropout
ADASCALE = f"{NORMALISED} train.epochs=4 lr.scaling=adascale"
# Four blocks of parameters in each bucket: the shards of up to four workers.
MIRRORED = f"{ALL} {MLP} model.hidden=[160,96] comm.bucket_mb=0.06 batch.size=48 train.clip_norm=0.5 train.steps=80"
RATES = f"{ALL} model=mlp model.hidden=[24] comm.bucket_mb=0.002 batch.max=64 lr.scaling=adascale lr.decay=linear"
RATES += " optimizer=sgd train.epochs=null train.steps=120"
MUON = f"{SMALL} model.hidden=[24,16] optimizer=muon optimizer.arithmetic=fp32 train.epochs=null train.steps=60"
FOUR, ONCE = f"{SMALL} train.epochs=4", f"{SMALL} train.epochs=1"
SHARDS, SHORT = f"{WIDE} train.steps=60", f"{WIDE} train.steps=30"
SHARDED, REPLICATED = "comm.state=sharded", "comm.state=replicated"
STAYS, GRACE, SAVES = "elastic.replace=false", "elastic.grace_s=2", "checkpoint.every_steps=1"
OFTEN, HANGS = "elastic.max_failures=20", "elastic.max_failures=8 elastic.heartbeat_timeout_s=1.2"

# -- what some rows are for -------------------------------------------------------------------------------------------


def grows_and_shrinks(job: Job) -> None:
    """Nobody is restarted, and a transport that reproducible sums do not have is refused."""
    [clipped] = job.of_kind("clipped")
    assert "allreduce" in clipped["note"] and "comm_reproducible" in clipped["note"]
    for view in job.views:
        assert view["pause_s"] == pytest.approx(view["regroup_s"] + view["transfer_s"])
        assert [worker["rank"] for worker in view["workers"]] == list(range(len(view["workers"])))
    assert all(view["regroup_s"] > 0 and view["transfer_s"] > 0 for view in job.views[1:])
    for before, after in pairwise(map(pids, job.views)):
        staying = min(len(before), len(after))
        assert after[:staying] == before[:staying]
    assert len(job.statuses) == 6 and set(job.statuses.values()) == {0}
    assert [n for n, _ in groupby(record["workers"] for record in job.metrics)] == [1, 2, 3, 1, 4]


def has_one_micro_batch_a_step(job: Job) -> None:
    assert {record["micro_batches"] for record in job.metrics} == {1}


def starts_three_anew(job: Job) -> None:
    assert [view["reason"] for view in (job.views[0], job.views[-1])] == ["start", "restart"]
    assert job.of_kind("checkpoint")[-1]["step"] == job.summary["steps"], "the end of a run is in a checkpoint"
    assert len(job.pids) == 6


def leaves(*ranks: int) -> Callable[[Job], None]:
    def check(job: Job) -> None:
        assert pids(job.views[-1]) == [pid for rank, pid in enumerate(pids(job.views[0])) if rank not in ranks]
        assert {view["reason"] for view in job.views[1:]} == {"notice"}
        assert set(job.statuses.values()) == {0}

    return check


def replaces_all(job: Job) -> None:
    assert not {*pids(job.views[0])} & {*pids(job.views[-1])}


def kills_after_the_grace(job: Job) -> None:
    [failure] = job.of_kind("failure")
    assert failure["worker"] == job.of_kind("notice")[0]["worker"] == 1
    assert failure["how"] == "did not leave within 2 s of its notice and was killed"


def takes_no_place(job: Job) -> None:
    """The one that was to leave has not failed, and stays in its place."""
    assert [event["worker"] for event in job.of_kind("failure")] == [0]
    first, last = map(pids, job.views)
    assert last == first[1:] and [job.statuses[pid] for pid in last] == [0, 0]


def waits_for_the_writer(job: Job) -> None:
    written = [event["step"] for event in job.of_kind("checkpoint")]
    joined = job.views[1]["step"]
    assert [step for step in written if step < joined][-1] < joined - 1, "others were due before the view changed"


def had_no_copy(job: Job) -> None:
    for back in job.of_kind("went_back"):
        assert back["steps"] in (7, 8, 9) and "no worker has this optimizer state any more" in back["why"], back


def has_copies_beside(*counts: int) -> Callable[[Job], None]:
    """Where not all copies can be on another host, an event says of how many workers."""

    def check(job: Job) -> None:
        assert [len(told["workers"]) for told in job.of_kind("copy_beside")] == [*counts]

    return check


def ends_at_its_length(job: Job) -> None:
    assert {record["batch_size"] for record in job.metrics} == {8, 16, 32, 64}
    assert job.summary["exit_reason"] == "steps" and job.summary["steps"] < 120
    assert job.metrics[-1]["lr"] < 0.003 / 120 * 4


# -- the table --------------------------------------------------------------------------------------------------------


def row(job: tuple[Any, ...], expected: dict[str, Any] | None = None, marks: str = "full jobs") -> Any:
    """job: name, training, what happens (`elastic_job.events`), settings, workers. marks: "" for the quick tests."""
    name, training, *more = job
    given = (training, *more, *("", "", 1)[len(more) :], expected or {})
    return pytest.param(*given, id=name, marks=[getattr(pytest.mark, mark) for mark in marks.split()])


def every_moment(hows: Iterable[str], workers: int) -> str:
    """These kinds of end, in turn, at each moment of a job that has so many workers, each rank in turn."""
    last, how, of = workers - 1, cycle(hows), f"of {workers}"
    happens = [
        f"6 forward 0 by {next(how)} {of}",
        f"12 mid_reduction {1 % workers} by {next(how)} {of}",
        f"18 between_reduction_and_update {2 % workers} by {next(how)} {of}",
    ]
    if "exception" not in hows:  # in the thread that writes it is a failed write, and no worker's end
        happens.append(f"45 checkpoint_write 0 by {next(how)} {of}")
    # Newcomers: while they boot, connect and receive; and, where another has the state, its source.
    happens += [f"52 forward {last} {of}", "53 boot 0"]
    happens += [f"{step} {moment} {last} by {next(how)}" for step, moment in ((54, "joining"), (55, "receiver"))]
    if workers > 2:
        happens.append(f"56 source 0 by {next(how)}")
        # A second end in the recovery from a first one.
        happens += [f"70 mid_reduction {last} {of}", f"71 recovery 0 by {next(how)}"]
        happens += [f"80 forward 0 {of}", f"81 recovery 1 by {next(how)}"]
    return ", ".join(happens)


def ends(hows: str, workers: int, marks: str = "full jobs") -> Any:
    happens, settings = every_moment(hows.split(), workers), f"{HANGS} checkpoint.every_steps=15"
    return row((f"{hows} of {workers} at every moment", ADASCALE, happens, settings, workers), {}, marks)


def left(*ranks: int, settings: str = SHARDED, marks: str = "full jobs") -> Any:
    """In mid-step these get notice, and the others take their share."""
    happens = ", ".join(f"20 mid_reduction {rank} by notice of 3" for rank in ranks)
    expected = {"gates": f"50:{3 - len(ranks)}", "noticed": [*ranks], "check": leaves(*ranks)}
    return row((f"notice to {ranks} {settings}", SHARDS, happens, f"{STAYS} {settings}", 3), expected, marks)


def noticed(moment: str) -> Any:
    happens = f"10 forward 2 by notice of 3, 20 {moment} 0 by notice of 3"
    settings, expected = f"{SHARDED} checkpoint.every_steps=25", {"gates": "59:3", "noticed": 2, "left": 3}
    return row((f"notice at {moment}", SHARDS, happens, settings, 3), expected)


def sent(moment: str, rank: int, workers: int, marks: str = "full") -> Any:
    """All workers live, form a new view, and rank 1 is an update behind: one is killed after some of 35 messages."""
    happens = f"30 reduced 1 by lose_contact, 31 {moment} {rank} in message 12"
    name = f"rank {rank} of {workers} is killed as it is {moment}"
    return row((name, ONCE, happens, "", workers), {"failures": 1, "chunk_bytes": 1024}, marks)


PHASES = [{"step": 8, "workers": 2, "batch_size": 64}, {"step": 30, "workers": 3, "batch_size": 32}]
PHASES += [{"step": 45, "batch_size": 8}]
AROUND = "40 after_step 0 of 3, 59 evaluation 1 of 3, 79 evaluated 0, 90 after_step 3 of 4"  # `evaluated`: nobody knows
SEVERAL = (
    "12 mid_reduction 1 of 4, 12 mid_reduction 2 of 4, 50 forward 0 of 4, 50 mid_reduction 1 of 4, 50 forward 3 of 4"
)
HANG_TOO = f"{SEVERAL}, 80 mid_reduction 0 by stop of 4, 80 forward 2 by exception of 4"
UPDATING = "22 updating 2 of 3, 30 sharing 0 of 3, 38 updating 1 of 3, 46 sharing 2 of 3"  # not all have updated
OF_A_STEP = f"6 mid_reduction 0 of 3, 14 point 1 of 3, {UPDATING}, 54 point 0 of 3"
RESHARDING = (
    "10 forward 1 of 4, 11 resharding 2, "  # the last one of four before; its mirror is rank 0
    "25 checkpoint_write 0 of 4, 40 sharing 3 of 4, "
    "41 resharded 1"  # shards and mirrors are where they belong: all is as before a first loss
)
OF_MUON = "15 mid_reduction 0, 25 sharing 1, 35 between_reduction_and_update 0"
STILL: Any = {"alike": {"adaptive": False}}
COMES_AND_GOES = "1 start, 2 grow, 3 grow, 1 shrink, 4 grow"

ROWS = [
    # Planned changes, the last one while workers are on their way out.
    row(
        ("growth and shrinkage by schedule", FOUR),
        {
            **{"phases": "5:2 25:3 45:1 51:4", "gates": "20:2 40:3 65:4", "failures": 0, "views": COMES_AND_GOES},
            **{"topologies": [{"step": 10, "topology": "allreduce"}], "check": grows_and_shrinks},
        },
        "",
    ),
    # Those without a micro-batch wait, lose the only worker that had one, and take over.
    row(
        ("more workers than micro-batches", FEW, "20 mid_reduction 0, 30 mid_reduction 1", "", 3),
        {"failures": 2, "check": has_one_micro_batch_a_step, **STILL},
    ),
    # By one of them: if each killed itself, a slow one might learn of the others' end before, and recover from it.
    row(
        ("all workers are lost", FOUR, "60 forward 0 by kill_all of 3", "", 3),
        {"saves": 25, "failures": 3, "resumed": [50], "check": starts_three_anew},
    ),
    # A transfer of state that ends in its middle.
    sent("sending", 0, 3, ""),  # rank 2 has made the update, perhaps not all that follows: it takes over
    sent("receiving", 1, 3),
    sent("sending", 0, 2),  # rank 1 keeps its older state, and updates again
    row(
        ("half of a newcomer's state is none", ONCE, "21 sending 0 in message 12"),
        {"phases": "12:2", "gates": "40:2", "saves": 10, "resumed": [10], "chunk_bytes": 1024},
    ),
    # Ends of all kinds.
    row(("where no gradient is under way", ADASCALE, AROUND, HANGS, 4)),
    ends("kill", 2),
    *(ends(hows, 3) for hows in ("kill exit", "exception", "stuck_gil stop kill")),
    *(ends(hows, 4, "long jobs") for hows in ("kill exit", "exception", "stuck_gil stop kill")),
    row(("several at once, and all but one", ADASCALE, HANG_TOO, HANGS, 4)),
    # Notice: workers leave as planned, at any moment, also as a view is formed or a worker joins.
    left(1, marks=""),
    left(0, settings=""),
    *(left(*ranks) for ranks in ((0,), (1, 2), (0, 1))),
    *(noticed(at) for at in ("evaluation", "checkpoint_write", "boot", "joining", "handing over", "sending")),
    row(
        ("notice to all", SHARDS, "20 forward 0 by notice_all of 3", SHARDED, 3),
        {"gates": "59:3", "noticed": [0, 1, 2], "check": replaces_all},
    ),
    row(
        ("notice to one that is stuck", SHARDS, "20 forward 1 by notice_stuck of 3", f"{SHARDED} {STAYS} {GRACE}", 3),
        {"check": kills_after_the_grace},
    ),
    # Sharded state moves as workers come and go.
    row(
        ("shards of workers that join and leave", LAMB, "", SHARDED),
        {"phases": "5:2 20:3 35:1 50:4", "gates": "15:2 30:3 45:1 60:4", "failures": 0, "views": COMES_AND_GOES},
    ),
    # The leader still writes the last one, so the next one has to wait. The worker that joins asks for it too.
    row(
        (
            "a worker joins while a checkpoint is due",
            SHORT,
            "2 checkpoint_write 0 by linger of 1",
            f"{SHARDED} {SAVES}",
        ),
        {"phases": "4:2", "gates": "15:2", "views": "1 start, 2 grow", "failures": 0, "check": waits_for_the_writer},
    ),
    # Worker 0 mirrors the shards of the last one.
    row(
        ("one is lost as another is about to leave", SHARDS, "20 handing over 0 of 3", f"{SHARDED} {STAYS}", 3),
        {"phases": "20:2", "check": takes_no_place},
    ),
    # Where workers are lost, mirrors have their shards: of those that are lost no two are a worker and its mirror.
    row(("at each moment of a step", f"{MIRRORED} optimizer=lamb", OF_A_STEP, f"{SHARDED} {OFTEN}", 3), STILL),
    row(("shards move", MIRRORED, RESHARDING, f"{SHARDED} {OFTEN} checkpoint.every_steps=12", 4), STILL),
    row(
        ("owner and mirror together", MIRRORED, "31 updating 1 of 4, 31 updating 2 of 4", SHARDED, 4),
        {"saves": 12, "went_back": [24], "check": had_no_copy, **STILL},
    ),
    row(
        ("no mirror", MIRRORED, "20 updating 1 of 3, 45 forward 0 of 3", f"{SHARDED} elastic.redundancy=none", 3),
        {"saves": 12, "went_back": [12, 36], "check": had_no_copy, **STILL},
    ),
    row(
        ("a host of two is lost", MIRRORED, "20 updating 1 by kill_host of 4", f"{SHARDED} {STAYS}", 4),
        {"hosts": "aabb", "left": 2, "check": has_copies_beside(), **STILL},
    ),
    row(
        ("a host of one is lost", MIRRORED, "20 updating 3 by kill_host of 4", f"{SHARDED} {STAYS}", 4),
        {"hosts": "aaab", "left": 3, "check": has_copies_beside(2), **STILL},
    ),
    # Schedules, and Muon.
    row(
        ("rates and lengths as the batch changes", RATES, "12 forward 0, 35 after_step 1", "workers.min=2", 2),
        {"alike": {"phases": PHASES, "adaptive": False}, "failures": 2, "check": ends_at_its_length},
    ),
    *(row((f"muon, {state}", MUON, OF_MUON, state, 2), {"failures": 3}) for state in (REPLICATED, SHARDED)),
]


@pytest.mark.parametrize(("training", "happens", "settings", "workers", "expected"), ROWS)
def test_a_disturbed_job_trains_as_an_undisturbed_one(
    training: str, happens: str, settings: str, workers: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    alike, saves = expected.get("alike", {}), expected.get("saves")
    given = {"events": events(happens), **alike}
    given |= {name: changes(expected[name]) for name in ("phases", "gates") if name in expected}
    given |= {name: expected[name] for name in ("topologies", "chunk_bytes") if name in expected}
    if saves is not None:
        given["checkpoints"] = {"directory": str(tmp_path / "run" / "checkpoints"), "every": saves}
        settings += f" checkpoint.every_steps={saves}"
    launcher = NamedHosts(expected["hosts"], tmp_path / "run.log") if "hosts" in expected else None
    chosen = words(training, settings, f"workers.count={workers}")
    job = run_job(tmp_path / "run", [*chosen, *chaos(tmp_path, **given)], launcher=launcher)
    assert_same_training(job, reference(words(training), **alike))
    failures = {failure["pid"]: failure["how"] for failure in job.of_kind("failure")}
    for index, event in enumerate(given["events"]):
        mark = tmp_path / "events" / f"event-{index}"
        assert mark.exists(), (event, job.told())
        if event["how"] in SEEN_AS:
            assert SEEN_AS[event["how"]] in failures.get(json.loads(mark.read_text())["pid"], ""), (event, job.told())
    assert len(job.of_kind("failure")) == expected.get("failures", len(job.of_kind("failure")))
    views = ", ".join(f"{len(view['workers'])} {view['reason']}" for view in job.views)
    assert views == expected.get("views", views)
    assert len(job.views[-1]["workers"]) == expected.get("left", len(job.views[-1]["workers"]))
    back = expected.get("went_back", [])
    assert [event["step"] for event in job.of_kind("went_back")] == back
    assert [event["step"] for event in job.of_kind("resumed")] == expected.get("resumed", back)
    assert job.of_kind("corruption") == []
    if "noticed" in expected:
        assert_noticed(job, expected["noticed"])
    expected.get("check", lambda job: None)(job)


def assert_noticed(job: Job, expected: int | list[int]) -> None:
    """Which workers, or how many, were given notice. Each has a place, and none was lost or made a step be repeated."""
    assert job.of_kind("failure") == [] and set(job.statuses.values()) <= {0, -9, -15}
    assert not {"failure", "restart"} & {view["reason"] for view in job.views}
    notices = job.of_kind("notice")
    assert all(event["host"] for event in notices if event["pid"])  # else it booted
    assert expected in (len(notices), sorted(event["worker"] for event in notices))


@pytest.mark.full
@pytest.mark.jobs
def test_the_undisturbed_run_adapts() -> None:
    """Otherwise equal bits would say little: batch size and learning rate follow what was measured."""
    metrics = reference(words(ADASCALE)).metrics
    assert len({record["batch_size"] for record in metrics}) >= 3
    assert len({record["lr"] for record in metrics}) > 20
    assert max(record["grad_norm"] for record in metrics) > 0.5  # clipping acts
