"""`Growth` beside a plain loop: the learning rate of groups that share a tensor, and a return to an earlier state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import kfuse as kf
from kfuse.integrations.growth import Growth


def test_a_loop_that_does_not_follow_is_told() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt, monitor = torch.optim.AdamW(net.parameters(), 0.01), kf.monitor(net, samples=2, accumulate=2)
    growth = kf.growth(monitor, kf.SchedulePolicy("0:4 8:8"), opt)
    with pytest.raises(RuntimeError, match=r"step 4 had 2 micro-batches on 1 ranks: must be growth\.accumulate"):
        for _ in range(12):
            for _ in range(2):
                (net(torch.randn(2, 4)).square().mean() / 2).backward()
            opt.step()
            opt.zero_grad()
            growth.step()
    assert (growth.accumulate, growth.lr_factor) == (4, pytest.approx(math.sqrt(2)))
    monitor.close()


def test_an_update_that_the_scaler_skips_is_no_step() -> None:
    torch.manual_seed(0)
    net, policy = nn.Linear(4, 1), Doubles()
    opt, scaler = torch.optim.AdamW(net.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=1e38)
    monitor = kf.monitor(net, samples=2, accumulate=2, scaler=scaler)
    growth = kf.growth(monitor, policy, opt, batch_max=64)
    skipped = 0
    for _ in range(20):
        for _ in range(growth.accumulate):
            scaler.scale(100 * net(torch.randn(2, 4)).square().mean() / growth.accumulate).backward()
        scaler.step(opt)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        opt.zero_grad()
        growth.step()
    monitor.close()
    assert 2 <= skipped <= 14
    changes = 5 + (5 + skipped) % 2  # where the micro-batches so far, also of skipped updates, divide by 4
    assert policy.seen == [(n, 4 if n < changes else 8) for n in range(20 - skipped - 3)]


class Doubles(kf.BasePolicy):
    """Doubles the batch at step 1, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.seen.append((signals.step, signals.batch_size))
        return kf.Decision(batch_size=8) if signals.step == 1 else None


def test_a_training_that_goes_back_asks_about_each_step_once() -> None:
    torch.manual_seed(0)
    net, policy = nn.Linear(4, 1), Doubles()
    monitor, growth = kf.monitor(net, samples=2), Growth(policy, 64)
    rate = torch.tensor(0.01)
    opt = torch.optim.AdamW([{"params": [net.weight]}, {"params": [net.bias]}], lr=rate)
    growth.begin(monitor, 2, 2, [opt], [], [])

    def step() -> None:
        opt.zero_grad()
        for _ in range(growth.accumulate):
            growth.micro_batch()
            net(torch.randn(2, 4)).square().mean().backward()
        opt.step()
        growth.end_step()

    for _ in range(8):
        step()
    assert growth.batch_size == 8
    assert [float(group["lr"]) for group in opt.param_groups] == pytest.approx([0.01 * math.sqrt(2)] * 2)
    assert opt.param_groups[1]["betas"] == pytest.approx((0.9**2, 0.999**2))
    assert opt.state[net.bias]["step"].item() == 6 / 2 + 2  # the first six are counted in updates of the new batch
    state = growth.state_dict()
    for _ in range(3):
        step()
    growth.load_state_dict(state)
    for _ in range(4):
        step()
    assert policy.seen == [(number, 4 if number < 6 else 8) for number in range(9)]
    monitor.close()
