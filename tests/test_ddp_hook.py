"""`kf.ddp_hook` and `kf.monitor` measure what closed forms say, and change no bit of what is trained."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import KEPT, on_workers, run_workers
from test_statistics import LOSSES, PROBLEMS, Halves, Problem, draw, gradients_by_hand
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

import kfuse as kf
from kfuse.integrations import log
from kfuse.integrations.measure import Monitor
from kfuse.statistics.noise_scale import NoiseScale, rounding_error
from kfuse.statistics.step_stats import StepStats


def wrapped(net: nn.Module, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(net, **options)
    KEPT.append(model)
    return model


# -- parameters ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer that is used twice, one that only odd steps use, and enough of them for several buckets."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(20, 90), nn.Linear(90, 90), nn.Linear(90, 3)
        self.sometimes = nn.Linear(90, 90)
        self.unused, self.calls = unused, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        if not self.unused or self.calls % 2:
            hidden = torch.tanh(self.sometimes(hidden))
        out: Tensor = self.last(hidden)
        return out


def trained(
    accumulate: int, hook: bool, set_to_none: bool = True, scaled: bool = False, **options: Any
) -> tuple[list[Tensor], StepStats | None]:
    """Parameters after some steps of a DDP model, and what its hook measured in the last one."""
    net = Net(options.get("find_unused_parameters", False))
    model = wrapped(net, bucket_cap_mb=0.02, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
    monitor = kf.ddp_hook(model, accumulate=accumulate, scaler=scaler) if hook else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        for j in range(accumulate):
            x, y = torch.randn(6, 20, generator=generator), torch.randn(6, 3, generator=generator)
            with nullcontext() if j == accumulate - 1 else model.no_sync():
                scaler.scale(F.mse_loss(model(x), y) / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none)
    return [p.detach() for p in net.parameters()], monitor.stats if monitor else None


CASES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "set_to_none": False, "scaled": True},
    {"find_unused_parameters": True},
    {"static_graph": True},  # the last, since DDP itself fails with it under no_sync
]


def all_cases(accumulate: int) -> list[tuple[bool, StepStats]]:
    dist.init_process_group("gloo")
    found = []
    for case in CASES if accumulate == 1 else CASES[:-1]:
        expected, _ = trained(accumulate, False, **case)
        parameters, stats = trained(accumulate, True, **case)
        assert stats is not None
        found.append((all(map(torch.equal, parameters, expected)), stats))
    return found


@pytest.mark.parametrize("workers, accumulate", [(2, 4), pytest.param(3, 1, marks=pytest.mark.full)])
def test_parameters_have_ddps_bits(workers: int, accumulate: int) -> None:
    """For three workers DDP multiplies by 1 / 3 where a gradient is copied, and divides by 3 where it is not, as some
    are not with `gradient_as_bucket_view`.
    """
    ranks = run_workers(workers, all_cases, accumulate)
    for case, *of_ranks in zip(CASES, *ranks, strict=False):
        assert all(equal for equal, _ in of_ranks) or (workers == 3 and "gradient_as_bucket_view" in case), case
        assert len({repr(stats) for _, stats in of_ranks}) == 1, case
        stats = of_ranks[0][1]
        assert (stats.step, stats.micro_batches, stats.skipped) == (4, workers * accumulate, False), case
        if "find_unused_parameters" not in case:
            plain = ranks[0][0][1]
            for name in ("grad_variance", "grad_sq", "grad_norm"):
                assert getattr(stats, name) == pytest.approx(getattr(plain, name), rel=1e-4), case


@on_workers(2)
def test_a_static_graphs_first_step_is_counted_once() -> None:
    """DDP reduces it after backward."""
    dist.init_process_group("gloo")
    found: list[list[StepStats]] = []
    for static in (False, True):
        torch.manual_seed(0)
        model = wrapped(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)), static_graph=static)
        monitor = kf.ddp_hook(model, samples=6)
        of_this: list[StepStats] = []
        monitor.observers.append(of_this.append)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            model(torch.randn(6, 4, generator=generator)).square().mean().backward()
            model.zero_grad()
        monitor.drain()
        found.append(of_this)
    plain, others = found
    assert [(stats.micro_batches, stats.samples) for stats in others] == [(2, 12)] * 3
    for name in ("grad_norm", "grad_variance"):
        assert [getattr(s, name) for s in others] == pytest.approx([getattr(s, name) for s in plain])


# -- statistics ------------------------------------------------------------------------------------------------------


def measure(
    problem: Problem,
    monitor: Monitor,
    model: nn.Module,
    mine: range,
    divide: bool = False,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[StepStats]:
    """Steps at a fixed point. mine: this worker's micro-batches. divide: each loss by their number. no_sync: of all
    micro-batches but the last.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ends = np.cumsum(problem.sizes)
    found = []
    for step in range(40):
        x, y = (torch.from_numpy(values) for values in draw(problem, step))
        for j in mine:
            size = problem.sizes[j]
            part = slice(int(ends[j]) - size, int(ends[j]))
            monitor.samples = size
            with nullcontext() if j == mine[-1] else no_sync():
                loss = LOSSES[problem.loss](model(x[part]), y[part])
                if j == mine[0]:
                    optimizer.zero_grad(set_to_none=bool(step % 2))  # between forward and backward, as some loops do
                (loss / len(mine) if divide else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        stats = monitor.stats
        assert stats is not None
        found.append(stats)
    return found


def check_formula(problem: Problem, steps: list[StepStats]) -> None:
    """S, G2 and |gbar| are those of a mean over micro-batches that is not weighted."""
    count, samples = len(problem.sizes), len(problem.sizes) / sum(1 / size for size in problem.sizes)  # harmonic mean
    for step, stats in list(enumerate(steps))[-5:]:
        parts = np.split(gradients_by_hand(problem, step), np.cumsum(problem.sizes)[:-1])
        means = np.stack([part.mean(axis=0) for part in parts])
        gbar = means.mean(axis=0)
        variance = samples * float(((means - gbar) ** 2).sum()) / (count - 1)
        assert (stats.step, stats.unit, stats.micro_batches) == (step, "samples", count)
        assert stats.grad_variance == pytest.approx(variance, rel=1e-4)
        assert stats.grad_norm == pytest.approx(math.sqrt(gbar @ gbar), rel=1e-5)
        error = variance / (samples * count)
        assert stats.grad_sq == pytest.approx(float(gbar @ gbar) - error, abs=1e-4 * abs(variance) / stats.samples)


def check_running(steps: list[StepStats]) -> None:
    """The running estimate is that of kfuse's own steps."""
    running = NoiseScale()
    for s in steps:
        assert s.grad_norm is not None
        rounding = rounding_error(s.grad_norm**2, s.samples, s.micro_batches)
        running.update(s.grad_variance, s.grad_sq, (s.samples, s.micro_batches), rounding)
        estimate = running.estimate()
        found = s.noise_scale, s.noise_scale_low, s.noise_scale_high
        for value, expected in zip(found, (estimate.noise_scale, estimate.low, estimate.high), strict=True):
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-6))


