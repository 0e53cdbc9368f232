"""What the supervisor makes of what its workers say and of their ends, without waiting for it: see `supervised`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from limits import limits
from supervised import Stage, play

from kfuse.elastic import protocol

TWO = limits(2, 1, 3)
SCRIPTS = limits(2, 1, 2, script=True)
TRACEBACK = ("Traceback (most recent call last):", '  File "a.py", line 1', "TypeError: bad")
BEGINS = {"step": 0, "restarts": False}


def job(elasticity: dict[str, Any], error: str | None = None, **events: int) -> Callable[..., Callable[..., None]]:
    """A test: the script acts for the workers. The job ends with this error, after so many events of these kinds.

    A script's arguments after the stage are the test's; `error` among them is the job's.
    """

    def decorate(script: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            stage, found = play(elasticity, lambda stage: script(stage, **arguments))
            assert found == arguments.get("error", error)
            assert {kind: len(stage.events(kind)) for kind in events} == events

        _, *rest = inspect.signature(script).parameters.values()
        test.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
        return test

    return decorate


@job(TWO)
async def test_a_worker_whose_joining_is_heard_after_the_summary_is_told_of_the_end(stage: Stage) -> None:
    """A training of a step or two: the messages of two workers have no common order."""
    await stage.boot(0, 1)
    await stage.join(0)
    await stage.says(0, "record", kind="summary", data={})
    await stage.join(1)
    assert stage.workers[1].of_kind("over")
    for worker in stage.workers:
        worker.end(0)


# -- silence, and stops -----------------------------------------------------------------------------------------------


@job(SCRIPTS, "worker 1 sent no heartbeat for 120 s and was killed after training had ended", failure=1)
async def test_an_interpreter_that_takes_long_to_end_is_no_failure(stage: Stage) -> None:
    """After a worker's goodbye no heartbeat is due. A process that never ends is killed all the same."""
    await stage.train(0, 1)
    await stage.says(0, "record", kind="summary", data={})
    await stage.says(0, "goodbye")
    await stage.says(1, "goodbye")
    await stage.settle(30)
    assert not stage.workers[0].killed
    stage.workers[0].end(0)


@pytest.mark.parametrize("silent_s", [9, 11])
@job(TWO)
async def test_a_silent_worker_is_killed_and_replaced(stage: Stage, silent_s: int) -> None:
    await stage.train(0, 1)
    for _ in range(silent_s):
        await stage.says(0, "alive")
        await stage.settle(1)
    assert stage.workers[1].killed == (silent_s > 10)
    if silent_s > 10:
        assert stage.workers[0].view == [0]
        await stage.join(0)
        await stage.boot(2)
        assert stage.workers[0].view == stage.workers[2].view == [0, 2]
    await stage.end_well(0, len(stage.workers) - 1)
    await stage.ended()
    assert len(stage.events("failure")) == (silent_s > 10)


@pytest.mark.parametrize("seconds", [0.03, 2.0])
@pytest.mark.parametrize("reasons", [("terminated",) * 3, ("interrupted",) * 2, ("interrupted", "terminated")])
@job(limits(1, 1, 1))
async def test_the_same_signal_within_a_second_counts_once(
    stage: Stage, reasons: tuple[str, ...], seconds: float
) -> None:
    """What passes a signal on may do so twice. Until a later or another one, workers may write a last checkpoint."""
    at_once = seconds < 1 and len(set(reasons)) == 1
    await stage.train(0)
    for reason in reasons:
        stage.supervisor.stop(reason)
        await stage.settle(seconds)
    await stage.settle(5)
    assert len(stage.workers[0].of_kind("stop")) == 1
    assert stage.workers[0].killed != at_once
    assert stage.supervisor.job.stopping == reasons[0]
    if at_once:
        await stage.end_well(0)


@job(TWO)
async def test_workers_that_do_not_stop_are_killed(stage: Stage) -> None:
    await stage.train(0, 1)
    stage.supervisor.stop("terminated")
    for _ in range(19):
        for number in (0, 1):
            await stage.says(number, "alive")
        await stage.settle(1)
    assert not stage.workers[0].killed
    await stage.settle(2)
    assert stage.workers[0].killed and stage.workers[1].killed


