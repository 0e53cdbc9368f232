"""A small model, a session of several workers in one process, and loops over steps: what the recorder looks at."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu.recorder import Recorder
from gpu.stand_in import nccl_stood_in
from torch import Tensor, nn

import kfuse as kf
from kfuse import session
from kfuse.comm.group import Group
from kfuse.comm.nccl import NcclGroup
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import StepPlan

_DEVICE = torch.device("cpu")  # as a device, not as the string "cpu": what the recorder takes for cuda:1

TINY_BUCKETS = 64 * 4 / 2**20  # MB: a bucket for each parameter
SMALL_BUCKETS = 320 * 4 / 2**20  # MB: with `width=40` each bucket has a shard for every one of three workers


def muon(params: Any) -> Any:
    """For the matrices, AdamW for the rest."""
    params = list(params)
    others = {"params": [p for p in params if p.dim() != 2], "use_muon": False}
    return kf.FusedMuon([{"params": [p for p in params if p.dim() == 2]}, others], arithmetic="fp32")


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": kf.FusedAdamW,
    "lamb": kf.FusedLAMB,
    "sgd": lambda params: kf.FusedSGD(params, lr=0.1, momentum=0.9),
    "muon": muon,
    "wrapped fused adamw": lambda params: kf.Optimizer(torch.optim.AdamW(params, fused=True)),
    "wrapped adamw": lambda params: kf.Optimizer(torch.optim.AdamW(params)),
}


class Net(nn.Module):
    """With a layer that is used in every other forward and one that never is, unless `all_used`."""

    def __init__(self, batch_norm: bool, all_used: bool, width: int = 10) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.sometimes, self.never = nn.Linear(6, 4), nn.Linear(3, 3)
        self.never.requires_grad_(not all_used)
        self.forwards, self._all_used = 0, all_used

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        uses_it = self.forwards % 2 == 1 or self._all_used
        # First, so that its gradients come last, and those of later buckets wait for them.
        start = self.sometimes(x) if uses_it else 0.0
        y: Tensor = self.last(torch.tanh(self.middle(self.norm(torch.tanh(self.first(x))))))
        return y + start


class Job:
    def __init__(self, recorder: Recorder, size: int, elastic: bool, model: Net) -> None:
        self.recorder, self.model = recorder, model
        self._size, self._check = size, (lambda: None) if elastic else None
        self.group = self.form_group()
        self.opt: Any = None
        self._nodes: list[Any] = []  # that accumulate gradients
        dtype = model.first.weight.dtype
        self.x, self.y = (torch.ones(8, size, dtype=dtype, device=_DEVICE) for size in (6, 4))

    def form_group(self) -> Group:
        if self._size == 1:
            return Group(device=_DEVICE)
        return NcclGroup(0, self._size, dist.HashStore(), _DEVICE, check=self._check)

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(self.x), self.y)

    def bare_step(self, factor: float = 1.0) -> None:
        """A loop of one's own: one backward, of the loss times a factor."""
        (self.loss() * factor).backward()
        self.end_step()

    def forwards_on_two_streams(self, layer: str = "middle") -> None:
        """From now on this layer is run on a stream of its own, as by `with torch.cuda.stream(...)`.

        Autograd then runs its backward and the hooks of its parameters there, orders each stream after those that its
        gradients come from, and at the end orders the caller's stream after all of them, before callbacks run
        (torch/csrc/autograd/engine.cpp, `GraphTask::exec_post_processing`). CPU tensors have no stream, so hooks of
        the parameters switch it here, and back as the node that accumulates their gradient is over.
        """
        recorder, side = self.recorder, self.recorder.device.new_stream()

        def enter(grad: Tensor, p: Tensor) -> Tensor:
            side.wait_stream(recorder.main)
            recorder.device.keep([grad], side)
            recorder.current = side
            computed = grad.clone()
            if any(hooks.nodes and any(p is q for q in hooks.bucket.tensors) for hooks in self.opt.engine.hooks):
                recorder.current = recorder.main  # the node that accumulates is held, and was made there
                recorder.main.wait_stream(side)
                recorder.device.keep([computed], recorder.main)
            return computed

        def leave(*_: object) -> None:
            recorder.current = recorder.main

        def at_the_end(grad: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: recorder.main.wait_stream(side))

        for p in self.model.get_submodule(layer).parameters():
            p.register_hook(partial(enter, p=p))
            self._nodes.append(p.view_as(p).grad_fn.next_functions[0][0])  # lives as long as somebody holds it
            self._nodes[-1].register_hook(leave)
        self.model.register_forward_hook(lambda module, args, output: output.register_hook(at_the_end) and None)

    def step(self, micro_batches: int = 3, several_backwards: bool = False) -> None:
        for j in range(micro_batches):
            last = j == micro_batches - 1
            with self.opt.micro_batch(samples=8, last=last, several_backwards=several_backwards) as micro_batch:
                loss = self.loss()
                micro_batch.loss = loss.detach()
                loss.backward()
                if several_backwards:
                    self.loss().backward()
        self.end_step()

    def planned_step(self, ranges: Sequence[range], by_weight: bool = False, local: bool = False) -> None:
        """A step as kf.fit makes it. ranges: each worker's micro-batches."""
        own = 8 * len(ranges[0]) if local else None
        self.run(StepPlan(8 * ranges[-1].stop, tuple(ranges), own, by_weight=by_weight))
        self.end_step()

    def run(self, plan: StepPlan) -> None:
        self.opt.begin(plan)
        mine = plan.ranges[0]
        for j in mine:
            with self.opt.micro_batch(1 + j if plan.by_weight else 8, last=j == mine[-1]) as micro_batch:
                loss = self.loss()
                micro_batch.loss = loss.detach()
                loss.backward()

    def next_group(self) -> None:
        """As after the loss of a worker: ends the group, and goes on with another."""
        self.group.abort()
        self.group = session.current().group = self.form_group()
        self.opt.engine.set_group(self.group)
        gc.collect()

    def scaled_step(self, scaler: Any, factor: float = 1.0) -> None:
        """A bare backward of the scaled loss, and the update through the scaler."""
        scaler.scale(self.loss() * factor).backward()
        scaler.step(self.opt)
        scaler.update()
        self.opt.zero_grad()
        self.recorder.end_step()

    def end_step(self) -> None:
        self.opt.step()
        self.opt.zero_grad()
        self.recorder.end_step()


