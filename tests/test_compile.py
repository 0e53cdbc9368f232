"""Models that are compiled, or whose activations are checkpointed, train as the same models without that.

Reentrant checkpointing runs each segment's backward inside the outer one, and autograd calls back at the end of that
inner backward. A step that ends there is cut in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from problems import assert_close, update
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfuse as kf
from kfuse.comm.buckets import Bucket
from kfuse.comm.engine import Engine
from kfuse.comm.executor import Executor
from kfuse.session import reset
from kfuse.train.evaluation import params_sha256

BACKEND = "aot_eager"  # traces forward and backward as Inductor's are, and needs no C++ compiler


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return out


class Net(nn.Module):
    """Three blocks between two layers. reentrant: each block is a segment of torch's checkpointing. `seen` gets what
    each block returned, where it is a list.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.statistics = nn.BatchNorm1d(12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.seen: list[Tensor] | None = None
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.statistics(self.first(x))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            if self.seen is not None:
                self.seen.append(x)
        out: Tensor = self.last(x)
        return out


def made(way: str) -> tuple[Net, nn.Module]:
    """The model, and what is trained. dynamic=False: each size of a micro-batch has code of its own, whatever sizes a
    worker has seen before.
    """
    net = Net({"reentrant": True, "not reentrant": False}.get(way))
    if way == "whole":
        return net, torch.compile(net, backend=BACKEND, dynamic=False)  # type: ignore[return-value]
    if way == "in place":
        net.compile(backend=BACKEND, dynamic=False)
    if way == "graphs":
        in_graphs(net)
    for block in net.blocks if way == "blocks" else ():
        block.compile(backend=BACKEND, dynamic=False)
    return net, net


def in_graphs(net: Net) -> None:
    """A double of the blocks with `mode="reduce-overhead"`: their gradients lie in the memory of a pool. It is written
    again from the first compiled forward after a compiled backward on (torch/_inductor/cudagraph_trees.py,
    `can_start_new_generation`): here at once, with NaN.
    """
    written: list[Tensor] = []

    def write_again(*_: object) -> None:
        while written:
            written.pop().fill_(torch.nan)

    for p in net.blocks.parameters():  # nobody else has what becomes its p.grad
        p.register_hook(lambda grad: written.append(grad) or grad.detach())
    net.register_forward_pre_hook(write_again)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(70, 6, generator=generator)  # a batch has 12, the last one 10: a micro-batch of 2 among those of 4
    return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)


def trained(way: str, loop: str = "fit") -> tuple[str, list[float], dict[str, Any]]:
    """The parameters' digest after two epochs of a loop; figures of the last step; what the model's buffers are."""
    reset()
    kf.init(comm_reproducible=loop == "fit")
    net, model = made(way)
    opt, (x, y) = kf.FusedAdamW(model.parameters(), lr=0.01), problem()
    if loop == "fit":
        kf.fit(model, (x, y), opt, batch_size=12, micro_batch=4, epochs=2)
    if loop == "accumulate":
        opt.accumulate(2)
    for step in range(0 if loop == "fit" else 3):
        torch.manual_seed(step)
        for part in (slice(0, 24),) if loop == "bare" else (slice(0, 12), slice(12, 24)):
            inside = opt.micro_batch(samples=12, last=part.stop == 24) if loop == "micro_batch" else nullcontext()
            with inside:
                (F.cross_entropy(model(x[part]), y[part]) / (2 if loop == "accumulate" else 1)).backward()
        update(opt)
    stats = opt.stats
    assert stats is not None and stats.grad_norm is not None
    figures = [stats.grad_norm, float(stats.grad_variance or 0.0), float(stats.loss or 0.0)]
    return params_sha256(model), figures, {name: each.tolist() for name, each in net.named_buffers()}


@pytest.mark.full
@pytest.mark.parametrize("way", ["whole", "in place", "blocks"])
def test_a_compiled_model_trains_as_the_model_itself(way: str) -> None:
    """Parameters, statistics, BatchNorm's buffers and dropout, with kf.fit's micro-batches."""
    assert trained(way) == trained("eager")


