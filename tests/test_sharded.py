"""comm.state=sharded: the same updates as with replicated state and as torch's, from a shard of the state each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sharded as s
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from problems import update
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kfuse as kf
from kfuse.kernels import BLOCK

PARTS, STEPS = 8, 6
F32 = torch.float32
DTYPES = (F32, torch.bfloat16)


def trainings(state: str) -> dict[str, Any]:
    """Parameters, optimizer state and norm after some steps, reproducible, by optimizer and dtype."""
    found: dict[str, Any] = {}
    s.init(state, reproducible=True)
    for kind in s.KINDS:
        for dtype in DTYPES:
            model = s.net(dtype)
            opt = s.optimizer(kind, model, clip_norm=0.5)
            for step in range(STEPS):
                s.planned_step(opt, model, step, PARTS, lambda x, bad=step == 4: x * math.nan if bad else x)
            assert all(value.isfinite().all() for value in s.values(model))
            found[f"{kind} {dtype}"] = s.values(model), s.tensors(opt.state_dict()), opt.stats.grad_norm
    return found


def test_the_same_bits_as_replicated_state() -> None:
    """Parameters, moments, masters, step counts and the norm, with a layer that some steps use and a step that is left
    out. Replicated state has the same bits on two workers as on one.
    """
    replicated = run_workers(1, trainings, "replicated")[0]
    for found in (*run_workers(3, trainings, "sharded"), *run_workers(2, trainings, "replicated")):
        for name, (params, state, norm) in replicated.items():
            assert s.same(found[name][0], params), name
            assert s.same(found[name][1], state), name
            assert found[name][2] == norm, name


def empty_parameters(state: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the state of parameters of which one has no elements, alone in its group."""
    s.init(state)
    params = [nn.Parameter(torch.ones(shape)) for shape in ((4, 6), (0, 6))]
    opt = kf.FusedMuon([{"params": [p]} for p in params])
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    return {name: tuple(value.shape) for name, value in s.tensors(opt.state_dict()).items()}


def test_a_parameter_without_elements_has_a_state_too() -> None:
    replicated = empty_parameters("replicated")
    assert (0, 6) in replicated.values() and empty_parameters("sharded") == replicated


# -- memory -----------------------------------------------------------------------------------------------------------


def state_bytes() -> list[tuple[int, int, int]]:
    """In fp32 and bf16: bytes of moments and masters on this worker; parameters; blocks of 4096 of the buckets."""
    found = []
    s.init()
    for dtype in DTYPES:
        model = s.net(dtype)
        opt = s.optimizer("adamw", model)
        s.loss_of(model, 2, 0).backward()
        opt.step()
        tensors = [tensor for state in opt.updates.states for tensor in state.own.tensors.values()]
        assert not opt.state or all(set(state) == {"step"} for state in opt.state.values())
        blocks = sum(-(-bucket.body // BLOCK) for bucket in opt.engine.gradient_buckets)
        numel = sum(p.numel() for p in model.parameters())
        found.append((sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()), numel, blocks))
    return found


def test_bytes_of_state_a_parameter() -> None:
    """8/n for fp32 parameters, 12/n with masters; shards are whole blocks, so a bucket may round up to one more."""
    workers, buckets = 4, 5
    for each, ranks in zip((8, 12), zip(*run_workers(workers, state_bytes), strict=True), strict=True):
        counted, (_, numel, blocks) = [found[0] for found in ranks], ranks[0]
        assert each * numel <= sum(counted) <= each * blocks * BLOCK
        assert max(counted) <= each * (numel / workers + buckets * BLOCK)


# -- p.grad -----------------------------------------------------------------------------------------------------------


@on_workers(2)
def test_p_grad_is_none() -> None:
    """No worker has a whole mean gradient: p.grad is None, also where another optimizer's loss reaches the parameters
    after a step, as a GAN's generator's does; zero_grad drops what that gave.
    """
    s.init()
    model = s.net()
    opt = s.optimizer("adamw", model)
    for drops in (False, True, False):
        s.loss_of(model, 0, kf.rank()).backward()
        assert all(p.grad is None for p in model.parameters())
        if drops:
            opt.zero_grad()
        before = s.values(model)
        opt.step()
        assert s.same(before, s.values(model)) == drops
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(s.loss_of(model, 0, kf.rank())).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler with comm\.state=sharded: it looks at p\.grad"):
        scaler.step(opt)


def by_hand(state: str) -> list[Tensor]:
    """Gradients without a backward; replaced after one; several losses; accumulated over backwards."""
    s.init(state, reproducible=True)
    model = s.net()
    opt = s.optimizer("adamw", model)
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), given, strict=True):
        p.grad = gradient.clone()
    update(opt)
    s.loss_of(model, 0, 0).backward()
    model.second.weight.grad = given[2].clone()
    update(opt)
    with opt.micro_batch(samples=4, several_backwards=True):
        for part in (0, 1):
            s.loss_of(model, 2, part).backward()
    update(opt)
    opt.accumulate(2)
    for _ in range(2):
        (s.loss_of(model, 4, 0) / 2).backward()
    update(opt)
    opt.accumulate(1)
    return s.values(model)


