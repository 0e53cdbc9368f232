"""Random numbers that belong to a micro-batch, whoever runs it."""

from __future__ import annotations

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


def seed_device(device: torch.device, key: int) -> None:
    """Seeds torch's default generators of the CPU and of `device` (dropout draws from them)."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)
