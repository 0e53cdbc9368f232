"""The engine reduces gradients as DistributedDataParallel does, and refuses what it cannot reduce correctly."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import KEPT, run_workers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse.comm.group import Group
from kfuse.comm.plan import StepPlan

TINY_BUCKETS = 64 * 4 / 2**20  # MB: every tensor travels alone


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 40)
        self.middle = nn.Linear(40, 30)
        self.last = nn.Linear(30, 2)
        self.sometimes = nn.Linear(5, 2, bias=False)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor, sometimes: bool = True) -> Tensor:
        out = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out + self.sometimes(x) if sometimes else out


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


def relative(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    """The largest relative difference; infinite where only one of the two has a gradient."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            worst = worst if a is b else float("inf")
        else:
            worst = max(worst, float((a - b).norm() / b.norm()))
    return worst


# -- against DistributedDataParallel ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda p: kf.FusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "sgd": (lambda p: kf.FusedSGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "wrapped sgd": (
        lambda p: kf.Optimizer(torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.5)),
        lambda p: torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.5),
    ),
}


def beside_ddp(steps: int) -> dict[str, dict[str, float]]:
    """Trains twins, one with DDP; one layer is used on rank 0 only, on all, or on none, and one never."""
    kf.init(comm_bucket_mb=0.005)
    dist.init_process_group("gloo")
    found = {}
    for name, (fused, plain) in OPTIMIZERS.items():
        ours, theirs = Net(), Net()
        wrapped = DistributedDataParallel(theirs, find_unused_parameters=True)
        opt, reference = fused(ours.parameters()), plain(theirs.parameters())
        worst = 0.0
        for step in range(steps):
            x, y = samples(8, seed=10 * step + kf.rank())
            used = (kf.rank() == 0, True, False)[step % 3]
            F.mse_loss(ours(x, used), y).backward()
            F.mse_loss(wrapped(x, used), y).backward()
            here = gradients(theirs)
            if step % 3 == 2:  # DDP leaves a gradient of zeros or none, by version; torch's zero_grad made it None
                here = [None if g is not None and not g.any() else g for g in here]
            if step == 0:
                worst = relative(gradients(ours), here)
            opt.step()
            opt.zero_grad()
            reference.step()
            reference.zero_grad()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        drift = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
        found[name] = {"gradient": worst, "drift": drift}
    KEPT.append(wrapped)
    return found


def test_gradients_and_updates_are_those_of_ddp() -> None:
    for found in run_workers(2, beside_ddp, 12):
        for name, errors in found.items():
            assert errors["gradient"] <= 1e-6, name
            assert errors["drift"] <= 1e-5, name


# -- micro-batches ---------------------------------------------------------------------------------------------------

SIZES = [[5, 2, 7], [4], [1, 9]]  # of each worker's micro-batches


def unequal(schedule: str, dtype: str, planned: bool, steps: int) -> dict[str, Any]:
    session = kf.init(comm_schedule=schedule, comm_dtype=dtype, comm_bucket_mb=0.002)
    net, twin = Net(), Net()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    mine = SIZES[session.group.rank]
    everyone = [size for sizes in SIZES for size in sizes]
    first = sum(sum(sizes) for sizes in SIZES[: session.group.rank])
    for step in range(steps):
        x, y = samples(sum(everyone), seed=step)
        twin.load_state_dict(net.state_dict())
        twin.zero_grad()
        full = F.mse_loss(twin(x), y)
        full.backward()
        if planned:
            ends = [sum(len(s) for s in SIZES[: r + 1]) for r in range(3)]
            ranges = tuple(range(end - len(s), end) for end, s in zip(ends, SIZES, strict=True))
            opt.begin(StepPlan(len(x), ranges))
        start = first
        for j, size in enumerate(mine):
            part = slice(start, start + size)
            with opt.micro_batch(samples=size, last=j == len(mine) - 1) as micro_batch:
                loss = F.mse_loss(net(x[part]), y[part])
                micro_batch.loss = loss.detach()
                loss.backward()
            start += size
        worst = relative(gradients(net), gradients(twin))
        opt.step()
        opt.zero_grad()
        assert worst <= (0.01 if dtype == "bf16" else 2e-6), f"step {step}: {worst}"
        assert opt.stats is not None and opt.stats.loss == pytest.approx(full.item(), rel=1e-5)
        norm = sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None) ** 0.5
        assert opt.stats.grad_norm == pytest.approx(norm, rel=0.01 if dtype == "bf16" else 1e-5)
    s = opt.stats
    assert s is not None
    return {
        "unit": s.unit,
        "samples": s.samples,
        "micro_batches": s.micro_batches,
        "numbers": (s.loss, s.grad_norm, s.grad_sq, s.grad_variance, s.mean_grad_sq),
        "bits": [p.detach().numpy().tobytes() for p in net.parameters()],
    }


