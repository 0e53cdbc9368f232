"""The engine reduces gradients as DistributedDataParallel does, and refuses what it cannot reduce correctly."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import KEPT, run_workers
from problems import OPTIMIZERS, Net, gradients, relative, samples
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse.comm.group import Group
from kfuse.comm.step import StepPlan

TINY_BUCKETS = 64 * 4 / 2**20  # MB: every tensor travels alone


def beside_ddp(steps: int) -> dict[str, tuple[float, float]]:
    """Trains twins, one with DDP; one layer is used on rank 0 only, on all, or on none. The errors of the first
    gradients, and of the parameters.
    """
    kf.init(comm_bucket_mb=0.005)
    dist.init_process_group("gloo")
    found = {}
    for name, (fused, plain) in OPTIMIZERS.items():
        ours, theirs = Net(), Net()
        wrapped = DistributedDataParallel(theirs, find_unused_parameters=True)
        KEPT.append(wrapped)
        opts = fused(ours.parameters()), plain(theirs.parameters())
        first = None
        for step in range(steps):
            x, y = samples(8, seed=10 * step + kf.rank())
            used = (kf.rank() == 0, True, False)[step % 3]
            for model in (ours, wrapped):
                F.mse_loss(model(x, used), y).backward()
            first = relative(gradients(ours), gradients(theirs)) if first is None else first
            for opt in opts:
                opt.step()
                opt.zero_grad()
        found[name] = first, relative(ours.parameters(), theirs.parameters())
    return found


def test_gradients_and_updates_are_those_of_ddp() -> None:
    for found in run_workers(2, beside_ddp, 12):
        for name, (gradient, drift) in found.items():
            assert gradient <= 1e-6, name
            assert drift <= 1e-5, name


# -- micro-batches ---------------------------------------------------------------------------------------------------

SIZES = [[5, 2, 7], [4], [1, 9]]
"""Samples of each worker's micro-batches."""
PLANNED = [SIZES, [[], [4, 3], [8]], [[5, 2], [], [7]], SIZES]
"""Of each step."""


def unequal(schedule: str, dtype: str, planned: bool) -> dict[str, Any]:
    rank = kf.init(comm_schedule=schedule, comm_dtype=dtype, comm_bucket_mb=0.002).group.rank
    net, twin = Net(), Net()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    loose = dtype == "bf16"
    for step, sizes in enumerate(PLANNED if planned else [SIZES] * 3):
        x, y = samples(sum(map(sum, sizes)), seed=step)
        twin.load_state_dict(net.state_dict())
        twin.zero_grad()
        full = F.mse_loss(twin(x), y)
        full.backward()
        if planned:
            ends = [sum(map(len, sizes[: r + 1])) for r in range(3)]
            opt.begin(StepPlan(len(x), tuple(range(end - len(s), end) for end, s in zip(ends, sizes, strict=True))))
        start = sum(map(sum, sizes[:rank]))
        for j, size in enumerate(sizes[rank]):
            part = slice(start, start + size)
            with opt.micro_batch(samples=size, last=j == len(sizes[rank]) - 1) as micro_batch:
                loss = F.mse_loss(net(x[part]), y[part])
                micro_batch.loss = loss.detach()
                loss.backward()
            start += size
        if not sizes[rank]:
            opt.synchronize()
        assert relative(gradients(net), gradients(twin)) <= (0.01 if loose else 2e-6), step
        opt.step()
        opt.zero_grad()
        s = opt.stats
        assert s is not None and s.loss == pytest.approx(full.item(), rel=1e-5)
        norm = sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None) ** 0.5
        assert s.grad_norm == pytest.approx(norm, rel=0.01 if loose else 1e-5)
    return {
        "counts": (s.unit, s.samples, s.micro_batches),
        "numbers": (s.loss, s.grad_norm, s.grad_sq, s.grad_variance, s.mean_grad_sq),
        "bits": [p.detach().numpy().tobytes() for p in net.parameters()],
    }