# -- all are lost -----------------------------------------------------------------------------------------------------


@job(TWO, "no worker is left: the last one was ended by SIGKILL")
async def test_all_lost_without_checkpoints_is_one_clear_line(stage: Stage) -> None:
    await stage.train(0, 1)
    await stage.lose(0, 1)


@job(limits(1, 1, 2), "the workers that had the training's state are lost")
async def test_newcomers_alone_have_nothing_to_go_on_with(stage: Stage) -> None:
    """The only worker with the state is lost as it hands it over, and there are no checkpoints."""
    await stage.train(0)
    await stage.says(0, "resize", workers=2)
    await stage.boot(1)
    await stage.join(0, 1)
    await stage.lose(0)
    await stage.join(1)
    await stage.says(1, "record", kind="start", data=BEGINS)


@job(limits(3, 1, 3, restart=True, replace=False), failure=4)
async def test_a_worker_that_dies_as_the_job_starts_anew_is_replaced(stage: Stage) -> None:
    await stage.train(0, 1, 2)
    await stage.lose(0, 1, 2)
    await stage.lose(3)
    await stage.boot(4, 5, 6)
    assert stage.workers[4].view == [4, 5, 6]
    await stage.join(4, 5, 6)
    await stage.end_well(4, 5, 6)


# -- crash loops ------------------------------------------------------------------------------------------------------


@job(limits(40, 1, 40, replace=False, max_failures=2), failure=20)
async def test_losses_at_one_moment_make_one_view_that_is_encoded_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ends come one after the other, while no time passes. Each is a failure, at its rank; together one loss."""
    await stage.train(*range(40))
    encoded, encode = list[str](), protocol.encode
    monkeypatch.setattr(protocol, "encode", lambda message: encoded.append(message["type"]) or encode(message))
    for number in range(1, 21):
        stage.workers[number].end(-9)
        for _ in range(10):
            await asyncio.sleep(0)
    await stage.settle()
    assert stage.workers[0].view == [0, *range(21, 40)]
    assert (
        encoded == ["view"] and [len(worker.of_kind("view")) for worker in stage.workers] == [2] + [1] * 20 + [2] * 19
    )
    assert [failure["rank"] for failure in stage.events("failure")] == [*range(1, 21)]
    await stage.join(0, *range(21, 40))
    await stage.end_well(0, *range(21, 40))


@pytest.mark.parametrize("error", [None, "3 workers were lost in a row, the last one was ended by SIGKILL"])
@job(limits(2, 1, 2, max_failures=3))
async def test_losses_without_a_step_in_between_end_the_job(stage: Stage, error: str | None) -> None:
    await stage.train(0, 1)
    for number in (1, 2):
        await stage.lose(number)
        await stage.join(0)
        await stage.boot(number + 1)
        await stage.join(0, number + 1)
        if error is None:
            await stage.steps(0, number)
    await stage.lose(3)
    if error is None:
        await stage.join(0)
        await stage.end_well(0)
    else:  # it may write a last checkpoint, and does not end in time
        assert stage.workers[0].of_kind("failed")[0]["saves"] and not stage.workers[0].killed
        for _ in range(20):
            await stage.says(0, "alive")
            await stage.settle(1)
        assert stage.workers[0].killed


@job(limits(2, 1, 2, max_failures=2), "workers lose contact again and again: a message was late")
async def test_workers_that_lose_contact_without_progress_end_the_job(stage: Stage) -> None:
    """They reach each other's hosts, so none has to go. Each is told of the end, and the first one saves its state."""
    await stage.train(0, 1)
    for generation in (1, 2):
        await stage.lose_contact(1, generation)
        await stage.cut()
        await stage.join(0, 1)
    assert [each["saves"] for worker in stage.workers for each in worker.of_kind("failed")] == [True, False]
    assert not stage.workers[0].killed
    stage.workers[0].end(1)


# -- workers that come, leave, or cannot be started -------------------------------------------------------------------


