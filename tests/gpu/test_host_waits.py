"""What the host and a recorded device do at once in a step.

How often the host waits: once where workers may change, else never unless it is asked. So the device decides what a
host would. Messages travel beside the rest of backward and beside updates; the kernels of a step are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.order import Action, RecordedDevice, patched
from gpu.recorder import Recorder
from gpu.stand_in import StandInProcessGroup
from gpu.steps import OPTIMIZERS, Job, job
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import kfuse as kf
from kfuse.comm.sync.averaging import CentralModel, OuterMomentum
from kfuse.comm.sync.pair import Pair, Peer, Pull
from kfuse.kernels.dispatch import Kernel

AHEAD = 2  # steps that the host is ahead of the device, whatever it does


@pytest.mark.parametrize(("schedule", "optimizer"), [("all_to_all", "lamb"), ("tree", "wrapped fused adamw")])
def test_one_a_step_where_workers_may_change(schedule: str, optimizer: str) -> None:
    """The wait for the last message; after it the statistics of the step before have arrived."""
    with job(OPTIMIZERS[optimizer], 3, elastic=True, lag=AHEAD, schedule=schedule) as it:
        it.opt.reducer.loop_handles_lost_workers = True
        ranges = [range(0, 2), range(2, 3), range(3, 5)]
        for _ in range(4):
            waits = it.recorder.waits_of(lambda: it.planned_step(ranges))
            assert len(waits) == 1 and waits[0].startswith("polling"), waits
            waits = it.recorder.waits_of(lambda: it.opt.statistics.read(1))  # what policies and the loop's records need
            assert waits == []


def test_only_steps_that_compare_the_workers_wait_for_the_digests() -> None:
    with job(lag=AHEAD, check_every=2) as it:
        assert [bool(it.recorder.waits_of(it.bare_step)) for _ in range(4)] == [True, False, True, False]


def test_an_averaging_of_local_sgd_waits_for_its_message() -> None:
    with job(lag=AHEAD, parameters=torch.bfloat16) as it:
        for _ in range(2):
            assert it.recorder.waits_of(lambda: it.planned_step([range(0, 2), range(2, 4)], local=True)) == []
            waits = it.recorder.waits_of(it.opt.updates.average_models)
            assert len(waits) == 1 and waits[0].startswith("polling"), waits


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elastic", [False, True])
def test_sma_and_outer_steps_wait_for_nothing_of_their_own(elastic: bool, parameters: torch.dtype) -> None:
    """Where workers may be lost the tail is waited for, which comes later; a message that was aborted is sent again."""
    ranges = [range(0, 2), range(2, 4)]
    with job(lag=AHEAD, elastic=elastic, parameters=parameters) as it:
        weights = it.opt.updates.weights
        centre, outer = CentralModel(weights()), OuterMomentum(weights())
        for step in range(3):
            assert it.recorder.waits_of(lambda: centre.begin_step(weights(), it.group)) == []
            if elastic and step == 2:
                it.next_group()
            it.planned_step(ranges, local=True)
            waits = it.recorder.waits_of(lambda: centre.end_step(weights(), it.group, 0.5, 0.9))
            assert centre.difference is None and (elastic or waits == [])
            it.opt.updates.average_models(states=False)
            assert it.recorder.waits_of(lambda: outer.step(weights(), 0.7, 0.9)) == []
            it.opt.updates.weights_changed()


def test_what_a_wrapped_optimizer_waits_for() -> None:
    """Any optimizer can be wrapped, and most cannot leave a parameter out on the device."""
    with job(OPTIMIZERS["wrapped adamw"], lag=AHEAD) as it:
        for _ in range(3):
            assert [wait.split(" ")[0] for wait in it.recorder.waits_of(it.bare_step)] == ["tolist"]
    with job(OPTIMIZERS["wrapped adamw"], size=1, lag=AHEAD) as it:  # alone it knows what it left unused
        for _ in range(3):
            assert it.recorder.waits_of(it.bare_step) == []


def test_statistics_that_are_asked_for_wait() -> None:
    with job(lag=AHEAD) as it:
        it.step()
        assert [wait.split(" ")[0] for wait in it.recorder.waits_of(lambda: it.opt.stats)] == ["event.synchronize"]


def test_a_host_far_ahead_waits_at_last() -> None:
    """So that records do not pile up: here the device finishes nothing by itself."""
    with job(lag=None) as it:
        waits = [len(it.recorder.waits_of(it.bare_step)) for _ in range(12)]
        assert waits == [0] * 8 + [1] * 4


def test_a_host_ahead_still_knows_the_time_of_a_micro_batch() -> None:
    with job(lag=3) as it:
        seconds = []
        for _ in range(6):
            it.bare_step()
            seconds.append(it.opt.engine.measurement.stopwatch.seconds_before)
        assert seconds == [0.0] * 3 + [0.001] * 3


def test_pair_averaging_waits_in_the_thread_that_serves_a_snapshot_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step a snapshot has arrived; no copy between host and device is the step's stream's."""
    monkeypatch.setattr("kfuse.comm.sync.pair.pull", lambda peer, into: 0)
    with job(lag=AHEAD, parameters=torch.bfloat16) as it:
        main, streams, plain = it.recorder.current, list[Any](), it.recorder.transfer
        weights = it.opt.updates.weights()

        def transfer(source: Tensor, *given: Any) -> None:
            if source.numel() == sum(weight.numel() for weight in weights):
                streams.append(it.recorder.current)
            plain(source, *given)

        monkeypatch.setattr(it.recorder, "transfer", transfer)
        pair = Pair(weights, 0, "127.0.0.1", lambda step, ranks: ranks[0])
        it.opt.pair = pair
        for _ in range(5):
            pull = Pull(1, lambda: None)
            assert pull.ended.wait(60)
            pair._fetch(pair.inboxes[0], Peer("", 0, b""))
            it.recorder.host_waits.clear()  # of the puller's own thread
            pair.inboxes[0].pull = pull
            it.bare_step()
            assert pair.inboxes[0].pull is None, "it is averaged in"
        assert it.recorder.host_waits == []
        assert len(streams) == 11 and main not in streams

        def read() -> None:
            with pair._snapshots.newest() as snapshot:
                snapshot.flat.sum().item()

        waits = it.recorder.waits_of(read)
        assert len(waits) == 1 and "synchronize" in waits[0], waits
        pair.close()