@pytest.mark.parametrize(
    ("schedule", "dtype", "planned"),
    [("allreduce", "bf16", True), ("all_to_all", "fp32", False)],
)
def test_unequal_micro_batches_give_the_full_batch_gradient(schedule: str, dtype: str, planned: bool) -> None:
    results = run_workers(3, unequal, schedule, dtype, planned, 3)
    assert results[0]["samples"] == 28 and results[0]["micro_batches"] == 6 and results[0]["unit"] == "samples"
    assert results[1] == results[0] and results[2] == results[0], "ranks disagree"


def one_worker_without_work() -> tuple[list[bytes], float | None, Any]:
    """Rank 1 has no micro-batch in the plan, and rank 0 none in the next."""
    session = kf.init()
    net, twin = Net(), Net()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    for step, ranges in enumerate([(range(0, 2), range(2, 2)), (range(0, 0), range(0, 2))]):
        x, y = samples(6, seed=step)
        twin.load_state_dict(net.state_dict())
        twin.zero_grad()
        F.mse_loss(twin(x, False), y).backward()
        opt.begin(StepPlan(6, ranges))
        for j in ranges[session.group.rank]:
            part = slice(0, 4) if j == 0 else slice(4, 6)
            with opt.micro_batch(samples=2 if j else 4, last=j == 1):
                F.mse_loss(net(x[part], False), y[part]).backward()
        opt.synchronize() if not ranges[session.group.rank] else None
        assert relative(gradients(net), gradients(twin)) <= 2e-6
        opt.step()
        opt.zero_grad()
    assert opt.stats is not None
    return [p.detach().numpy().tobytes() for p in net.parameters()], opt.stats.grad_variance, opt.stats.micro_batches


def test_a_worker_without_micro_batches_takes_part() -> None:
    results = run_workers(2, one_worker_without_work)
    assert results[0] == results[1]
    assert results[0][2] == 2


# -- what is refused, and going on afterwards ----------------------------------------------------------------------


class Trip(Exception):
    pass


def broken_then_whole(schedule: str, where: str, repeats: int) -> float:
    """Every rank raises at the same place, in a step that is then done again."""
    session = kf.init(comm_schedule=schedule, comm_bucket_mb=TINY_BUCKETS)
    net, twin = Net(), Net()
    net.sometimes = net.never = nn.Identity()  # every parameter has a gradient, so that buckets leave early
    twin.sometimes = twin.never = nn.Identity()
    opt = kf.FusedSGD(net.parameters(), lr=0.05)
    reference = torch.optim.SGD(twin.parameters(), lr=0.05)
    armed = False

    def trip(_: Tensor) -> None:
        if armed:
            raise Trip

    net.first.weight.register_hook(trip)  # backward reaches it last: the other buckets are on their way
    for step in range(repeats):
        size = session.group.size
        x, y = samples(4 * size, seed=step)
        mine = slice(4 * session.group.rank, 4 * session.group.rank + 4)
        for attempt in (True, False):
            armed = attempt
            try:
                if where == "bare backward":
                    F.mse_loss(net(x[mine], False), y[mine]).backward()
                else:
                    early = where == "not the last"
                    for last in (False, True) if early else (True,):
                        with opt.micro_batch(samples=4, last=last):
                            F.mse_loss(net(x[mine], False), y[mine]).backward()
            except Trip:
                assert attempt
                opt.zero_grad()
        F.mse_loss(twin(x, False), y).backward()
        worst = relative(gradients(net), gradients(twin))
        assert worst <= 2e-6, f"step {step}: {worst}"
        opt.step()
        opt.zero_grad()
        reference.step()
        reference.zero_grad()
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