def of_size(name: str, sizes: tuple[int, ...]) -> Problem:
    return replace(PROBLEMS[name], sizes=sizes)


DDP_CASES: list[tuple[tuple[int, ...], int, bool]] = [
    ((8, 8), 1, False),
    ((2, 9, 4, 9), 2, True),
    ((8,) * 4, 1, False),
]
"""Sizes of a step's micro-batches; how many the first of two workers has; whether losses are divided by that."""


def ddp_statistics() -> list[list[StepStats]]:
    dist.init_process_group("gloo")
    found = []
    for sizes, first, divide in DDP_CASES:
        problem = of_size("linear regression", sizes)
        model = wrapped(Halves(problem))
        monitor = kf.ddp_hook(model, accumulate=first if divide else 1)
        mine = range(first, len(sizes)) if dist.get_rank() else range(first)
        found.append(measure(problem, monitor, model, mine, divide, model.no_sync))
    return found


def test_ddp_statistics_are_the_formula() -> None:
    ranks = run_workers(2, ddp_statistics)
    assert repr(ranks[0]) == repr(ranks[1])
    for (sizes, _, _), found in zip(DDP_CASES, ranks[0], strict=True):
        check_formula(of_size("linear regression", sizes), found)
        check_running(found)


def test_monitor_statistics_are_the_formula() -> None:
    """With one micro-batch a step the norm alone is known."""
    problem = of_size("linear regression", (3, 8, 8, 5))
    net = Halves(problem)
    monitor = kf.monitor(net, accumulate=4)
    steps = measure(problem, monitor, net, range(4), divide=True)
    check_formula(problem, steps)
    check_running(steps)
    one = measure(of_size("linear regression", (8,)), monitor, net, range(1))[0]
    assert one.grad_norm is not None and one.grad_variance is one.grad_sq is None
    assert monitor.why is not None and "one micro-batch" in monitor.why
    monitor.close()


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_micro_batches_with_weights_are_the_formula(kind: Callable[[float], Any]) -> None:
    """Losses are summed over all samples of the step, and divided by their number. One micro-batch is empty."""
    torch.manual_seed(0)
    net, sizes = nn.Linear(5, 2), (2, 5, 0, 7)
    monitor = kf.monitor(net)
    optimizer, total = torch.optim.SGD(net.parameters(), lr=0.0), sum(sizes)
    x, y, gradients = torch.randn(total, 5), torch.randn(total, 2), []
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        monitor.samples, monitor.accumulate = kind(len(part)), kind(total / max(1, len(part)))
        (F.mse_loss(net(part), target, reduction="sum") / total).backward()
        whole = torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None]).double()
        gradients.append(whole - sum(gradients))
    optimizer.step()
    stats, share = monitor.stats, torch.tensor(sizes).double() / total
    assert stats is not None and stats.micro_batches == 3 and stats.samples == pytest.approx(total)
    squares, mean = torch.stack(gradients).square().sum().item(), whole.square().sum().item()
    k = share.square().sum().item()
    variance = (squares - k * mean) / (1 - k)
    assert stats.grad_norm == pytest.approx(math.sqrt(mean), rel=1e-5)
    assert stats.grad_variance == pytest.approx(total * variance, rel=1e-5)
    assert stats.grad_sq == pytest.approx(mean - variance, rel=1e-4)