class Counts(kf.BasePolicy):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.steps: list[list[str]] = []

    def after_step(self) -> None:
        self.steps.append(list(self.recorder.host_waits))
        self.recorder.host_waits.clear()
        self.recorder.end_step()


def train(**options: Any) -> list[list[str]]:
    """The host's waits of some steps of kf.fit, with loader processes."""
    torch.manual_seed(0)
    data = (torch.randn(256, 6), torch.randint(0, 4, (256,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    with job(lambda params: None, lag=2, **options) as it:
        opt, counts = kf.FusedAdamW(model.parameters()), Counts(it.recorder)
        settings = {"batch_size": 32, "micro_batch": 8, "epochs": 2, "num_workers": 2}
        kf.fit(model, data, opt, counts, loss_fn=F.cross_entropy, **settings)
    assert len(counts.steps) == 16
    return counts.steps[1:8]


@pytest.mark.full
def test_fit_waits_once_a_step_for_the_statistics_that_it_reports() -> None:
    for waits in train():
        assert len(waits) <= 1 and all(wait.startswith("event.synchronize") for wait in waits), waits


@pytest.mark.full
def test_fit_with_audits_waits_for_the_comparison_alone() -> None:
    """On one worker, which runs each micro-batch twice. Its loader processes fetch it out of turn."""
    for step, waits in enumerate(train(size=1, reproducible=True, audit_every=2), 1):
        assert len(waits) == (step % 2 == 0) and all("audit.py" in wait for wait in waits), waits


# -- what may run at once ---------------------------------------------------------------------------------------------


@contextmanager
def a_step(layers: int, width: int, make: Any = kf.FusedAdamW, **options: Any) -> Iterator[tuple[Recorder, Any, Any]]:
    """Context: a chain of layers and its optimizer after two steps: the recorder, a backward, the optimizer."""
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    with job(lambda params: None, lag=AHEAD, **options) as it:
        opt, x = make(net.parameters()), torch.ones(8, width, device=torch.device("cpu"))
        for _ in range(2):
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            it.recorder.end_step()
        it.recorder.actions.clear()
        yield it.recorder, lambda: net(x).square().mean().backward(), opt
        it.recorder.end_step()


def between(found: list[Action], messages: list[Action]) -> Iterator[tuple[Action, list[Action]]]:
    """Each message but the last, and the operations until the next one starts."""
    for message, after in pairwise(messages):
        operations = found[found.index(message) : found.index(after)]
        yield message, [each for each in operations if not each.is_message]


@pytest.mark.parametrize("schedule", ["allreduce", "all_to_all", "reduce_scatter"])
def test_backward_goes_on_beside_each_message(schedule: str) -> None:
    with a_step(4, 6, size=3, schedule=schedule) as (recorder, backward, opt):
        backward()
        found = list(recorder.actions)
        opt.step()
    messages = [action for action in found if action.is_message]
    beside = [operation for _, operations in between(found, messages) for operation in operations]
    assert len(messages) >= 8 and sum("mm" in each.what for each in beside) >= 6, "of the 7 matrix products"
    for message, operations in between(found, messages):
        assert not any(message.is_before(operation) for operation in operations), "backward waits"


def test_a_buckets_parameters_are_shared_beside_the_next_ones_update() -> None:
    with a_step(4, 130, size=3, schedule="reduce_scatter", state="sharded") as (recorder, backward, opt):
        backward()
        recorder.actions.clear()
        opt.step()
        found = list(recorder.actions)
    first = next(place for place, action in enumerate(found) if "optim/rules" in action.what)
    shares = [action for action in found[first:] if action.is_message]  # one or two for each bucket
    beside = list(between(found, shares))
    assert sum(bool(operations) for _, operations in beside) >= len(opt.engine.gradient_buckets) - 1
    for share, operations in beside:
        assert not any(share.is_before(operation) for operation in operations), "the next bucket's update waits"


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_the_kernels_of_a_step_of_gpt_2s_148_tensors(skip_nonfinite: bool) -> None:
    """Three kernels a bucket (pack, squares of the mean, update), and 17 for the whole step: of kfuse's own kernels
    each call is one launch, and so is each other operation that is not the model's.
    """
    calls, plain = [0, 0], Kernel.run  # all, and those that are under way

    def run(kernel: Any, given: Any) -> Any:
        calls[0] += not calls[1]
        calls[1] += 1
        try:
            return plain(kernel, given)
        finally:
            calls[1] -= 1

    make = partial(kf.FusedAdamW, skip_nonfinite=skip_nonfinite)
    with a_step(74, 8, make, size=8, bucket_mb=9 * 64 * 4 / 2**20) as (recorder, backward, opt):
        with patched(Kernel, "run", lambda kernel, given: run(kernel, given)):
            backward()
            opt.step()
        assert len(opt.engine.gradient_buckets) == 17
        others = [each for each in recorder.actions if not (each.in_kernel or each.is_message)]
    operations = [each for each in others if "(gpu/test_host_waits.py" not in each.what]
    assert {float(state["step"]) for state in opt.state.values()} == {3.0}
    assert 3 * 17 < calls[0] + len(operations) <= 68


# -- what the device decides ------------------------------------------------------------------------------------------


SOME = {
    **{name: make for name, make in OPTIMIZERS.items() if name != "wrapped adamw"},
    "sgd without momentum": lambda params: kf.FusedSGD(params, lr=0.1),
    "wrapped amsgrad": lambda params: kf.Optimizer(torch.optim.Adam(params, amsgrad=True, fused=True)),
}


def bare_steps(it: Job) -> None:
    for _ in range(5):
        it.bare_step()


def steps_that_are_left_out(it: Job) -> None:
    it.opt.skip_nonfinite = True
    for k in range(5):
        it.bare_step(factor=float("inf") if k in (0, 3) else 1.0)


def scaled_steps_with_overflows(it: Job) -> None:
    it.opt.set_clip_norm(0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    for k in range(5):
        it.scaled_step(scaler, factor=float("inf") if k in (0, 3) else 1.0)


def of_another_worker_alone(it: Job) -> None:
    """Some parameters get gradients from another worker only, which contributes to each element, and to each count."""
    plain = StandInProcessGroup.allreduce

    def allreduce(group: Any, tensor: Tensor, *op: Any) -> Any:
        with _disable_current_modes():
            tensor.add_(0.25)
        return plain(group, tensor, *op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInProcessGroup, "allreduce", allreduce)
        bare_steps(it)


@pytest.mark.full
@pytest.mark.parametrize(
    "act", [bare_steps, steps_that_are_left_out, scaled_steps_with_overflows, of_another_worker_alone]
)
@pytest.mark.parametrize("optimizer", SOME)
def test_what_is_left_out_on_the_device(optimizer: str, act: Callable[[Job], Any], monkeypatch: Any) -> None:
    """As where the host decides, but for the last bits: updates of whole buckets and of single parameters round
    differently on the CPU. A parameter that was never updated may have a state of zeros where the host did not ask.
    """
    found = []
    for asynchronous in (True, False):
        monkeypatch.setattr(RecordedDevice, "asynchronous", asynchronous)
        with job(SOME[optimizer], 1 if optimizer == "muon" else 2) as it:  # it brings no other worker's factors
            act(it)
            if not asynchronous:
                it.recorder.errors.clear()  # the CPU's way of reading memory
        found.append((list(it.model.parameters()), it.opt.state_dict()["state"], it.opt.stats.grad_norm))
    (ours, state, norm), (theirs, expected, of_host) = found
    assert norm == pytest.approx(of_host, rel=1e-6, nan_ok=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    zeros = {key: {name: torch.zeros_like(value) for name, value in of.items()} for key, of in state.items()}
    torch.testing.assert_close(state, zeros | expected, rtol=1e-6, atol=1e-8)
