"""Training state on its way from the most advanced worker to those that are behind or new."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from kfuse.comm.group import Group

_WHAT = "state of the most advanced worker"


def share(group: Group, source: int, make: Callable[[], Any]) -> bytes:
    """Gives every rank what `make` makes on rank `source`: tensors and plain values, encoded. Raises CommError."""
    payload = torch.empty(0, dtype=torch.uint8)
    if group.rank == source:
        buffer = io.BytesIO()
        torch.save(make(), buffer)
        payload = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(group.device)
    size = torch.tensor([payload.numel()], device=group.device)
    group.broadcast(size, _WHAT, source).wait()
    if group.rank != source:
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=group.device)
    group.broadcast(payload, _WHAT, source).wait()
    return payload.cpu().numpy().tobytes()


def decode(payload: bytes, device: torch.device) -> Any:
    """What `share` made `payload` of, tensors on `device`, wherever the sender had them.

    Only tensors and plain values are accepted: nothing in it can run code.
    """
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