@contextmanager
def job(
    make: Callable[[Any], Any] = kf.FusedAdamW,
    size: int = 2,
    elastic: bool = False,
    lag: int | None = None,
    batch_norm: bool = False,
    all_used: bool = False,
    current: bool = True,
    width: int = 10,
    parameters: torch.dtype = torch.float32,
    **comm: Any,
) -> Iterator[Job]:
    """Context: what runs in it is recorded. At its end there must be no error, unless the test has taken them away.

    batch_norm: the model has BatchNorm, whose buffers are averaged. all_used: it uses all of its parameters.
    current: the session makes its device the current one. width: of the model. comm: CommOptions.
    """
    session.reset()
    model = Net(batch_norm, all_used, width).to(parameters)
    with Recorder(lag) as recorder, nccl_stood_in(recorder):
        if current:
            recorder.device.make_current()
        it = Job(recorder, size, elastic, model)
        options = CommOptions(**{"bucket_mb": TINY_BUCKETS, "check_every": None, **comm})  # a comparison waits
        # By name: of a stand-in's messages `auto` would measure the time, and choose by it, but their values differ.
        session._current = session.Session(it.group, replace(options, schedule=options.transport()))
        it.opt = make(model.parameters())
        if it.opt is not None:
            it.opt.statistics.at_fixed_lag = elastic  # as with a supervisor
        if batch_norm:
            it.opt.sync_buffers(model)
        recorder.host_waits.clear()
        yield it
        it.group.abort()
    assert not recorder.errors, "\n".join(recorder.errors)
