"""Each Triton launch happens on its tensors' device, and nothing is compiled in the middle of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from gpu.steps import muon
from launch_stub import GPU, Echo, Started, recorded

import kfuse as kf
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import StepPlan
from kfuse.comm.sum_tree import plan_merges, plan_range
from kfuse.data.fetching import worker_range
from kfuse.kernels import Merges, balanced, dispatch, num_blocks, reduce, triton_reduction
from kfuse.kernels.dispatch import Launch
from kfuse.kernels.orthogonal import orthogonalise
from kfuse.session import current
from kfuse.tools.doctor.kernel_checks import CHECKS

pytestmark = pytest.mark.skipif(dispatch.INTERPRETED, reason="the interpreter has no driver")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def call(name: str) -> None:
    CHECKS[name](GPU, draw)


def call_by_address(count: int = 2, merges: Merges = ((0, 1),), numel: int = 64) -> None:
    reduce([torch.ones(numel) for _ in range(count)], merges, torch.zeros(numel), torch.zeros(num_blocks(numel)))


LAUNCHED = {
    "pack": ["pack_kernel"] * 2,
    "reduce": ["sum_rows_kernel"] * 2,
    "message": ["pack_kernel", "sum_rows_kernel", "sum_rows_kernel"],
    "block_sumsq": ["block_sumsq_kernel", "sum_partials_kernel"],
    "reduce by address": ["sum_rows_kernel"],
    "adamw": ["adamw_kernel"] * 2,
    "sgd": ["sgd_kernel"],
    "lamb": ["lamb_moments_kernel", "lamb_trust_kernel", "lamb_apply_kernel"],
    "norm": ["norm_forward_kernel", "norm_backward_kernel", "norm_finish_kernel"] * 2,
    "orthogonalise": ["product_kernel"] * 6,
}


def check_devices(started: Sequence[Started]) -> None:
    """Every launch was made on its tensors' device, on the stream that is current there."""
    for each in started:
        assert each.devices == {each.device}, f"{each.kernel}: device {each.device}, tensors on {each.devices}"
        assert each.stream == 1000 + each.device


def test_launches_are_made_on_their_tensors_device() -> None:
    assert LAUNCHED.keys() == CHECKS.keys()
    for name, names in LAUNCHED.items():
        with recorded() as seen:
            call(name)
        assert [each.kernel for each in seen.started] == names
        assert {each.device for each in seen.started} == {1}
        check_devices(seen.started)
        assert seen.device == 0  # the current device is the caller's again


def test_without_the_guard_launches_are_found_on_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness catches what it is for."""
    monkeypatch.setattr(Launch, "_start_there", Launch._start)
    with recorded() as seen:
        call("pack")
    with pytest.raises(AssertionError, match=r"pack_kernel: device 0, tensors on \{1\}"):
        check_devices(seen.started)


def test_tables_are_uploaded_to_the_tensors_device_from_pinned_memory() -> None:
    with recorded() as seen:
        for name in ("pack", "reduce"):
            call(name)
            assert seen.uploads[-1] == (GPU, True)
        count = len(seen.uploads)
        call("reduce")
        assert len(seen.uploads) == count, "the order of the same merges was uploaded again"


def network() -> nn.Sequential:
    """Its buckets' lengths, with the tail, are no multiples of 16: so shards differ in that, too."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))