@pytest.mark.parametrize(("schedule", "dtype", "planned"), [("allreduce", "fp32", True), ("all_to_all", "bf16", False)])
def test_unequal_micro_batches_give_the_full_batch_gradient(schedule: str, dtype: str, planned: bool) -> None:
    """With a plan a worker may have none."""
    results = run_workers(3, unequal, schedule, dtype, planned)
    assert results[0]["counts"] == ("samples", 28, 6)
    assert results[1] == results[0] and results[2] == results[0], "ranks disagree"


# -- what is refused, and going on afterwards ----------------------------------------------------------------------


class Trip(Exception):
    pass


def broken_then_whole(schedule: str, under_way: bool) -> str:
    """Every rank raises in a micro-batch, with messages under way or before, and does the step again: its CommError."""
    group = kf.init(comm_schedule=schedule, comm_bucket_mb=TINY_BUCKETS).group
    net, twin = Net(), Net()
    net.sometimes = net.never = twin.sometimes = twin.never = nn.Identity()  # so that buckets leave early
    opt, reference = kf.FusedSGD(net.parameters(), lr=0.05), torch.optim.SGD(twin.parameters(), lr=0.05)
    armed = False

    def trip(_: Tensor) -> None:
        if armed:
            raise Trip

    net.first.weight.register_hook(trip)  # backward reaches it last: the other buckets are on their way
    for step in range(5):
        x, y = samples(4 * group.size, seed=step)
        mine = slice(4 * group.rank, 4 * group.rank + 4)
        for attempt in (True, False):
            armed = attempt
            try:
                for last in (True,) if under_way else (False, True):
                    with contextlib.nullcontext() if under_way else opt.micro_batch(samples=4, last=last):
                        F.mse_loss(net(x[mine], False), y[mine]).backward()
            except Trip:
                opt.zero_grad()
            except kf.CommError as error:
                return str(error)
        F.mse_loss(twin(x, False), y).backward()
        assert relative(gradients(net), gradients(twin)) <= 2e-6, step
        for each in (opt, reference):
            each.step()
            each.zero_grad()
    assert relative(net.parameters(), twin.parameters()) <= 1e-5
    return ""


@pytest.mark.full
def test_training_goes_on_after_an_exception_before_messages_are_under_way() -> None:
    """Afterwards the step is refused: other ranks may have used what this one sent."""
    assert run_workers(2, broken_then_whole, "auto", False) == ["", ""]
    messages = run_workers(2, broken_then_whole, "all_to_all", True)
    assert all(messages)  # one that comes second may find the other gone already
    assert any("aborted after its reduction began" in message for message in messages)


def one_net() -> tuple[Net, kf.FusedSGD, Tensor, Tensor]:
    net = Net()
    return net, kf.FusedSGD(net.parameters(), lr=0.1), *samples(4, seed=0)


def run_one(net: Net, opt: kf.FusedSGD, x: Tensor, y: Tensor, last: bool) -> None:
    with opt.micro_batch(samples=len(x), last=last):
        F.mse_loss(net(x), y).backward()


def test_wrong_micro_batches_are_refused_and_training_goes_on() -> None:
    """Nested, before the last one, after it, and without samples."""
    net, opt, x, y = one_net()
    with pytest.raises(ValueError, match="samples=0"):
        opt.micro_batch(samples=0)
    with pytest.raises(RuntimeError, match="do not nest"), opt.micro_batch(samples=4):
        run_one(net, opt, x, y, True)
    opt.zero_grad()
    run_one(net, opt, x, y, False)
    with pytest.raises(RuntimeError, match=r"before the step's last micro-batch.*last="):
        opt.step()
    run_one(net, opt, x, y, True)
    with pytest.raises(RuntimeError, match=r"another backward before opt\.step\(\)"):
        run_one(net, opt, x, y, True)
    opt.zero_grad()
    for last in (False, True):
        run_one(net, opt, x, y, last)
    opt.step()
    assert opt.stats is not None and opt.stats.micro_batches == 2


