"""kf.FusedMuon: torch.optim.Muon's and AdamW's bits in one process. On several workers: test_sharded, test_jobs too."""

from __future__ import annotations

import copy
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest
import sharded as s
import torch
import torch.nn.functional as F
from distributed import on_workers
from elastic_job import compose, words
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import relative
from torch import Tensor, nn

import kfuse as kf
from kfuse.cli.check import ConfigError
from kfuse.comm.buckets import BucketLayout
from kfuse.comm.owners import owned_parts
from kfuse.kernels import BLOCK
from kfuse.models import GPT, MLP, ConvNet
from kfuse.optim.muon import hidden_matrices

STEPS = 8


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 33), nn.Tanh(), nn.Linear(33, 3))


def parts(net: nn.Sequential) -> tuple[list[Tensor], list[Tensor]]:
    """Muon's parameters, and AdamW's."""
    matrices: list[Tensor] = [net[0].weight, net[2].weight]
    return matrices, [net[0].bias, net[2].bias, *net[4].parameters()]


def groups(net: nn.Sequential) -> list[dict[str, Any]]:
    matrices, others = parts(net)
    return [{"params": matrices}, {"params": others, "use_muon": False, "lr": 0.003, "weight_decay": 0.02}]


def plain(net: nn.Sequential, **options: Any) -> tuple[Any, Any]:
    matrices, others = parts(net)
    muon = torch.optim.Muon(matrices, **options)
    return muon, torch.optim.AdamW(others, lr=0.003, weight_decay=0.02, fused=True)


def loss(net: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 9, generator=generator), torch.randn(12, 3, generator=generator)
    return F.mse_loss(net(x[rows]), y[rows])


