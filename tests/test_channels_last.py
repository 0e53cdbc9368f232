"""Parameters of any dense memory layout, channels_last above all: flat buffers follow the order of their memory."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from elastic_job import read_lines
from problems import update
from torch import Tensor, nn

import kfuse as kf
from kfuse.train.evaluation import params_sha256

LAST = torch.channels_last


def network(layout: Any = LAST, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """With a 1x1 convolution, whose strides say channels_last in dimensions of one element only."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1), nn.Flatten(), nn.Linear(200, 4)
    )
    return net.to(dtype).to(memory_format=layout)


def problem(count: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 3, 5, 5, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def backward(net: nn.Module, step: int) -> None:
    images, labels = (each[4 * step :][:4] for each in problem())
    F.cross_entropy(net(images), labels).backward()


def strides(net: nn.Module) -> list[tuple[int, ...]]:
    return [p.stride() for p in net.parameters()]


def random_gradients(net: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in net.parameters()]


def fused(kind: str, net: nn.Module) -> Any:
    return {"adamw": kf.FusedAdamW, "sgd": kf.FusedSGD}[kind](net.parameters(), lr=1e-2)


# -- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "of_gradients", "dtype"),
    [
        ("adamw", LAST, torch.bfloat16),
        ("adamw", torch.contiguous_format, torch.float32),
        ("sgd", LAST, torch.float32),
    ],
    ids=str,
)
def test_the_same_updates_as_of_a_contiguous_model(kind: str, of_gradients: Any, dtype: torch.dtype) -> None:
    """Bit by bit, from the same gradients, whatever the gradients' own layout."""
    net, twin = network(dtype=dtype), network(torch.contiguous_format, dtype)
    assert net[0].weight.stride() == (27, 1, 9, 3)
    before = strides(net)
    opt, other = fused(kind, net), fused(kind, twin)
    assert strides(net) == before
    for step in range(3):
        for p, q, g in zip(net.parameters(), twin.parameters(), random_gradients(net, step), strict=True):
            q.grad = g.to(dtype)
            p.grad = q.grad.to(memory_format=of_gradients) if g.dim() == 4 else q.grad.clone()
        opt.step(), other.step()
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
        assert opt.stats.grad_norm == pytest.approx(other.stats.grad_norm, rel=1e-6)
        opt.zero_grad(), other.zero_grad()
    assert strides(net) == before
    assert params_sha256(net) == params_sha256(twin), "a fingerprint of values, not of their places"


# -- state ------------------------------------------------------------------------------------------------------------


def test_state_goes_to_torch_and_back_whatever_the_layouts() -> None:
    net = network()
    opt = fused("adamw", net)
    for step in range(2):
        backward(net, step)
        update(opt)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for p in net.parameters():
        assert opt.state[p]["exp_avg"].shape == p.shape and opt.state[p]["exp_avg"].stride() == p.stride()
    for layout in (LAST, torch.contiguous_format):
        plain = torch.optim.AdamW(network().parameters(), lr=1e-2)
        plain.load_state_dict(copy.deepcopy(saved))  # torch keeps the tensors that it is given
        again = network(layout)
        back = fused("adamw", again)
        back.load_state_dict(plain.state_dict())
        for p, r in zip(net.parameters(), again.parameters(), strict=True):
            assert all(torch.equal(back.state[r][name], opt.state[p][name]) for name in opt.state[p])


# -- a layout that changes after the optimizer was made ---------------------------------------------------------------


def test_a_wrapped_optimizer_follows() -> None:
    """torch's fused update pairs elements by their places, in silence: its gradients must be laid out anew."""
    net, twin = network(torch.contiguous_format), network(torch.contiguous_format)
    opt = kf.Optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    net.to(memory_format=LAST)
    for step in range(2):
        for each in (net, twin):
            for p, g in zip(each.parameters(), random_gradients(net, step), strict=True):
                p.grad = g.clone()
        opt.step(), plain.step()
        assert net[0].weight.grad is opt.engine.gradient_buckets[0].views[-1]
        opt.zero_grad(), plain.zero_grad()
    assert net[0].weight.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()), rtol=1e-6, atol=1e-7)


# -- several workers --------------------------------------------------------------------------------------------------


def reproducible(audit_every: int | None = None, run_dir: Path | None = None) -> str:
    torch.set_num_threads(1)
    kf.init(comm_reproducible=True, comm_bucket_mb=0.002, comm_check_every=1, comm_audit_every=audit_every)
    if kf.size() > 1:  # flat buffers would have the elements in other orders
        other = network(LAST if kf.rank() else torch.contiguous_format)
        with pytest.raises(ValueError, match=r"rank 1 has another model than rank 0: .* in memory layout"):
            kf.FusedAdamW(other.parameters())
    net = network(dtype=torch.bfloat16)
    if kf.rank():
        with torch.no_grad():
            net[0].weight.zero_()  # rank 0's values are shared
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 8, "micro_batch": 2, "clip_norm": 0.1}
    settings |= {"train_precision": "bf16-true", "run_dir": run_dir}
    summary = kf.fit(net, problem(), fused("adamw", net), **settings)
    assert summary is not None and net[0].weight.is_contiguous(memory_format=LAST)
    return str(summary["params_sha256"])


def test_the_same_bits_for_any_number_of_workers_and_in_an_audit(tmp_path: Path) -> None:
    """An audit accuses nobody, though buckets and p.grad have the elements in different orders."""
    alone = run_workers(1, reproducible)
    assert run_workers(2, reproducible, 1, tmp_path / "run") == alone * 2
    kinds = {event["kind"] for event in read_lines(tmp_path / "run" / "events.jsonl")}
    assert kinds and "corruption" not in kinds