class Steps:
    """Planned steps of a model on one rank of a group whose other ranks send zeros."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Any], reproducible: bool) -> None:
        schedule = "all_to_all" if reproducible else "allreduce"
        current().comm = CommOptions(schedule, reproducible=reproducible, bucket_mb=0.004)
        current().group.fixed = False  # it grows
        self.model = network()
        self.opt = make(list(self.model.parameters()))

    def run(self, micro_batches: int, size: int, rank: int = 0) -> None:
        if (size, rank) != (self.opt.engine.group.size, self.opt.engine.group.rank):
            self.opt.engine.set_group(Echo(rank, size, GPU))
        mine = worker_range(micro_batches, size, rank, None)
        ranges = tuple(worker_range(micro_batches, size, r, None) for r in range(size))
        self.opt.begin(StepPlan(micro_batches, ranges))
        for j in mine:
            with self.opt.micro_batch(1, last=j == mine[-1]):
                self.model(torch.ones(1, 20)).sum().backward()
        self.opt.step()
        self.opt.zero_grad()


MAKERS: dict[str, tuple[bool, Callable[[list[nn.Parameter]], Any]]] = {
    "adamw": (True, lambda params: kf.FusedAdamW(params, lr=1e-3)),
    "sgd": (False, lambda params: kf.FusedSGD(params, lr=1e-3, momentum=0.9)),
    "lamb": (True, lambda params: kf.FusedLAMB(params, lr=1e-3)),
    "muon": (False, muon),
}
"""With or without reproducible sums."""


LATER = [(4, 2, 0), (2, 2, 0), (4, 2, 1), (29, 2, 0), (64, 2, 1), (64, 3, 2), (29, 5, 4), (64, 16, 3), (100, 15, 9)]
"""Micro-batches, workers and this worker's rank, of one step after another."""


@pytest.mark.parametrize("optimizer", MAKERS)
def test_after_the_first_step_nothing_is_compiled(optimizer: str) -> None:
    """Whatever the batch size and the workers become, and where a worker accumulates for the first time."""
    reproducible, make = MAKERS[optimizer]
    with recorded() as seen:
        steps = Steps(make, reproducible)
        steps.run(1, 1)  # nothing is reduced: the transport compiles what it needs as it is made
        check_devices(seen.started)
        compiled = list(seen.compiled)
        assert compiled
        for micro_batches, size, rank in LATER:
            before = len(seen.started)
            steps.run(micro_batches, size, rank)
            more = seen.compiled[len(compiled) :]
            assert not more, f"compiled for {micro_batches} micro-batches on {size} workers: {more}"
            assert len(seen.started) > before
        check_devices(seen.started)
        assert {"pack_kernel", "sum_partials_kernel"} <= {each.kernel for each in seen.started}
        assert ("sum_rows_kernel" in {each.kernel for each in seen.started}) == reproducible


@pytest.mark.parametrize("first", [2, 256])
def test_sums_by_address_are_compiled_at_the_first(first: int) -> None:
    """Whatever the number of contributions, their order, their length and where they lie."""
    with recorded() as seen:
        call_by_address(first, balanced(first))
        compiled = list(seen.compiled)
        assert compiled
        for count in (1, 2, 3, 8, 29, 256):
            call_by_address(count, balanced(count), 64 * count - count % 2)
        call_by_address(5, tuple((0, k) for k in range(1, 5)))
        assert seen.compiled == compiled
        check_devices(seen.started)
        assert all(device == GPU and pinned for device, pinned in seen.uploads)


def test_three_products_are_compiled_for_matrices_of_all_shapes() -> None:
    with recorded() as seen:
        for count, shape in ((1, (64, 96)), (3, (70, 1)), (2, (1, 1)), (1, (100, 1000))):
            outs = [draw(*shape) for _ in range(count)]
            orthogonalise(outs, outs, (3.4, -4.8, 2.0), steps=2, eps=1e-7)
        assert [name for name, _ in seen.compiled] == ["product_kernel"] * 3
        check_devices(seen.started)


def test_an_order_of_additions_is_data_for_any_plan() -> None:
    """All plans of up to 40 workers and 256 micro-batches fit the unfinished sums that the deeper binary has."""
    for total in (1, 2, 3, 29, 64, 100, 255, 256):
        for workers in (1, 2, 3, 5, 8, 13, 40):
            ranges = [worker_range(total, workers, rank, None) for rank in range(workers)]
            nodes = [node for mine in ranges for node in plan_range(mine.start, len(mine), total).pieces]
            lines = triton_reduction.adding_program(len(nodes), plan_merges(nodes, total))
            assert len(lines) % triton_reduction.AHEAD == 0
            assert max(high for _, _, high, _ in lines) <= triton_reduction.DEEPER