# -- in one process: what loops do -----------------------------------------------------------------------------------


def batches(count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(4, 5, generator=generator), torch.randn(4, 2, generator=generator)


class Loop:
    """A model, its optimizer and its monitor."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.monitor = kf.monitor(self.net)

    def backwards(self, count: int, seed: int = 0) -> None:
        for x, y in batches(count, seed):
            F.mse_loss(self.net(x), y).backward()

    def step(self, count: int, seed: int = 0) -> None:
        self.backwards(count, seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def known(self, step: int, micro_batches: int, known: bool = True) -> None:
        """The newest step is this one, and its S is known, or it is not."""
        stats = self.monitor.stats
        assert stats is not None and (stats.step, stats.micro_batches) == (step, micro_batches)
        assert (stats.grad_variance is not None) == (stats.grad_sq is not None) == known
        assert known or "see docs/frameworks.md" in str(self.monitor.why)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.monitor.close()
    kf.log_to()


def test_gradients_that_were_not_set_to_zero_are_unknown_not_wrong(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros are no sign of a dropped step by themselves: so that step is unknown, and the next one known."""
    loop.step(2)
    loop.known(0, 2)
    for step in (1, 2, 3):
        loop.backwards(2)
        loop.optimizer.step()
        loop.known(step, 2, known=step == 1)
    loop.optimizer.zero_grad(set_to_none=False)
    loop.step(2)
    loop.known(4, 2)
    loop.backwards(2)
    nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)  # between two backwards
    loop.step(2)
    loop.known(5, 4, known=False)
    loop.step(2)
    loop.known(6, 2)
    told = [record.getMessage() for record in caplog.records if record.name == "kfuse"]
    assert len(told) == 1 and "step 2" in told[0], "one line"


def test_what_makes_no_micro_batch_leaves_no_trace(loop: Loop) -> None:
    """Micro-batches that zero_grad drops, torch.autograd.grad, a backward that raises, and another model's update."""
    loop.backwards(2)
    loop.net.zero_grad()
    for x, y in batches(2):
        torch.autograd.grad(F.mse_loss(loop.net(x), y), list(loop.net.parameters()))
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    loop.backwards(1)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert loop.monitor.stats is None
    loop.step(2)
    loop.known(0, 3)

    def refuse(grad: Tensor) -> Tensor:
        raise ZeroDivisionError

    handle = loop.net.get_parameter("0.weight").register_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        loop.backwards(1)
    handle.remove()
    loop.net.zero_grad()
    loop.step(2)
    loop.known(1, 2)