class WithoutRunningSums(TorchDispatchMode):
    """On a GPU deterministic algorithms refuse cumsum."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "cumsum" not in str(func)
        return func(*args, **(kwargs or {}))


def overflowing(state: str) -> list[Tensor]:
    """Squares of finite gradients overflow fp32 on one rank's shard only."""
    s.init(state, reproducible=True)
    model = s.net()
    opt = s.optimizer("adamw", model, clip_norm=1.0)
    x, y = s.batch(0, 0)
    (F.mse_loss(model(x), y) + 1e25 * model.first.weight[0, 0]).backward()
    with WithoutRunningSums():
        opt.step()
    return s.values(model)


@pytest.mark.full
@pytest.mark.parametrize(("training", "workers"), [(by_hand, 2), (overflowing, 3)])
def test_unusual_gradients_as_with_replicated_state(training: Callable[[str], list[Tensor]], workers: int) -> None:
    expected = run_workers(1, training, "replicated")[0]
    assert not s.same(expected, s.values(s.net()))
    for params in run_workers(workers, training, "sharded"):
        torch.testing.assert_close(params, expected, rtol=2e-6, atol=1e-6)


# -- its state --------------------------------------------------------------------------------------------------------


def fitted(resumed: Any = None, state: str = "sharded") -> dict[str, Any]:
    """A kf.fit of 12 steps with moments and masters of bf16 parameters; what kf.state_dict gave after the sixth."""
    s.init(state, reproducible=True)
    model = s.net(torch.bfloat16)
    opt = s.optimizer("lamb", model, clip_norm=0.5)
    found: dict[str, Any] = {}

    class Policy(kf.BasePolicy):
        steps = 0 if resumed is None else 6

        def after_step(self) -> None:
            self.steps += 1
            if self.steps == 6:
                found["state"] = kf.state_dict()

    if resumed is not None:
        kf.load_state_dict(resumed)
    x = torch.randn(96, 30, generator=torch.Generator().manual_seed(2))
    settings: Any = {"batch_size": 16, "micro_batch": 4, "epochs": 2, "observe_progress": False}
    settings |= {"train_precision": "bf16-true", "loss_fn": lambda output, y: F.mse_loss(output.float(), y)}
    kf.fit(model, (x, torch.sin(x[:, :5])), opt, Policy(), **settings)
    found |= {"params": s.values(model), "opt": s.tensors(opt.state_dict())}
    kf.fit(model, (x, torch.sin(x[:, :5])), opt, **settings)  # goes on with the optimizer's state
    return {**found, "again": s.values(model)}


@pytest.mark.full
def test_kf_state_dict_is_whole_on_every_worker() -> None:
    whole = run_workers(1, fitted, None, "replicated")[0]
    saved = run_workers(2, fitted)
    for found in saved:
        assert s.same(s.tensors(found["state"]["optimizer"]), s.tensors(whole["state"]["optimizer"]))
    for found in [*saved, *run_workers(3, fitted, saved[1]["state"])]:
        assert s.same(found["params"], whole["params"]) and s.same(found["opt"], whole["opt"])
        assert s.same(found["again"], whole["again"]) and not s.same(found["again"], found["params"])


def refreezes(state: str) -> tuple[list[Tensor], Any]:
    """A layer is frozen for two steps, and a parameter group is added."""
    s.init(state, reproducible=True)
    model, more = s.net(), nn.Parameter(torch.ones(5000))
    opt = s.optimizer("adamw", model)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            s.planned_step(opt, model, step, PARTS, lambda loss: loss + (more * more).sum() * 1e-3)

    steps(0, 2)
    model.second.requires_grad_(False)
    opt.rebuild()
    steps(2, 4)
    model.second.requires_grad_(True)
    opt.add_param_group({"params": [more], "lr": 0.1})
    more.grad = None
    steps(4, 6)
    return [*s.values(model), more.detach().clone()], s.tensors(opt.state_dict())


@pytest.mark.full
def test_freezing_and_a_further_parameter_group() -> None:
    params, state = run_workers(1, refreezes, "replicated")[0]
    for found in run_workers(3, refreezes, "sharded"):
        assert s.same(found[0], params) and s.same(found[1], state)