@job(limits(1, 1, 2), failure=0, ready=1)
async def test_a_newcomer_that_comes_too_late_is_sent_away(stage: Stage) -> None:
    """The others never come to its view, and their end is its end. No failure is reported."""
    await stage.train(0)
    await stage.says(0, "resize", workers=2)
    await stage.boot(1)
    await stage.end_well(0)
    await stage.ended()
    assert stage.workers[1].killed


@job(limits(4, 3, 4, replace=False), failure=2)
async def test_without_replacements_the_fewest_are_kept(stage: Stage) -> None:
    await stage.train(0, 1, 2, 3)
    await stage.lose(3)
    await stage.join(0, 1, 2)
    assert len(stage.workers) == 4
    await stage.lose(2)
    assert stage.workers[0].view == [0, 1] and len(stage.workers) == 5
    await stage.end_well(0, 1)


@job(limits(1, 1, 2, max_failures=3), failure=3, quit=1)
async def test_newcomers_that_cannot_boot_do_not_end_the_training(stage: Stage) -> None:
    await stage.train(0)
    await stage.says(0, "resize", workers=2)
    for number in (1, 2, 3):
        await stage.lose(number)
    assert len(stage.workers) == 4
    await stage.end_well(0)


@job(limits(1, 1, 3), clipped=1)
async def test_where_a_worker_cannot_be_started_the_others_go_on(stage: Stage) -> None:
    await stage.train(0)
    stage.starts_fail = True
    await stage.says(0, "resize", workers=3)
    await stage.end_well(0)


def test_where_no_worker_can_be_started_the_job_ends_in_one_line() -> None:
    _, error = play(TWO, lambda stage: stage.settle(), starts_fail=True)
    assert error == "the launcher cannot start workers: no machine has room"


@pytest.mark.parametrize("generation", [1, 2])
@job(limits(3, 1, 4))
async def test_a_worker_that_is_to_leave_is_in_the_view_that_recovers(stage: Stage, generation: int) -> None:
    """It has lost contact itself, in the view before or on its way out of it. Then it leaves all the same."""
    await stage.train(0, 1, 2)
    await stage.says(0, "resize", workers=2)
    assert stage.workers[2].view == [0, 1]
    await stage.lose_contact(2, generation)
    await stage.cut()
    assert stage.workers[2].view == [0, 1, 2]
    await stage.join(0, 1, 2)
    assert stage.workers[2].view == [0, 1]
    await stage.end_well(0, 1, 2)


@job(limits(3, 1, 4))
async def test_one_that_has_left_is_in_no_view(stage: Stage) -> None:
    """Also where its word of it comes after a view that recovers was formed with it."""
    await stage.train(0, 1, 2)
    await stage.says(0, "resize", workers=2)
    await stage.lose(0)
    assert stage.workers[1].view == [1, 2]
    await stage.says(2, "left")
    assert stage.workers[1].view == [1]
    await stage.join(1)
    await stage.end_well(1, 2)


# -- scripts that end early or badly ----------------------------------------------------------------------------------


@job(SCRIPTS, quit=1)
async def test_the_others_go_on_without_a_script_that_ends_before_it_joins(stage: Stage) -> None:
    stage.workers[1].end(0)
    await stage.settle()
    await stage.train(0)
    assert len(stage.workers) == 2, "none is started in its place"
    await stage.end_well(0)


@job(limits(2, 1, 2), waiting=1)
async def test_a_worker_that_waits_for_a_slot_is_named_once(stage: Stage) -> None:
    await stage.train(0, 1)
    stage.has_room = False
    await stage.lose(1)
    for _ in range(120):
        await stage.says(0, "alive")
        await stage.settle(1)
    assert [event["worker"] for event in stage.events("waiting")] == [2]
    await stage.end_well(0)
    stage.workers[2].end(0)


@job(SCRIPTS, "worker 1 ended with exit status 1 after training had ended: TypeError: bad")
async def test_a_script_that_fails_after_its_training_has_failed(stage: Stage) -> None:
    await stage.train(0, 1)
    await stage.says(0, "record", kind="summary", data={})
    stage.workers[1].end(1, *TRACEBACK)
    await stage.settle()
    stage.workers[0].end(0)
    assert len(stage.workers) == 2, "what was trained is not trained again"