def test_a_step_ends_after_its_closure(loop: Loop) -> None:
    """As Lightning steps: the closure of `optimizer.step(closure)` has the step's last backward."""
    other = Loop()

    def closure(j: int, x: Tensor, y: Tensor) -> Tensor:
        if j == 0:
            other.optimizer.zero_grad()
        loss = F.mse_loss(other.net(x), y)
        loss.backward()
        return loss

    for at in range(3):
        loop.step(4, seed=at)
        *first, last = enumerate(batches(4, seed=at))
        for j, (x, y) in first:
            closure(j, x, y)
        other.optimizer.step(lambda last=last: closure(last[0], *last[1]))  # type: ignore[misc]
        assert repr(other.monitor.stats) == repr(loop.monitor.stats)
        other.known(at, 4)
    other.monitor.close()


def check_copies(net: nn.Module, monitor: Monitor) -> None:
    """Copies of the model, for a moving average or in a file, work and are not monitored."""
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(net), torch.load(stored, weights_only=False)):
        for x, y in batches(2):
            F.mse_loss(copied(x), y).backward()
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert monitor.stats is not None and (monitor.stats.step, monitor.micro_batches) == (0, 0)


def test_copies_of_a_model_are_not_monitored_and_a_model_that_is_dropped_is_freed(loop: Loop) -> None:
    loop.step(2)
    check_copies(loop.net, loop.monitor)
    gc.collect()
    Loop().monitor.close()  # a new monitor takes away the hooks that dropped ones of earlier tests have left
    hooks = len(_global_optimizer_post_hooks)
    other = Loop()
    other.step(2)
    dropped = weakref.ref(other.net)
    del other
    gc.collect()  # may come while torch goes through the hooks
    assert dropped() is None and len(_global_optimizer_post_hooks) == hooks + 1
    Loop().monitor.close()
    assert len(_global_optimizer_post_hooks) == hooks


