"""The training state, declared once: the parts that it consists of; and how it is sent from one worker to others.

The first broadcast, joins, recovery and checkpoints all use the same declaration (`TrainingState`). What is not in it
need not be saved: data are a pure function of (seed, epoch, cursor), and random numbers are seeded from (seed, step,
micro-batch) before each micro-batch's forward.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm.chunks import cut, dense, gather, memory, scatter
from kfuse.comm.group import Group
from kfuse.optim import DistributedOptimizer

_TRANSFER = "state of the most advanced worker"
STAYS = ("model", "trainable", "optimizer")
"""Parts that are the user's, and stay when training ends."""
LARGE = (*STAYS, "synchronisation")
"""Parts that are large, or tell how the models are kept together."""
_PLAIN = frozenset((type(None), bool, int, float, str))


class Stateful(Protocol):
    """A part of the state: tensors and plain values (None, bool, int, float, str, lists, tuples, dicts)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Trainable:
    """Which of an optimizer's parameters are trained: a script may freeze and unfreeze some while it trains."""

    def __init__(self, opt: DistributedOptimizer) -> None:
        self._opt = opt

    def _params(self) -> list[Parameter]:
        return [p for group in self._opt.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"requires_grad": [p.requires_grad for p in self._params()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the other optimizer has more or fewer parameters."""
        params, wanted = self._params(), state["requires_grad"]
        if len(params) != len(wanted):
            raise ValueError(f"another program's state: its optimizer has {len(wanted)} parameters, not {len(params)}")
        if wanted != [p.requires_grad for p in params]:
            for p, trained in zip(params, wanted, strict=True):
                p.requires_grad_(trained)
            self._opt.rebuild()


class TrainingState:
    """The named parts whose states, together, are the training state."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = dict(parts)

    def capture(
        self,
        only: Collection[str] | None = None,
        without: Collection[str] = (),
        of_optimizer: Callable[[DistributedOptimizer], dict[str, Any]] = lambda opt: opt.state_dict(),
    ) -> dict[str, Any]:
        """Returns the state of each part, by name, or of `only` these. Tensors are the parts' own, not copies.

        Shards of the optimizer's state are gathered: every worker calls it, and gets all. Raises CommError.
        """
        return {
            name: of_optimizer(part) if isinstance(part, DistributedOptimizer) else part.state_dict()
            for name, part in self._parts.items()
            if name not in without and (only is None or name in only)
        }

    def capture_on_leader(self) -> dict[str, Any]:
        """As `capture`, but rank 0 alone gets the shards of the optimizer's state."""
        return self.capture(of_optimizer=lambda opt: opt.with_statistics(opt.updates.gathered_state(0)))

    def capture_common(self) -> dict[str, Any]:
        """As `capture`, without the shards of the optimizer's state: no collective."""
        return self.capture(of_optimizer=_common_state)

    def restore_some(self, state: Mapping[str, Any]) -> None:
        """Loads the parts that `capture` returned with a selection."""
        for name in state:
            self._parts[name].load_state_dict(state[name])

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the state is of other parts: a learning-rate scheduler that only one of them has."""
        if state.keys() != self._parts.keys():
            unknown = sorted(state.keys() - self._parts.keys())
            missing = sorted(self._parts.keys() - state.keys())
            raise ValueError(f"another program's state: parts unknown here are {unknown}, missing are {missing}")

    def room_for(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's and the optimizer's own tensors, to be overwritten by another worker's `state`.

        Optimizer state that this worker does not have yet is made. Other parts are small, and get new tensors.
        """
        for name, part in self._parts.items():
            if isinstance(part, DistributedOptimizer) and name in state:
                part.updates.make_room(state[name])
        kinds = DistributedOptimizer | nn.Module
        own = [name for name, part in self._parts.items() if isinstance(part, kinds)]
        return self.capture(only=own, of_optimizer=_common_state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Loads what `capture` returned, here or in another process, part by part, in the order of declaration.

        Sharded optimizer state stays whole on this worker; the others get their shards by its `regroup`.
        Raises ValueError as `check` does, and for a part that does not take its state.
        """
        self._restore(state, lambda opt, of_opt: opt.updates.load_state_dict(of_opt, whole=True))

    def restore_common(self, state: Mapping[str, Any], keeps_shards: bool) -> None:
        """Loads what `capture_common` returned, as `restore` does.

        keeps_shards: those of sharded optimizer state that this worker has are of the same step.
        """
        self._restore(state, lambda opt, of_opt: opt.updates.load_common_state(of_opt, keeps_shards))

    def _restore(self, state: Mapping[str, Any], load: Callable[[DistributedOptimizer, dict[str, Any]], None]) -> None:
        self.check(state)
        for name, part in self._parts.items():
            try:
                if isinstance(part, DistributedOptimizer):
                    load(part, state[name])
                    part.load_statistics(state[name])
                else:
                    part.load_state_dict(state[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(f"another program's state: its {name} does not fit: {why}") from error


def _common_state(opt: DistributedOptimizer) -> dict[str, Any]:
    """What all workers have alike. No collective."""
    return opt.with_statistics(opt.updates.common_state())


def with_settings(state: Mapping[str, Any], batch_size: int, lr_scale: float, seed: int) -> dict[str, Any]:
    """Returns a state, of a training without a scheduler, with other settings for the next step on; both share tensors.

    Left out are the policy's state, and what the training had decided or was about to report.
    """
    silent: dict[str, Any] = {"in_flight": [], "unread": []}
    at, optimizer = state["progress"], state["optimizer"]
    settings = {"batch_size": batch_size, "lr_scale": lr_scale, "began_with": at["began_with"] | {"seed": seed}}
    return {
        **state,
        "progress": {**at, **settings, "contexts": {}, "best": None},
        "optimizer": {**optimizer, "kfuse": {**optimizer["kfuse"], **silent}},
        "statistics": {**state["statistics"], **silent},
        "decisions": {**state["decisions"], "workers_requested": 0, "requested": {}, "under_way": {}},
        "policy": {},
        "records": {"recent": [], "told_before": {}},
    }


# -- from one worker to others ----------------------------------------------------------------------------------------


def share(group: Group, source: int, make: Callable[[], Any], room: Callable[[Any], Any] | None) -> Any:
    """Sends what `make` returns on rank `source` to the ranks that want it. Every rank calls it.

    1) The structure travels pickled: plain values, and each tensor's shape, strides and dtype.
    2) The tensors follow in chunks (`comm.chunks`), each a broadcast: from the source's own memory to the receiver's
       own, large ones without a copy. No rank needs more than one chunk of memory besides.

    room: None on a rank that does not receive, whose own tensors are not touched. On one that does: room(structure)
    returns the tensors to be overwritten, in a structure like the one given; where one is missing there or does not
    fit, a new one is made. It is called before the first byte arrives; from then on these tensors hold parts of both
    states, until all has arrived. Where it returns None all tensors are new, and in the host's memory.

    Returns on a receiver what `make` returned there, with this rank's tensors: in room's, those of the host on the
    host, all others on the group's device. None on the others. Raises CommError.
    """
    payload, tensors, received = b"", list[Tensor](), None
    if group.rank == source:
        structure, descriptions, tensors = _take_apart(make())
        host = [tensor.device.type == "cpu" != group.device.type for tensor in tensors]
        buffer = io.BytesIO()
        torch.save([structure, descriptions, host], buffer)
        payload = buffer.getvalue()
    payload = _share_bytes(group, source, payload)
    if group.rank != source:
        structure, descriptions, host = decode(payload, group.device)
        if room is not None:
            own = room(structure)
            where = [torch.device("cpu") if own is None or on_host else group.device for on_host in host]
            received, tensors = _put_in_place(structure, own, descriptions, where)
    _share_tensors(group, source, [description.nbytes for description in descriptions], tensors)
    return received


def _share_bytes(group: Group, source: int, payload: bytes) -> bytes:
    length = torch.tensor([len(payload)], device=group.device)
    group.broadcast(length, _TRANSFER, source).wait()
    message = torch.empty(int(length), dtype=torch.uint8, device=group.device)
    if group.rank == source:
        message.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    group.broadcast(message, _TRANSFER, source).wait()
    return message.cpu().numpy().tobytes()


def _take_apart(value: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """`value` with a description (a tensor on the meta device) in each tensor's place; descriptions; the tensors.

    Two tensors that are the same memory, as of tied weights, are one in the lists.
    """
    tensors: list[Tensor] = []
    descriptions: list[Tensor] = []
    described: dict[object, Tensor] = {}

    def describe(tensor: Tensor, _: Any) -> Tensor:
        tensor = tensor.detach()
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in described:
            return described[key]
        tensor = dense(tensor)
        description = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        tensors.append(tensor)
        descriptions.append(description)
        described[key] = description
        return description

    return _replace_tensors(value, describe), descriptions, tensors


def _put_in_place(
    structure: Any, own: Any, descriptions: list[Tensor], devices: list[torch.device]
) -> tuple[Any, list[Tensor]]:
    """The structure with this rank's tensors, `own` where they fit and else new ones on `devices`; the list of them."""
    numbers = {id(description): number for number, description in enumerate(descriptions)}
    tensors: dict[int, Tensor] = {}

    def place(description: Tensor, mine: Any) -> Tensor:
        number = numbers[id(description)]
        if number not in tensors:
            where = devices[number]
            if isinstance(mine, Tensor) and mine.device == where and _alike(mine, description):
                tensors[number] = mine.detach()
            else:
                shape, strides = description.shape, description.stride()
                tensors[number] = torch.empty_strided(shape, strides, dtype=description.dtype, device=where)
        return tensors[number]

    placed = _replace_tensors(structure, place, own)
    return placed, [tensors[number] for number in range(len(numbers))]


def _alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether its memory can take the described tensor's bytes."""
    same = tensor.shape == other.shape and tensor.stride() == other.stride() and tensor.dtype == other.dtype
    return same and memory(tensor) is not None


def _share_tensors(group: Group, source: int, sizes: list[int], tensors: list[Tensor]) -> None:
    """Broadcasts the source's tensors, chunk by chunk. sizes: their bytes. tensors: empty on a rank that takes none."""
    memories = [view for tensor in tensors if (view := memory(tensor)) is not None]
    chunks = cut(sizes)
    staging: Tensor | None = None
    for chunk in chunks:
        first = chunk.parts[0]
        message = memories[first.tensor][first.start : first.end] if memories else None
        staged = message is None or len(chunk.parts) > 1 or message.device != group.device
        if staged:
            if staging is None:
                most = max(each.size for each in chunks)
                staging = torch.empty(most, dtype=torch.uint8, device=group.device)
            message = staging[: chunk.size]
            if group.rank == source:
                gather(memories, chunk, message)
        assert message is not None
        group.broadcast(message, _TRANSFER, source).wait()
        if staged and memories and group.rank != source:
            scatter(message, chunk, memories)


def _replace_tensors(value: Any, act: Callable[[Tensor, Any], Any], beside: Any = None) -> Any:
    """A copy of `value`, of nested lists, tuples and dictionaries, with act(tensor, other) in each tensor's place.

    other: what `beside`, a structure like `value`, has in that place; None where it has nothing. Tensors that have no
    dense memory by their kind (sparse, quantized, of a subclass) and all other values stay.
    """
    if isinstance(value, Tensor):
        plain = type(value.detach()) is Tensor and value.layout is torch.strided and not value.is_quantized
        return act(value, beside) if plain else value
    if type(value) in (list, tuple):
        if _PLAIN.issuperset(map(type, value)):  # a list of numbers may be long
            return value
        others = beside if type(beside) is type(value) and len(beside) == len(value) else [None] * len(value)
        return type(value)(_replace_tensors(item, act, other) for item, other in zip(value, others, strict=True))
    if type(value) in (dict, OrderedDict):
        others = beside if isinstance(beside, dict) else {}
        copy = type(value)((key, _replace_tensors(item, act, others.get(key))) for key, item in value.items())
        if isinstance(copy, OrderedDict):  # a module's state dict has its version numbers in an attribute
            vars(copy).update(vars(value))
        return copy
    return value


def decode(payload: bytes, device: torch.device) -> Any:
    """Decodes a pickled structure. Tensors in it, of kinds that do not travel in chunks (sparse ones), that were on a
    GPU are put on `device`; those of the host stay there. Raises pickle.UnpicklingError for what could run code.
    """
    move: Any = torch.serialization.default_restore_location

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else move(storage, str(device))

    return torch.load(io.BytesIO(payload), map_location=place, weights_only=True)