@pytest.mark.parametrize(
    ("lasts", "reproducible"), [([True], False), ([False, False, True], True), ([False, False, False], False)]
)
def test_another_number_of_micro_batches_than_planned_is_refused(lasts: list[bool], reproducible: bool) -> None:
    kf.init(comm_reproducible=reproducible)
    net, opt, x, y = one_net()
    opt.begin(StepPlan(8, (range(0, 2),)))
    with pytest.raises(RuntimeError, match="the plan has 2 micro-batches"):
        for last in lasts:
            run_one(net, opt, x, y, last)
        opt.step()
    opt.zero_grad()
    opt.begin(StepPlan(8, (range(0, 2),)))
    for last in (False, True):
        run_one(net, opt, x, y, last)
    opt.step()
    assert opt.stats is not None and opt.stats.micro_batches == 2


def test_a_micro_batch_without_backward_counts_as_zeros() -> None:
    net, opt, x, y = one_net()
    twin = Net()
    with opt.micro_batch(samples=4, last=False) as micro_batch:
        loss = F.mse_loss(net(x), y)
        micro_batch.loss = loss.detach()
        loss.backward()
    with opt.micro_batch(samples=4, last=True):
        pass
    F.mse_loss(twin(x), y).mul(0.5).backward()
    assert relative(gradients(net), gradients(twin)) <= 1e-6
    opt.step()
    assert opt.stats is not None and opt.stats.loss is None, "one of them gave none"


def test_parameters_of_another_device_than_the_groups_are_refused() -> None:
    kf.init()
    engine = kf.FusedSGD(nn.Linear(2, 2).parameters(), lr=0.1).engine
    engine.device, group = torch.device("cuda", 1), Group(device=torch.device("cuda", 0))
    group.size = 2
    with pytest.raises(ValueError, match="parameters lie on cuda:1, this worker's device is cuda:0: move the model"):
        engine.set_group(group)