def test_several_backwards_for_a_forward_are_unknown_not_wrong(loop: Loop) -> None:
    for x, y in batches(2):
        out = loop.net(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        out.square().mean().backward()
    loop.optimizer.step()
    loop.known(0, 4, known=False)
    layers = list(loop.net.children())

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x

    loop.net.forward = forward  # type: ignore[method-assign]
    loop.optimizer.zero_grad()
    for x, y in batches(2):
        F.mse_loss(loop.net(x.requires_grad_()), y).backward()
    loop.optimizer.step()
    loop.known(1, 4, known=False)


def test_state_goes_on(loop: Loop) -> None:
    kf.log_to(lambda record: None)
    for seed in range(30):
        loop.step(2, seed)
    other = kf.monitor(loop.net)
    other.load_state_dict(json.loads(json.dumps(loop.monitor.state_dict())))
    loop.step(2, 99)
    assert repr(other.stats) == repr(loop.monitor.stats)
    assert other.state_dict() == loop.monitor.state_dict()
    assert other.state_dict()["steps"] == 31 and other.state_dict()["samples"] == 62
    other.close()


# -- logs ------------------------------------------------------------------------------------------------------------


def test_figures_go_to_callables_writers_and_folders(loop: Loop, tmp_path: Path) -> None:
    monitor = loop.monitor
    records: list[dict[str, Any]] = []
    scalars: list[tuple[str, float, int]] = []

    writer = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    kf.log_to(records.append, writer, tmp_path)
    monitor.samples = 4
    for seed in range(3):
        loop.step(2, seed)
    monitor.close()
    assert [tuple(record) for record in records] == [("monitor", *log.FIGURES)] * 3
    assert [tuple(r.values())[1:4] for r in records] == [(0, 8.0, 8.0), (1, 16.0, 8.0), (2, 24.0, 8.0)]
    assert records[2]["noise_scale"] is None and monitor.stats is not None
    assert records[2]["grad_norm"] == monitor.stats.grad_norm
    assert ("train/grad_norm", records[1]["grad_norm"], 1) in scalars
    assert any(file.name.startswith("events.out.tfevents") for file in tmp_path.iterdir())


# -- wrong uses ------------------------------------------------------------------------------------------------------


def error(act: Any) -> str:
    try:
        act()
    except (TypeError, ValueError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    return "nothing"


class ReturnsBias(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.bias


class Keeps(nn.Linear):
    """Keeps its loss, and returns an output that does not lead to it."""

    def __init__(self) -> None:
        super().__init__(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = super().forward(x).sum()
        return self.weight.sum()


@on_workers(2)
def test_wrong_uses_of_ddp_end_in_one_line() -> None:
    dist.init_process_group("gloo")
    x = torch.ones(4, 5)
    inner = nn.Linear(5, 2)
    too_early = kf.monitor(inner)  # as a callback that a framework calls before it wraps the model
    model = wrapped(inner)
    assert "call kf.ddp_hook instead" in error(lambda: model(x))
    too_early.close()
    assert "use kf.ddp_hook(model)" in error(lambda: kf.monitor(model))
    kf.ddp_hook(model)
    assert "can only be called once" in error(lambda: kf.ddp_hook(model))

    def joined() -> None:
        with model.join():
            model(x).sum().backward()

    with warnings.catch_warnings(action="ignore"):
        assert "join()" in error(joined)
    sparse = wrapped(nn.Embedding(5, 2, sparse=True))
    kf.ddp_hook(sparse)
    assert "sparse" in error(lambda: sparse(torch.tensor([1])).sum().backward())
    # The last record travels until the monitor is closed.
    model = wrapped(nn.Linear(5, 2))
    monitor = kf.ddp_hook(model)
    records: list[Any] = []
    kf.log_to(records.append)
    for a, b in batches(3):
        F.mse_loss(model(a), b).backward()
    before = len(records)
    monitor.close()
    kf.log_to()
    assert (before, len(records)) == ((0, 0) if dist.get_rank() else (2, 3))
    # DDP reduces each backward here, and each is a step with the earlier one's gradient in it: unknown.
    model = wrapped(nn.Linear(5, 2))
    monitor = kf.ddp_hook(model)
    for _ in range(2):
        model(x * (dist.get_rank() + 1)).sum().backward()
    assert monitor.stats is not None and (monitor.stats.step, monitor.stats.grad_variance) == (1, None)
    model = wrapped(nn.Linear(5, 2))
    monitor = kf.ddp_hook(model)
    model(x).sum().backward()
    check_copies(model, monitor)
    # The loss does not come from the model's outputs: from the second step on, its parameters tell of a backward.
    model = wrapped(Keeps())
    monitor = kf.ddp_hook(model)
    for step in range(2):
        model(x * (dist.get_rank() + 1))
        model.module.loss.backward()  # type: ignore[union-attr, operator]
        model.zero_grad()
        assert monitor.stats is not None
        # Of the 10 weights: 4 on one worker, 8 on the other.
        assert monitor.stats.grad_variance == (pytest.approx(80, rel=1e-5) if step else None)
    model = wrapped(ReturnsBias(5, 2))
    kf.ddp_hook(model)
    for _ in range(3):
        model(x)[0].sum().backward()
    assert len(model.module.bias._backward_hooks or ()) <= 1  # type: ignore[union-attr, arg-type]
    # Two groups: the model's own counts.
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = wrapped(nn.Linear(5, 2), process_group=groups[dist.get_rank()])
    monitor = kf.ddp_hook(model)
    model(x).sum().backward()
    assert monitor.stats is not None and monitor.stats.micro_batches == 1
    assert monitor.stats.grad_norm == pytest.approx(math.sqrt(2 * 5 * 16 + 2 * 16))
    assert not any(p._backward_hooks for p in model.parameters())


# -- the end of the process ------------------------------------------------------------------------------------------

HELD_AT_EXIT = """
import threading, time
from kfuse.integrations.measure import drop_before_exit

held = threading.Event()

def of_torch():
    callback = drop_before_exit(lambda future: future.value()[0])
    held.set()
    time.sleep(0.5)
    del callback
    print("dropped")

threading.Thread(target=of_torch, daemon=True).start()
held.wait()
"""


@pytest.mark.full
def test_python_does_not_end_while_a_thread_of_torch_holds_a_callback() -> None:
    """Such a thread aborts the process where Python has ended: "terminate called without an active exception"."""
    done = subprocess.run([sys.executable, "-c", HELD_AT_EXIT], capture_output=True, text=True, timeout=120)
    assert done.stdout == "dropped\n", done.stderr


LEAVES_EARLY = """
import ctypes, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import kfuse as kf

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
monitor = kf.ddp_hook(model)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(model))  # stays to the end, as what a cycle of references holds
reduce = dist.all_reduce

def late(tensor, **options):
    if tensor.dtype == torch.float64 and rank == 0:
        time.sleep(1.0)
    return reduce(tensor, **options)

dist.all_reduce = late
model(torch.ones(1, 2)).sum().backward()
if rank == 0:
    print(monitor.stats.grad_norm)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_worker_that_ends_first_leaves_the_others_their_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_EARLY]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert float(found[0]) == pytest.approx(math.sqrt(3))