def linear(net: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    """A loss whose gradients do not depend on the parameters, which AdamW's two ways of rounding make unequal."""
    generator = torch.Generator().manual_seed(step)
    return torch.stack([(p * torch.randn(p.shape, generator=generator)).sum() for p in net.parameters()]).sum()


def train(net: nn.Module, optimizers: Any, steps: range, rows: slice = slice(None), loss: Any = loss) -> None:
    for step in steps:
        loss(net, step, rows).backward()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()


def assert_same(net: nn.Sequential, other: nn.Sequential) -> None:
    """Muon's matrices bit for bit; AdamW's flat update rounds otherwise than torch's."""
    assert s.same(*([p.detach() for p in parts(each)[0]] for each in (net, other)))
    assert relative(net.parameters(), other.parameters()) < 1e-6


OPTIONS: tuple[dict[str, Any], ...] = (
    {"lr": 0.02},
    {"lr": 0.01, "nesterov": False, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torchs_bits_and_torchs_state(options: dict[str, Any]) -> None:
    """Muon's state goes both ways in the middle."""
    ours = network()
    theirs = copy.deepcopy(ours)
    opt, (muon, adamw) = kf.FusedMuon(groups(ours), arithmetic="bf16", **options), plain(theirs, **options)
    train(ours, [opt], range(STEPS), loss=linear)
    train(theirs, [muon, adamw], range(STEPS), loss=linear)
    assert_same(ours, theirs)
    assert torch.equal(opt.state[ours[0].weight]["momentum_buffer"], muon.state[theirs[0].weight]["momentum_buffer"])

    again, other = (copy.deepcopy(theirs) for _ in range(2))
    alone, rest = kf.FusedMuon(parts(again)[0], arithmetic="bf16", lr=7.0), plain(again)[1]
    back, same = plain(other)
    several = kf.FusedMuon(groups(joined := copy.deepcopy(theirs)), arithmetic="bf16", lr=7.0)
    several.load_state_dict({"optimizers": [copy.deepcopy(each.state_dict()) for each in (muon, adamw)]})
    for source, targets in ((muon, [alone]), (adamw, [rest, same]), (alone, [back])):
        for target in targets:
            target.load_state_dict(copy.deepcopy(source.state_dict()))
    trainings = (theirs, (muon, adamw)), (again, (alone, rest)), (other, (back, same)), (joined, (several,))
    for net, optimizers in trainings:
        train(net, optimizers, range(STEPS, 2 * STEPS), loss=linear)
        assert_same(net, theirs)


def test_a_group_that_loads_adamws_state_is_still_adamws() -> None:
    p = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([p])
    (p * torch.arange(3.0)).sum().backward()
    theirs.step()
    theirs.zero_grad()
    ours = kf.FusedMuon([{"params": [p], "use_muon": False}])
    ours.load_state_dict(theirs.state_dict())
    ours.rebuild()  # takes each group's rule anew
    assert s.same(s.tensors(ours.state_dict()), s.tensors(theirs.state_dict()))


def test_a_stack_of_matrices_has_the_bits_of_each() -> None:
    torch.manual_seed(2)
    stack = nn.Parameter(torch.randn(3, 10, 20))
    each = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizers = kf.FusedMuon([stack], lr=0.1), kf.FusedMuon(each, lr=0.1)
    for _ in range(3):
        gradient = torch.randn(3, 10, 20)
        (stack * gradient).sum().backward()
        sum((p * g).sum() for p, g in zip(each, gradient, strict=True)).backward()  # type: ignore[union-attr]
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
    assert torch.equal(stack, torch.stack(list(each)))


def test_a_state_of_the_other_rule_is_refused() -> None:
    """Also torch.optim.AdamW's, which has no `use_muon`; and nothing of it is loaded."""
    matrices, _ = parts(network())
    opt = kf.FusedMuon([{"params": matrices[:1]}, {"params": matrices[1:], "use_muon": False}])
    muons, adamws = copy.deepcopy(opt.state_dict()["param_groups"])
    torchs = torch.optim.AdamW(matrices[:1]).state_dict()["param_groups"][0]
    for k, pair in ((1, (muons | {"lr": 7.0}, adamws | {"use_muon": True})), (0, (torchs, adamws | {"lr": 7.0}))):
        with pytest.raises(ValueError, match=f"group {k} of the state has use_muon={k == 1}: must be {k == 0}"):
            opt.load_state_dict({"state": {}, "param_groups": list(pair)})
    assert opt.state_dict()["param_groups"] == [muons, adamws]


def test_the_arithmetic_does_not_depend_on_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, name in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has_bf16=has_bf16: has_bf16)
        matrices, _ = parts(network())
        opt = kf.FusedMuon([{"params": matrices[:1]}, {"params": matrices[1:], "arithmetic": "auto"}])
        assert [group["arithmetic"] for group in opt.param_groups] == [name, name]


# -- several workers --------------------------------------------------------------------------------------------------


def in_fp32(matrix: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """torch's iteration, which is in bf16."""
    tall, (a, b, c) = matrix.shape[0] > matrix.shape[1], coefficients
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("state", ["replicated", "sharded"])
@on_workers(2)
def test_fifty_steps_of_two_workers_are_a_plain_loops(state: str) -> None:
    s.init(state)
    rank, size = kf.rank(), kf.size()
    ours = network()
    theirs = copy.deepcopy(ours)
    torch.optim._muon._zeropower_via_newtonschulz = in_fp32  # type: ignore[attr-defined]
    opt, plain_ones = kf.FusedMuon(groups(ours), lr=0.02, arithmetic="fp32"), plain(theirs, lr=0.02)
    train(ours, [opt], range(50), slice(rank, None, size))
    train(theirs, plain_ones, range(50))
    assert relative(ours.parameters(), theirs.parameters()) < 1e-4


@on_workers(4)
def test_a_worker_has_the_momentum_of_its_own_matrices() -> None:
    s.init("sharded", bucket_mb=25)
    net = nn.Sequential(*(nn.Linear(64, 128, bias=False) for _ in range(8)))
    opt: Any = kf.FusedMuon(list(net.parameters()))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    held = [tensor for state in opt.updates.states for tensor in state.own.tensors.values()]
    numel = sum(p.numel() for p in net.parameters())
    assert sum(tensor.nbytes for tensor in held) == 4 * numel / 4, "bytes"


COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@settings(max_examples=200)
@given(st.lists(COSTS, min_size=1, max_size=3), st.integers(1, 4))
def test_matrices_go_to_their_owners_whole_and_evenly(buckets: list[list[int]], size: int) -> None:
    """Against all cuts of each bucket."""
    layouts = []
    for costs in buckets:
        starts = tuple(BLOCK * k for k in range(len(costs) + 1))
        layouts.append(BucketLayout(tuple(range(len(costs))), starts[:-1], starts[-1], costs=tuple(costs)))
    found, loads = owned_parts(layouts, size), [0] * size
    for number, costs in enumerate(buckets):
        cuts = [(part.start // BLOCK, part.stop // BLOCK) for part in found[number]]
        assert [0, *(stop for _, stop in cuts)] == [*(start for start, _ in cuts), len(costs)]
        every = combinations_with_replacement(range(len(costs) + 1), size - 1)
        tried = (pairwise([0, *inner, len(costs)]) for inner in every)
        least = min(max(load + sum(costs[a:b]) for load, (a, b) in zip(loads, each, strict=True)) for each in tried)
        loads = [load + sum(costs[a:b]) for load, (a, b) in zip(loads, cuts, strict=True)]
        assert max(loads) == least


# -- wrong uses -------------------------------------------------------------------------------------------------------


def test_what_muon_cannot_train_is_refused() -> None:
    net = network()
    matrices, _ = parts(net)
    opt = kf.FusedMuon(matrices)
    for wrong, message in (
        (
            lambda: kf.FusedMuon(net.named_parameters()),
            r"0\.bias of group 0 has the shape \(70,\): Muon takes matrices",
        ),
        (lambda: opt.add_param_group({"params": net[0].bias}), r"parameter 0 of group 1 .* use_muon=False is AdamW's"),
        (lambda: opt.add_param_group({"params": net[0].bias, "use_muon": False, "lr": -1.0}), "lr=-1.0: must be 0"),
        (lambda: kf.FusedMuon(matrices, momentum=1.0), r"momentum=1\.0: must be in \[0, 1\)"),
        (lambda: kf.FusedMuon(matrices, ns_steps=0), "ns_steps=0: must be 1 to 99"),
        (lambda: kf.FusedMuon(matrices, ns_steps=2.5), r"ns_steps=2\.5: must be 1 to 99"),  # type: ignore[arg-type]
        (lambda: kf.FusedMuon(ConvNet((3, 8, 8), 10)), "ConvNet has no hidden matrices for Muon"),
        (lambda: kf.FusedMuon(matrices, arithmetic="fp16"), "arithmetic='fp16': must be one of auto, bf16, fp32"),
        (
            lambda: kf.FusedMuon(matrices, adjust_lr_fn="none"),
            "adjust_lr_fn='none': must be one of original, match_rms",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()  # type: ignore[no-untyped-call]
    assert len(opt.param_groups) == 1


# -- optimizer=muon ---------------------------------------------------------------------------------------------------


def test_hidden_matrices_are_those_in_the_blocks() -> None:
    gpt = GPT(vocab_size=11, block_size=5, layers=2, heads=1, width=4)
    names = {id(p): name for name, p in gpt.named_parameters()}
    found = [names[id(p)] for p in hidden_matrices(gpt)]
    layers = ("attention.qkv", "attention.project", "expand", "contract")
    assert found == [f"blocks.{k}.{layer}.weight" for k in range(2) for layer in layers]
    opt = kf.FusedMuon(gpt)
    assert [(len(group["params"]), group["use_muon"]) for group in opt.param_groups] == [(8, True), (20, False)]
    mlp = MLP((4,), 3, hidden=(8, 8))
    assert [tuple(p.shape) for p in hidden_matrices(mlp)] == [(8, 4), (8, 8)]


def test_the_shell_refuses_what_muon_cannot_train() -> None:
    mlp = words("optimizer=muon model=mlp")
    compose([*mlp, "model.hidden=[8]", "comm.state=sharded"])
    for wrong, message in (
        ("model.hidden=[]", "MLP has no hidden matrices for Muon: use adamw or sgd"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1: must be 0 or more"),
        ("optimizer.momentum=1", r"optimizer.momentum=1: must be in \[0, 1\)"),
        ("optimizer.adjust_lr_fn=none", "optimizer.adjust_lr_fn=none: must be one of original, match_rms_adamw"),
        ("optimizer.arithmetic=fp64", "optimizer.arithmetic=fp64: must be one of auto, bf16, fp32"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose([*mlp, wrong])