# -- buffers -------------------------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 2)
        self.register_buffer("table", torch.rand(33) * 7)
        self.register_buffer("large", torch.tensor([2**40 + 1, -7]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("limit", torch.tensor(float("-inf")))
        self.register_buffer("exact", torch.tensor(1 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x))
        return out


def batch_norm(bare: bool) -> list[dict[str, bytes]]:
    """Of each step this worker's buffers. Micro-batches of unequal size: running statistics are averaged by samples.

    bare: without contexts and sizes; what changed the buffers is over as the first gradient comes. Each rank builds
    other values, and loads the same ones later.
    """
    rank, found = kf.init().group.rank, []
    net = WithBuffers()
    net.norm.running_mean += 5.0 * rank
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    opt.sync_buffers(net)
    counts = [4, 4, 4] if bare else [3, 7, 11]
    weights = torch.tensor(counts)[:, None] / sum(counts)
    mean, var = torch.zeros(5), torch.ones(5)
    for step in range(8):
        if step == 3:
            mean = torch.full((5,), 2.0)
            net.load_state_dict({**net.state_dict(), "norm.running_mean": mean})
        x, y = samples(sum(counts), seed=step)
        parts = x.split(counts)
        with contextlib.nullcontext() if bare else opt.micro_batch(samples=counts[rank]):
            F.mse_loss(net(parts[rank]), y.split(counts)[rank]).backward()
        opt.step()
        opt.zero_grad()
        mean = 0.9 * mean + 0.1 * (weights * torch.stack([part.mean(0) for part in parts])).sum(0)
        var = 0.9 * var + 0.1 * (weights * torch.stack([part.var(0) for part in parts])).sum(0)
        torch.testing.assert_close((net.norm.running_mean, net.norm.running_var), (mean, var), atol=1e-5, rtol=1e-5)
        assert net.norm.num_batches_tracked == step + 1
        found.append({name: buffer.numpy().tobytes() for name, buffer in net.named_buffers()})
    return found


@pytest.mark.parametrize("bare", [False, True])
def test_batch_norm_statistics_are_averaged_and_other_buffers_left_alone(bare: bool) -> None:
    first, *others = run_workers(3, batch_norm, bare)
    assert all(other == first for other in others)
    untouched = {name: buffer.numpy().tobytes() for name, buffer in WithBuffers().named_buffers()}
    assert all(first[-1][name] == untouched[name] for name in ("table", "large", "mask", "limit", "exact"))


class Extremes(nn.Linear):
    """Keeps the smallest inputs. The other buffers stay as they are."""

    def __init__(self) -> None:
        super().__init__(5, 2)
        self.register_buffer("low", torch.full((5,), float("inf")))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("unknown", torch.tensor(float("nan")))
        self.register_buffer("eight", torch.ones(3).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        self.low.copy_(torch.minimum(self.low, x.min(0).values))
        return super().forward(x)


def smallest_inputs() -> None:
    """A step that begins with inf has the mean over its micro-batches; later ones their mean change."""
    group = kf.init().group
    net = Extremes()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    opt.sync_buffers(net)
    low = torch.full((5,), float("inf"))
    for step in range(4):
        if step == 2:
            net.low.fill_(float("inf"))
            low = net.low.clone()
        parts = samples(8 * group.size, seed=step)[0].split(8)
        with opt.micro_batch(samples=8):
            net(parts[group.rank]).square().mean().backward()
        opt.step()
        opt.zero_grad()
        low = torch.stack([torch.minimum(low, part.min(0).values) for part in parts]).mean(0)
        torch.testing.assert_close(net.low, low, atol=1e-6, rtol=0)
        assert net.mask.tolist() == [0.0, float("-inf")] and net.unknown.isnan()


def test_buffers_that_are_not_finite_keep_what_forward_writes() -> None:
    smallest_inputs()
    run_workers(2, smallest_inputs)


def test_a_buffer_that_forward_resizes_is_refused_by_name() -> None:
    net, (x, y) = Extremes(), samples(8, seed=0)
    net.low.resize_(0)
    opt = kf.FusedSGD(net.parameters())
    opt.sync_buffers(net)
    net.low.resize_(5)
    with pytest.raises(RuntimeError, match=r"buffer low of shape \(0,\) was given the shape \(5,\) by a forward"):
        F.mse_loss(net(x), y).backward()


def leave_out(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    del state[prefix + "bias"]


class TakesOver(nn.Linear):
    """Takes a loaded tensor in place of its buffer, as torch's HistogramObserver does."""

    def __init__(self) -> None:
        super().__init__(5, 2)
        self.register_buffer("mean", torch.zeros(5))

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *more: Any) -> None:
        super()._load_from_state_dict(state, prefix, *more)  # type: ignore[no-untyped-call]
        self.mean = state[prefix + "mean"]

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x)


def averaged_mean() -> Tensor:
    net = TakesOver()
    kf.fit(net, samples(32, seed=0), kf.FusedSGD(net.parameters()), loss_fn=F.mse_loss, batch_size=8, micro_batch=4)
    return net.mean


def test_a_buffer_that_loading_replaces_is_averaged() -> None:
    first, second = run_workers(2, averaged_mean)
    assert torch.equal(first, second) and first.abs().sum() > 0


class Refused(nn.Linear):
    """how: what its state or its buffers have that other workers would lack."""

    def __init__(self, how: str) -> None:
        super().__init__(5, 2)
        self.how = how
        if how == "expanded":
            self.register_buffer("mean", torch.zeros(1).expand(2))
        if how == "left out":
            self.register_state_dict_post_hook(leave_out)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "late" and not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(2))
        return super().forward(x)


REFUSED = {
    "expanded": "buffer mean is expanded",
    "left out": r"model.state_dict\(\) leaves the trained bias out",
    "late": "buffer mean was registered by a forward",
}


def refused_model(how: str) -> None:
    net = Refused(how)
    with pytest.raises((RuntimeError, ValueError), match=REFUSED[how]):
        kf.fit(net, samples(16, seed=0), kf.FusedSGD(net.parameters()), loss_fn=F.mse_loss, batch_size=8)


@pytest.mark.parametrize("how", REFUSED)
def test_a_model_that_other_workers_could_not_take_over_is_refused(how: str) -> None:
    run_workers(2, refused_model, how)


def test_buffers_of_an_aborted_step_are_put_back() -> None:
    net = WithBuffers()
    opt = kf.FusedSGD(net.parameters())
    opt.sync_buffers(net)
    before = net.norm.running_mean.clone()
    x, y = samples(6, seed=0)
    with pytest.raises(Trip), opt.micro_batch(samples=6):
        F.mse_loss(net(x), y).backward()
        raise Trip
    assert torch.equal(net.norm.running_mean, before)
