"""A parameter belongs to one optimizer at a time, and its values lie where that optimizer expects them."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfuse as kf

MAKERS = {
    "adamw": lambda params: kf.FusedAdamW(params, lr=0.1),
    "wrapped": lambda params: kf.Optimizer(torch.optim.SGD(params, lr=0.1)),
}


@pytest.fixture(params=[MAKERS["adamw"], MAKERS["wrapped"]], ids=["flat", "wrapped"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def backward(net: nn.Module) -> Tensor:
    loss: Tensor = net(torch.ones(3, 4)).square().mean()
    loss.backward()
    return loss


# -- two optimizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["step", "micro_batch"])
def test_an_optimizer_whose_parameters_a_newer_one_took_over_says_so(make: Any, use: str) -> None:
    net = nn.Linear(4, 2)
    older = make(net.parameters())
    backward(net)
    older.step()
    older.zero_grad()
    newer = make([net.weight])
    before = net.weight.detach().clone()
    with pytest.raises(RuntimeError, match="belong to a newer kfuse optimizer"):
        if use == "step":
            backward(net)
            older.step()
        else:
            older.micro_batch()
    net.zero_grad()
    newer.zero_grad()
    backward(net)
    newer.step()
    assert not torch.equal(before, net.weight)


def test_rebuild_takes_the_parameters_back() -> None:
    net = nn.Linear(4, 2)
    older, newer = kf.FusedSGD(net.parameters(), lr=0.1), kf.FusedSGD(net.parameters(), lr=0.1)
    older.rebuild()
    before = net.weight.detach().clone()
    backward(net)
    older.step()
    assert not torch.equal(before, net.weight)
    with pytest.raises(RuntimeError, match="newer kfuse optimizer"):
        newer.step()


# -- a parameter twice -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")  # the wrapped one's
def test_a_parameter_listed_twice_is_named(make: Any) -> None:
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"parameter 2 of shape \(2, 4\) is parameter 1 again"):
        make([p, q, q])
    with pytest.raises(ValueError, match=r"parameter 2 \(head\.w\) of shape \(2, 4\) is parameter 1 \(tail\.w\) again"):
        make([("p", p), ("tail.w", q), ("head.w", q)])
    with pytest.raises(ValueError, match=r"parameter 2 of shape \(2, 4\) is parameter 1 again|more than one .* group"):
        make([{"params": [p, q]}, {"params": [q], "lr": 0.2}])


def test_a_group_that_is_refused_is_not_added(make: Any) -> None:
    net, more = nn.Linear(4, 2), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = make(net.parameters())
    for bad in ([net.bias], [more]):
        with pytest.raises(ValueError, match="parameter 2"):
            opt.add_param_group({"params": bad})
        assert len(opt.param_groups) == 1
    before = net.weight.detach().clone()
    backward(net)
    opt.step()
    assert not torch.equal(before, net.weight)


# -- ties ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_tied_through_data_are_refused_by_name(frozen: bool) -> None:
    net = Tied()
    net.b.weight.data = net.a.weight.data.view(4, 4)
    net.b.weight.requires_grad_(not frozen)
    with pytest.raises(ValueError, match=r"parameter 0 of shape .* and parameter 2 of .* share .*the same Parameter"):
        MAKERS["adamw"](net.parameters())
    with pytest.raises(ValueError, match=r"parameter 0 \(a\.weight\) .* and parameter 2 \(b\.weight\)"):
        MAKERS["adamw"](net.named_parameters())


def test_weights_tied_through_data_later_are_refused_at_step() -> None:
    net = Tied()
    opt = MAKERS["adamw"](net.parameters())
    net.b.weight.data = net.a.weight.data
    backward(net)
    with pytest.raises(ValueError, match=r"parameter 0 .* parameter 2 .* share"):
        opt.step()


def test_a_shared_parameter_is_trained_as_torch_does(make: Any) -> None:
    nets = [Tied(), Tied()]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        net.b.weight = net.a.weight
    reference: Any = torch.optim.SGD if make is MAKERS["wrapped"] else torch.optim.AdamW
    opts: list[Any] = [make(nets[0].parameters()), reference(nets[1].parameters(), lr=0.1)]
    for net, opt in zip(nets, opts, strict=True):
        for _ in range(3):
            backward(net)
            opt.step()
            opt.zero_grad()
    assert nets[0].b.weight is nets[0].a.weight
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_swapped_data_is_kept() -> None:
    ours, theirs = Tied(), Tied()
    theirs.load_state_dict(ours.state_dict())
    opt, plain = kf.FusedSGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for net, o in ((ours, opt), (theirs, plain)):
        net.a.weight.data, net.b.weight.data = net.b.weight.data, net.a.weight.data
        backward(net)
        o.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)


def test_a_model_that_changes_its_type_under_the_optimizer_is_refused() -> None:
    net = nn.Linear(4, 2)
    opt = kf.FusedSGD(net.named_parameters(), lr=0.1)
    net.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"parameter . \((weight|bias)\) was .*float32 and is .*bfloat16 now: "):
        net(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    del opt


def test_saving_one_layer_writes_that_layer_only(make: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(500, 500))
    opt = make(net.parameters())
    for _ in range(2):
        net[0](torch.ones(1, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        written = io.BytesIO()
        torch.save(net[0].state_dict(), written)
        assert len(written.getvalue()) < 10_000
        written.seek(0)
        assert torch.equal(torch.load(written)["weight"], net[0].weight)


def test_moving_parameters_to_shared_memory_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(4, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    net.share_memory()
    with caplog.at_level(logging.WARNING, "kfuse"):
        for _ in range(2):
            backward(net)
            opt.step()
            opt.zero_grad()
    [record] = caplog.records
    assert "was moved to shared memory after FusedSGD was made" in record.message
