"""Keeps the workers' models equal: rank 0's values at the start, and a comparison every `check_every` steps."""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from kfuse.comm import devices
from kfuse.comm.group import Group
from kfuse.optim.updates import Updates


def share_from_first(group: Group, tensors: Sequence[Tensor]) -> None:
    """Gives every rank rank 0's values of these tensors, in place.

    Raises ValueError on every rank where they do not have the same number, shapes, types and memory layouts of tensors,
    or do not train the same ones, CommError.
    """
    if group.size == 1 or not tensors:
        return
    kinds = repr([(tuple(t.shape), t.requires_grad) for t in tensors]) + parameter_layout(tensors)
    layout = hashlib.sha256(kinds.encode()).digest()
    tensors = [each_element_once(tensor.detach()) for tensor in tensors]
    mine = torch.tensor([int.from_bytes(layout[:7], "little"), len(tensors)], device=group.device)
    layouts = group.all_gather(mine, "shapes of the parameters")
    for rank, other in enumerate(layouts):
        if not torch.equal(other, layouts[0]):
            counts = f"{int(other[1])} tensors there, {int(layouts[0][1])} on rank 0"
            raise ValueError(
                f"rank {rank} has another model than rank 0: their parameters differ in shape, in type, in memory "
                f"layout (channels_last) or in which are frozen ({counts})"
            )
    values = [t.reshape(-1).to(group.device).contiguous() for t in tensors]
    sent = [value.view(torch.uint8) for value in values if value.numel()]  # gloo knows few types
    for message in [group.broadcast(value, f"rank 0's tensor {k}") for k, value in enumerate(sent)]:
        message.wait()
    for tensor, value in zip(tensors, values, strict=True):
        if tensor.data_ptr() != value.data_ptr():
            tensor.copy_(value.view(tensor.shape))


def parameter_layout(params: Iterable[Tensor]) -> str:
    """Their types, and a digest that differs where the type or the memory order (channels_last) of one does.

    Flat buffers have the elements in the order of the parameters' memory: between workers whose orders differ, an
    element would be added to another one.
    """
    params = list(params)
    types = [str(p.dtype).removeprefix("torch.") for p in params]
    digest = hashlib.sha256(repr([*zip(types, map(_order, params), strict=True)]).encode()).hexdigest()
    return f"{', '.join(sorted(set(types)))} {digest[:8]}"


def _order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the largest stride to the smallest; None for a contiguous tensor."""
    strides: tuple[int, ...] = tensor.stride()
    return None if tensor.is_contiguous() else sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def each_element_once(tensor: Tensor) -> Tensor:
    """Without the dimensions along which `expand` repeats a tensor: one that repeats cannot be written."""
    for dim in reversed(range(tensor.ndim)):
        if tensor.stride(dim) == 0 and tensor.numel():
            tensor = tensor.select(dim, 0)
    return tensor


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers whose changes are averaged over a step's micro-batches: floating-point ones, BatchNorm's counters.

    By name, each once. An expanded buffer is left out, since nothing can write it in place; sparse ones and those of
    8-bit floats are, since torch cannot subtract them.
    A buffer that nothing changes costs its bytes in each step's last message, so large constants are left out by being
    registered as non-persistent buffers (as rotary embeddings' tables usually are).
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        counts = isinstance(module, nn.modules.batchnorm._NormBase)
        for name, buffer in module.named_buffers(path, recurse=False):
            kept = name.rpartition(".")[2] not in module._non_persistent_buffers_set
            subtracts = buffer.layout is torch.strided and buffer.is_floating_point() and buffer.element_size() > 1
            if kept and (subtracts or counts) and each_element_once(buffer).numel() == buffer.numel():
                found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def carried_states(model: nn.Module) -> list[Tensor]:
    """The buffers among these whose changes are added up: of each element one micro-batch of a step changes it."""
    carried = sys.modules.get("kfuse.optim.carried")  # where it is not imported, no model has one
    return [] if carried is None else [m.state for m in model.modules() if isinstance(m, carried.CarriedState)]


# -- the comparison ---------------------------------------------------------------------------------------------------

# Left out by `numeric_options`. The last four choose among implementations of one update.
_NOT_COMPARED = ("params", "lr", "foreach", "fused", "capturable", "differentiable")


def numeric_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By name, all numbers, booleans and None (as NaN) among the groups' options, but for the learning rate.

    betas and the like give a number for each element. A tensor on a GPU is left out, since reading it would wait.
    """
    found: dict[str, float] = {}
    for index, group in enumerate(groups):
        for name in sorted(group.keys() - set(_NOT_COMPARED)):
            value = group[name]
            several = isinstance(value, tuple | list)
            for k, each in enumerate(value if several else (value,)):
                number = _number(each)
                if number is not None:
                    found[f"{name}{f'[{k}]' if several else ''} of group {index}"] = number
    return found


def _number(value: object) -> float | None:
    if value is None:
        return math.nan
    if isinstance(value, Tensor):
        unread = value.numel() != 1 or devices.of(value.device).asynchronous
        return None if unread else float(value)
    return float(value) if isinstance(value, Real) else None


def salt(numbers: Mapping[str, float]) -> int:
    """64 bits computed from all numbers and their names: added to the parameters' digest."""
    values = struct.pack(f"<{len(numbers)}d", *numbers.values())
    return int.from_bytes(hashlib.sha256(" ".join(numbers).encode() + values).digest()[:8], "little")


class ConsistencyError(RuntimeError):
    """The workers' parameters or the optimizer's options are no longer the same; the message names the first that
    differs. Or an audit has found wrong gradients, and training must not go on with them.
    """


def where_workers_differ(updates: Updates, numbers: Mapping[str, float], model: nn.Module | None) -> str:
    """Names the first that differs of an optimizer's numbers, parameters and numbers of updates. Every rank calls it.

    model: has names for the parameters. Raises CommError.
    """
    from kfuse.comm.digest import digest  # few jobs need it

    engine, group, names = updates.engine, updates.engine.group, updates.engine.names
    if model is not None:
        known = {id(p): f"parameter {name}" for name, p in model.named_parameters()}
        names = [known.get(id(p), name) for p, name in zip(engine.params, names, strict=True)]
    digests = {
        f"the number of updates of {names[i]}": digest([counts[k]])
        for indices, counts in updates.counts()
        for k, i in enumerate(indices)
    }
    digests |= {name: digest([p]) for name, p in zip(names, engine.params, strict=True)}
    names = [*numbers, *digests]
    named = torch.tensor([len(names), salt(dict.fromkeys(names, 0.0)) >> 1], device=group.device)
    lists = torch.stack(group.all_gather(named, "names of the options")).cpu()
    others = [rank for rank in range(group.size) if not torch.equal(lists[rank], lists[0])]
    if others:
        return f"the parameter groups, or their options (ranks {', '.join(map(str, others))} have others than rank 0)"
    values = list(torch.tensor([*numbers.values()], dtype=torch.float64).view(torch.int64).to(group.device))
    values += [each.to(group.device) for each in digests.values()]
    found = torch.stack(group.all_gather(torch.stack(values), "digests of the parameters")).cpu()
    different = (found != found[0]).any(dim=0).nonzero().flatten().tolist()
    if not different:
        return "parameters that were changed between the last backward and opt.step()"
    first = different[0]
    ranks = [rank for rank in range(group.size) if found[rank, first] != found[0, first]]
    count = f"{len(different)} of {found.shape[1]} options and parameters differ"
    return f"{names[first]} (ranks {', '.join(map(str, ranks))} against rank 0; {count})"