@pytest.mark.parametrize("loop", ["bare", "accumulate", "micro_batch", "fit"])
def test_gradients_that_the_next_replay_overwrites_are_packed_before(loop: str) -> None:
    """A bucket's wait in `p.grad` until the last one has come. (torch's own accumulation loses them.)"""
    assert trained("graphs", loop) == trained("eager", loop)
    net, (x, y) = made("graphs")[0], problem()
    for _ in range(2):
        F.cross_entropy(net(x), y).backward()
    assert all(p.grad is not None and p.grad.isnan().any() for p in net.blocks.parameters())


@pytest.mark.parametrize("loop", ["bare", "accumulate", "micro_batch", "fit"])
def test_checkpointing_changes_nothing(loop: str) -> None:
    """It draws dropout's numbers again for the backward."""
    assert trained("reentrant", loop) == trained("not reentrant", loop) == trained("eager", loop)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of the inner segment
def test_nested_segments_and_a_retained_graph() -> None:
    """The outermost backward's end counts, and a second backward through the same graph is a micro-batch of its own."""
    (net, _), (twin, _), (x, y) = made("eager"), made("eager"), problem()
    params, others = ([*each.first.parameters(), *each.last.parameters()] for each in (net, twin))
    opt, plain = kf.FusedSGD(params, lr=0.1), torch.optim.SGD(others, lr=0.1)
    opt.accumulate(2)

    def inner(v: Tensor) -> Any:
        return checkpoint(lambda u: torch.tanh(net.first(u)), v, use_reentrant=True)

    def outer(v: Tensor) -> Any:
        return checkpoint(net.last, checkpoint(inner, v, use_reentrant=True), use_reentrant=True)

    for _ in range(2):
        half = F.cross_entropy(checkpoint(outer, x.clone().requires_grad_(), use_reentrant=True), y) / 2
        half.backward(retain_graph=True)
        half.backward()
        F.cross_entropy(twin.last(torch.tanh(twin.first(x))), y).backward()
        update(opt, plain)
    assert_close(params, others)


@pytest.mark.full
def test_the_same_bits_for_any_number_of_workers() -> None:
    alone = trained("blocks")
    assert [each[0] for each in run_workers(3, trained, "blocks")] == [alone[0]] * 3


class Events:
    """What happens in a backward: of which block it has come to the output, and launches; how much is packed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        self.packed = 0
        pack, launch = Engine.pack, Executor.launch

        def packing(engine: Engine, bucket: Bucket) -> None:
            self.packed += len(bucket.grads)
            pack(engine, bucket)

        def launching(executor: Executor, complete: Sequence[Bucket], *arguments: Any) -> None:
            launch(executor, complete, *arguments)
            self.happened += ["launch"] * len(complete)

        patch.setattr(Engine, "pack", packing)
        patch.setattr(Executor, "launch", launching)


def one_step(patch: pytest.MonkeyPatch) -> Events:
    kf.init(comm_bucket_mb=0.001)
    net, model = made("blocks")
    events = Events(patch)  # before the optimizer's hooks are there
    opt = kf.FusedAdamW(model.parameters(), lr=0.01)
    x, y = problem()
    net.seen = []
    out = model(x)
    for k, output in enumerate(net.seen):
        output.grad_fn.register_hook(lambda *_, k=k: events.happened.append(f"block {k}"))  # type: ignore[union-attr, misc]
    F.cross_entropy(out, y).backward()
    opt.step()
    assert events.packed == len(opt.engine.params)  # each one hook, once
    return events


@pytest.mark.full
def test_blocks_that_are_compiled_one_by_one_launch_their_buckets_during_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened = one_step(monkeypatch).happened
    assert happened.index("launch") < happened.index("block 1") < happened.index("block 0")
    for later, earlier in (("block 2", "block 1"), ("block 1", "block 0")):
        between = happened[happened.index(later) : happened.index(earlier)]
        assert "launch" in between, happened


@pytest.mark.full
def test_compiled_autograd_is_refused_in_a_bare_backward() -> None:
    """It has no callbacks at the end of a backward. The refusal is one line, and the step is dropped."""
    net = nn.Linear(6, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    loss, compiler = net(torch.ones(4, 6)).sum(), torch.compile(backend="eager")
    said = pytest.raises(RuntimeError, match=r"^a bare backward under compiled autograd .* opt\.micro_batch.*$")
    with said, torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    opt.zero_grad()
    with opt.micro_batch(samples=4):
        net(torch.ones(4, 6)).sum().backward()
    opt.step()
