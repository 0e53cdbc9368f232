"""Workers update with their own gradients and average their models every few steps (local SGD, Stich 2019)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm import tail
from kfuse.comm.plan import StepPlan
from kfuse.optim.scaling import NonfiniteWarning
from kfuse.statistics.step_stats import Statistics

EVERY, STEPS, SIZES = 3, 7, (8, 8, 6)  # steps, and the samples of a step's micro-batches, shared out between workers
SHARES = (range(2), range(2, 3))


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))


def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SIZES), 5, generator=generator)
    return list(zip(x.split(SIZES), x[:, :2].sin().split(SIZES), strict=True))


def averages_after(step: int) -> bool:
    return (step + 1) % EVERY == 0 or step == STEPS - 1


def by_kfuse() -> tuple[list[bytes], list[float], list[Any]]:
    """Parameters and running statistics at the end; each step's loss; what was said of the mean gradient."""
    own = kf.init()
    net = network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.05, clip_norm=0.3)
    opt.sync_buffers(net)
    mine, losses, known = SHARES[own.group.rank], [], []
    for step in range(STEPS):
        opt.begin(StepPlan(sum(SIZES), SHARES, local=sum(SIZES[j] for j in mine)))
        for j in mine:
            x, y = micro_batches(step)[j]
            with opt.micro_batch(samples=len(x), last=j == mine[-1]) as micro_batch:
                loss = F.mse_loss(net(x), y)
                micro_batch.loss = loss.detach()
                loss.backward()
        opt.step()
        opt.zero_grad()
        if averages_after(step):
            opt.updates.average_models()
        assert opt.stats is not None
        losses.append(opt.stats.loss)
        known.append((opt.stats.grad_norm, opt.stats.grad_sq, opt.stats.grad_variance, opt.stats.samples))
    return [value.numpy().tobytes() for value in net.state_dict().values()], losses, known


def by_hand() -> tuple[list[Tensor], list[float]]:
    """Two workers in one process, with torch's own optimizer."""
    nets = [network(), network()]
    opts = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in nets]
    losses = []
    for step in range(STEPS):
        total = 0.0
        for net, opt, mine in zip(nets, opts, SHARES, strict=True):
            own = sum(SIZES[j] for j in mine)
            before = {name: value.clone() for name, value in net.named_buffers()}
            after = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in before.items()}
            opt.zero_grad()
            for j in mine:
                x, y = micro_batches(step)[j]
                net.load_state_dict(before, strict=False)
                loss = F.mse_loss(net(x), y)
                (loss * len(x) / own).backward()
                for name, value in net.named_buffers():
                    after[name] += value.double() * len(x) / own
                total += float(loss.detach()) * len(x) / sum(SIZES)
            net.load_state_dict(after, strict=False)
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            opt.step()
        losses.append(total)
        if averages_after(step):
            average(*(net.state_dict() for net in nets))
            for pair in zip(*(net.parameters() for net in nets), strict=True):
                moments = [opt.state[p] for opt, p in zip(opts, pair, strict=True)]
                average(*({name: state[name] for name in ("exp_avg", "exp_avg_sq")} for state in moments))
    return list(nets[0].state_dict().values()), losses


def average(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in ours.items():
        mean = (value.double() + theirs[name].double()) / 2
        value.copy_(mean)
        theirs[name].copy_(mean)


def test_each_worker_updates_by_itself_and_models_are_averaged() -> None:
    values, losses = by_hand()
    results = run_workers(2, by_kfuse)
    assert results[0][0] == results[1][0], "models differ after they were averaged"
    for ours, theirs in zip(results[0][0], values, strict=True):
        found = torch.frombuffer(bytearray(ours), dtype=theirs.dtype).view(theirs.shape)
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)
    for _, seen, known in results:
        assert seen == pytest.approx(losses, rel=1e-5)
        assert known == [(None, None, None, 22.0)] * STEPS


def test_local_steps_on_a_gpu_do_not_count_as_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    """There the warning goes by the statistics of the step before, and a local step's gradient norm is unknown."""
    statistics, warning, on_device = Statistics(), NonfiniteWarning(), torch.tensor(True)
    record = torch.zeros(tail.TAIL_SLOTS + 2 + tail.RANK_SLOTS, dtype=torch.float64)
    record[[tail.SAMPLES, tail.MICRO_BATCHES]] = 2.0
    for step, (local, norm) in enumerate([(True, torch.nan), (True, torch.nan), (False, torch.inf), (False, 1.0)]):
        record[tail.TAIL_SLOTS] = norm
        statistics.push(step, "samples", record.clone(), local)
        warning.after_step(step, on_device, statistics.arrived, skips=True, warns=True)
    [said] = [each.getMessage() for each in caplog.records if each.name == "kfuse"]
    assert said.startswith("step 2: a gradient is not finite")


class Two(nn.Module):
    """Two parameters; the second is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, both: bool) -> Tensor:
        return (self.first * torch.arange(1.0, 4.0)).sum() + (self.second.square().sum() if both else 0.0)


def numbers_of_updates() -> tuple[list[float], list[float], bytes]:
    """Rank 1 has no micro-batch in the second step, in which one parameter has no gradient. The third is the same on
    both. The numbers of updates after the average and after the third step; the parameters.
    """
    rank = kf.init().group.rank
    net = Two()
    opt = kf.FusedAdamW(net.parameters(), lr=0.1)
    counts = []
    for number, second in enumerate((range(1, 2), range(1, 1), range(1, 2))):
        mine = (range(0, 1), second)[rank]
        opt.begin(StepPlan(1 + len(second), (range(0, 1), second), local=len(mine)))
        for _ in mine:
            with opt.micro_batch(samples=1):
                net(both=number != 1).backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            opt.updates.agree_on_state()
            opt.updates.average_models()
        if number:
            counts.append([float(opt.state[p]["step"]) for p in net.parameters()])
    return counts[0], counts[1], b"".join(p.detach().numpy().tobytes() for p in net.parameters())


def test_numbers_of_updates_are_averaged_by_parameter() -> None:
    """With a mean number of each parameter's own, no worker may update them together any more."""
    results = run_workers(2, numbers_of_updates)
    assert results[0] == results[1]
    assert results[0][:2] == ([1.5, 1.0], [2.5, 2.0])
