"""Random numbers that belong to a micro-batch, whichever worker runs it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def micro_batch_key(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit key for the random numbers of one micro-batch (splitmix64 over the three)."""
    key = seed
    for value in (step, micro_batch):
        key = (key + 0x9E3779B97F4A7C15 * (value + 1)) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key >> 1


def seed_host(key: int) -> None:
    """Seeds the global generators of torch (CPU), numpy and random: a data set's transforms draw from them."""
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def seed_device(device: torch.device, key: int) -> None:
    """Seeds torch's default generators of the CPU and of `device` (dropout draws from them)."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


@contextlib.contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Afterwards the global generators of torch, numpy and random are where they were: they are the user's."""
    cpu, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
