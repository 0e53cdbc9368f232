"""What the supervisor makes of what its workers say and of their ends, without waiting for it: see `supervised`."""

from __future__ import annotations

import pytest
from supervised import Stage, play

from kfuse.elastic.supervisor import Elasticity

TWO = Elasticity(2, 1, 3)


def test_an_interpreter_that_takes_long_to_end_is_no_failure() -> None:
    """After a worker's goodbye no heartbeat is due. A process that never ends is killed all the same."""

    async def script(stage: Stage) -> None:
        await stage.train(0, 1)
        await stage.says(0, "record", kind="summary", data={})
        await stage.says(0, "goodbye")
        await stage.says(1, "goodbye")
        await stage.settle(30)
        assert not stage.workers[0].killed
        stage.workers[0].end(0)
        await stage.settle(100)
        assert stage.workers[1].killed

    stage, error = play(Elasticity(2, 1, 2, script=True), script)
    assert error is not None and "worker 1" in error and len(stage.events("failure")) == 1


@pytest.mark.parametrize("silent_s", [9, 11])
def test_a_silent_worker_is_killed_and_replaced(silent_s: int) -> None:
    async def script(stage: Stage) -> None:
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

    stage, error = play(TWO, script)
    assert error is None
    assert len(stage.events("failure")) == (silent_s > 10)


@pytest.mark.parametrize("seconds", [0.03, 2.0])
@pytest.mark.parametrize("reasons", [("terminated",) * 3, ("interrupted",) * 2, ("interrupted", "terminated")])
def test_the_same_signal_within_a_second_counts_once(reasons: tuple[str, ...], seconds: float) -> None:
    """What passes a signal on may do so twice. Until a later or another one, workers may write a last checkpoint."""
    at_once = seconds < 1 and len(set(reasons)) == 1

    async def script(stage: Stage) -> None:
        await stage.train(0)
        for reason in reasons:
            stage.supervisor.stop(reason)
            await stage.settle(seconds)
        await stage.settle(5)
        assert len(stage.workers[0].of_kind("stop")) == 1
        assert stage.workers[0].killed != at_once
        if at_once:
            await stage.end_well(0)

    stage, error = play(Elasticity(1, 1, 1), script)
    assert error is None and stage.supervisor.job.stopping == reasons[0]


def test_workers_that_do_not_stop_are_killed() -> None:
    async def script(stage: Stage) -> None:
        await stage.train(0, 1)
        stage.supervisor.stop("terminated")
        for _ in range(19):
            for number in (0, 1):
                await stage.says(number, "alive")
            await stage.settle(1)
        assert not stage.workers[0].killed
        await stage.settle(2)
        assert stage.workers[0].killed and stage.workers[1].killed

    play(TWO, script)
