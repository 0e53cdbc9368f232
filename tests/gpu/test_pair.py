"""Pair averaging on a GPU: neither the snapshot that a step publishes nor the one that it averages in is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from gpu.steps import OPTIMIZERS, job

from kfuse.comm import devices
from kfuse.comm.sync.pair import Pair

AHEAD = 2  # steps that the host is ahead of the device, whatever it does


@contextlib.contextmanager
def paired(pair: Pair, numel: int) -> Iterator[None]:
    """In each step a snapshot has arrived in pinned memory, as the puller's thread leaves it there."""
    arrived = devices.of(torch.device("cpu")).pinned((numel,), torch.float32)
    arrived.zero_()
    pair.puller.take = lambda: arrived  # type: ignore[method-assign]
    yield
    pair.close()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "wrapped fused adamw"])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_no_step_waits(optimizer: str, parameters: torch.dtype) -> None:
    with job(OPTIMIZERS[optimizer], lag=AHEAD, parameters=parameters) as it:
        weights = it.opt.weights()
        pair = Pair(weights, 0, "127.0.0.1", lambda step, ranks: ranks[0])
        with paired(pair, sum(weight.numel() for weight in weights)):
            it.opt.average_with(pair)
            for _ in range(5):
                it.bare_step()
            assert pair.mixed == 5
            assert it.recorder.host_waits == []


def test_a_snapshot_is_complete_before_it_is_read() -> None:
    """The thread that serves it waits for the copy, and no step does."""
    with job(OPTIMIZERS["sgd"], lag=AHEAD) as it:
        weights = it.opt.weights()
        pair = Pair(weights, 0, "127.0.0.1", lambda step, ranks: ranks[0])
        with paired(pair, sum(weight.numel() for weight in weights)):
            it.opt.average_with(pair)
            it.bare_step()
            assert it.recorder.host_waits == []

            def read() -> None:
                with pair.snapshots.newest() as snapshot:
                    snapshot.flat.sum().item()

            waits = it.recorder.waits_of(read)
            assert len(waits) == 1 and "synchronize" in waits[0], waits