@pytest.mark.full
def test_training_goes_on_after_an_exception_in_a_micro_batch() -> None:
    assert max(run_workers(2, broken_then_whole, "auto", "not the last", 10)) <= 1e-5


def out_of_step() -> str:
    try:
        broken_then_whole("all_to_all", "bare backward", 1)
    except kf.CommError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_after_an_exception_with_messages_under_way_the_next_step_is_refused() -> None:
    """Other ranks may have used what this one sent: going on would train different models without a word."""
    messages = run_workers(2, out_of_step)
    assert all(messages)  # one that comes second may find the other gone already
    assert any("aborted after its reduction had begun" in message for message in messages)


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


CONSTANT = ("table", "large", "mask", "limit", "exact")


def batch_norm(steps: int) -> dict[str, bytes]:
    """One micro-batch a worker of unequal size: the running statistics are averaged by samples."""
    session = kf.init()
    net = WithBuffers()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    opt.sync_buffers(net)
    expected_mean, expected_var = torch.zeros(5), torch.ones(5)
    counts = [3, 7, 11][: session.group.size]
    for step in range(steps):
        x, y = samples(sum(counts), seed=step)
        parts, targets = x.split(counts), y.split(counts)
        with opt.micro_batch(samples=counts[session.group.rank]):
            F.mse_loss(net(parts[session.group.rank]), targets[session.group.rank]).backward()
        opt.step()
        opt.zero_grad()
        weights = torch.tensor(counts) / sum(counts)
        means = torch.stack([part.mean(0) for part in parts])
        variances = torch.stack([part.var(0) for part in parts])
        expected_mean = 0.9 * expected_mean + 0.1 * (weights[:, None] * means).sum(0)
        expected_var = 0.9 * expected_var + 0.1 * (weights[:, None] * variances).sum(0)
    assert torch.allclose(net.norm.running_mean, expected_mean, atol=1e-5)
    assert torch.allclose(net.norm.running_var, expected_var, atol=1e-5)
    assert net.norm.num_batches_tracked == steps
    return {name: buffer.numpy().tobytes() for name, buffer in net.named_buffers()}


def test_batch_norm_statistics_are_averaged_and_other_buffers_left_alone() -> None:
    results = run_workers(3, batch_norm, 20)
    assert results[1] == results[0] and results[2] == results[0]
    untouched = {name: buffer.numpy().tobytes() for name, buffer in WithBuffers().named_buffers()}
    changed = [name for name in CONSTANT if results[0][name] != untouched[name]]
    assert not changed


def batch_norm_in_bare_backwards() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What changed the buffers is over as the first gradient comes. Each rank builds other values."""
    kf.init()
    found = []
    for in_context in (True, False):
        net = WithBuffers()
        net.norm.running_mean += 5 * kf.rank()
        opt = kf.FusedSGD(net.parameters(), lr=0.1)
        opt.sync_buffers(net)
        for step in range(6):
            if step == 3:
                net.load_state_dict({**net.state_dict(), "norm.running_mean": torch.full((5,), 2.0)})
            x, y = samples(8, seed=10 * step + kf.rank())
            with opt.micro_batch() if in_context else contextlib.nullcontext():
                F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
        found.append(dict(net.named_buffers()))
    return found[0], found[1]


def test_batch_norm_statistics_are_averaged_where_backwards_are_bare() -> None:
    results = run_workers(2, batch_norm_in_bare_backwards)
    for name, expected in results[0][0].items():
        assert torch.allclose(results[0][1][name].double(), expected.double(), rtol=1e-5, atol=1e-6), name
        assert torch.equal(results[0][1][name], results[1][1][name]), name


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


# -- the harness itself ---------------------------------------------------------------------------------------------


def test_whole_devices_are_compared() -> None:
    """Of which this machine needs none."""
    kf.init()
    net = nn.Linear(2, 2)
    engine = kf.FusedSGD(net.parameters(), lr=0.1).engine
    engine.device, group = torch.device("cuda", 1), Group(device=torch.device("cuda", 0))
    group.size = 2
    with pytest.raises(ValueError, match="parameters lie on cuda:1, this worker's device is cuda:0: move the model"):
        engine.set_group(group)