@job(SCRIPTS, "no worker is left: the last one ended with exit status 1: TypeError: bad")
async def test_an_error_of_all_scripts_ends_the_job_and_is_named(stage: Stage) -> None:
    await stage.train(0, 1)
    for worker in stage.workers:
        worker.end(1, *TRACEBACK)


@pytest.mark.parametrize(("trains", "comes"), [(True, False), (True, True), (False, False)])
@job(limits(2, 1, 3, script=True))
async def test_scripts_that_all_end_early_end_the_job_well(stage: Stage, trains: bool, comes: bool) -> None:
    """A newcomer that is proposed has no state yet, and does not go on alone."""
    if trains:
        await stage.train(0, 1)
        if comes:
            await stage.says(0, "resize", workers=3)
            await stage.boot(2)
        for number in (0, 1):
            await stage.says(number, "loop_ended", failed_at=None)
    for worker in stage.workers[:2]:
        worker.end(0)
    await stage.ended()
    assert stage.supervisor.job.outcome == ("loop_left" if trains else "not_trained")
    assert len(stage.workers) == 2 + comes


@pytest.mark.parametrize("ends", [True, False])
@job(SCRIPTS, quit=1, failure=0)
async def test_where_one_worker_leaves_the_loop_the_others_go_on(stage: Stage, ends: bool) -> None:
    """It ends, or does something else first."""
    await stage.train(0, 1)
    await stage.says(1, "loop_ended", failed_at=None)
    if ends:
        stage.workers[1].end(0)
    await stage.settle(1.2)
    assert stage.workers[0].view == [0] and len(stage.workers) == 2
    await stage.join(0)
    stage.workers[1].end(0)
    await stage.settle()
    assert len(stage.workers) == 2
    await stage.end_well(0)


@job(SCRIPTS)
async def test_one_that_is_to_leave_goes_on_where_the_only_other_has_left_its_loop(stage: Stage) -> None:
    await stage.train(0, 1)
    await stage.says(0, "resize", workers=1)
    assert stage.workers[1].view == [0]
    await stage.says(0, "loop_ended", failed_at=None)
    await stage.settle(1.2)
    assert stage.workers[1].view == [1]
    await stage.join(1)
    stage.workers[0].end(0)
    await stage.end_well(1)


@job(limits(1, 1, 2, script=True), "worker 0 ended with exit status 1: TypeError: bad")
async def test_one_that_is_to_join_does_not_train_alone_where_the_only_one_has_left_its_loop(stage: Stage) -> None:
    """It has none of the state. The other's process takes long to end."""
    await stage.train(0)
    await stage.says(0, "resize", workers=2)
    await stage.boot(1)
    assert stage.workers[1].view == [0, 1]
    await stage.says(0, "loop_ended", failed_at=None)
    await stage.settle(1.2)
    assert stage.workers[1].view == [0, 1]
    stage.workers[0].end(1, *TRACEBACK)


@pytest.mark.parametrize("failed_at", [1, None])
@pytest.mark.parametrize("status", [1, 0])
@job(SCRIPTS)
async def test_one_whose_error_ended_its_loop_long_before_its_process_is_replaced(
    stage: Stage, status: int, failed_at: int | None
) -> None:
    """The others have lost contact meanwhile. Where its script has caught the error, it has left.

    An error in the body of a script's own loop is not known to be one before the process has ended.
    """
    await stage.train(0, 1)
    await stage.says(1, "loop_ended", failed_at=failed_at)
    await stage.says(0, "broken", generation=1, why="rank 1 does not answer")
    await stage.settle()
    assert stage.workers[0].view == [0] and not stage.events("quit")
    await stage.join(0)
    await stage.steps(0, 1)
    stage.workers[1].end(status)
    await stage.settle()
    failed = status != 0
    assert (len(stage.events("failure")), len(stage.events("quit")), len(stage.workers)) == (
        failed,
        1 - failed,
        2 + failed,
    )
    if failed:
        await stage.boot(2)
        assert stage.workers[0].view == [0, 2]
        await stage.join(0, 2)
    await stage.end_well(*([0, 2] if failed else [0]))
