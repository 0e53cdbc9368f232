"""A model that FSDP2 (`fully_shard`) has sharded over the processes of a worker, and its optimizer's state.

The engine has plain parameters over the local shards, in the same memory. FSDP2 sets a shard's gradient after its
reduce-scatter, and calls the hooks of the sharded parameter, a DTensor (pytorch#129450): the gradient goes on to the
plain one from there. The optimizer keeps the DTensors: so Muon orthogonalises whole matrices. What other workers of the
same rank get is local; checkpoints have whole tensors, as of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from kfuse.comm import measurement as t
from kfuse.comm.engine import Engine
from kfuse.comm.step import Step
from kfuse.elastic.replica import Replica
from kfuse.kernels.private_names import need
from kfuse.optim.consistency import ConsistencyError
from kfuse.optim.updates import COMMON, SEVERAL

_PLAIN = "kfuse_shard"  # an attribute of a sharded parameter


class Shards:
    """The sharded parameters of one optimizer, and the plain ones over this process's shards."""

    def __init__(self, opt: torch.optim.Optimizer, replica: Replica) -> None:
        """Raises TypeError for an optimizer whose state cannot be cut."""
        need("torch.distributed.tensor.DTensor._local_tensor")
        self._opt, self.replica = opt, replica
        for inner in getattr(opt, "inners", ()) or (opt,):
            if type(inner) not in COMMON:
                names = ", ".join(kind.__name__ for kind in COMMON)
                raise TypeError(
                    f"{type(inner).__name__} in a worker of {replica.size} ranks: must be kf.Optimizer around one of "
                    f"torch's {names}"
                )
        self._pairs: list[tuple[Parameter, Parameter]] = []  # of a sharded and its plain parameter
        self._shown: list[DTensor | None] = []  # the gradients that the sharded ones were given last

    def lay_out(self, named: Sequence[tuple[Parameter, str]]) -> None:
        """Finds the plain parameters. Raises TypeError for parameters that are not sharded over this worker's ranks."""
        for p, name in named:
            why = self._refusal(p)
            if why:
                raise TypeError(
                    f"{name} of shape {list(p.shape)} {why}: with kfuse-run --ranks {self.replica.size} fully_shard "
                    f"must shard all parameters, the root's too, over init_device_mesh(..., ({self.replica.size},))"
                )
        self._pairs = [(p, self.plain(p)) for p, _ in named if p.requires_grad]
        self._shown = [None] * len(self._pairs)

    def _refusal(self, p: Parameter) -> str:
        if not isinstance(p, DTensor):
            return "is not sharded"
        if p.device_mesh.ndim != 1 or p.device_mesh.size() != self.replica.size:
            return f"is on a mesh of {list(p.device_mesh.shape)}"
        return "" if isinstance(p.placements[0], Shard) else f"is placed as {p.placements[0]}"

    def plain(self, p: Parameter) -> Parameter:
        """The parameter over this process's shard of `p`, which gets its gradients."""
        kept: Parameter | None = getattr(p, _PLAIN, None)
        if kept is None or kept.data_ptr() != local(p).data_ptr() or kept.requires_grad != p.requires_grad:
            kept = Parameter(local(p), p.requires_grad)
            hooked = hasattr(p, _PLAIN)
            setattr(p, _PLAIN, kept)
            if not hooked:
                p.register_post_accumulate_grad_hook(_deliver)  # type: ignore[no-untyped-call]
        return kept

    def show(self) -> None:
        """Each plain parameter's gradient becomes that of its sharded one, in the same memory."""
        for k, (p, plain) in enumerate(self._pairs):
            shown = self._shown[k]
            if plain.grad is not None and (shown is None or shown._local_tensor is not plain.grad):
                shown = self._shown[k] = like(p, plain.grad)
            p.grad = None if plain.grad is None else shown

    def take_back(self) -> None:
        """What the user has done to the sharded parameters' gradients since is done to the plain ones'."""
        for (p, plain), shown in zip(self._pairs, self._shown, strict=True):
            if p.grad is not shown or plain.grad is None:
                plain.grad = None if p.grad is None else local(p.grad)

    def drop(self) -> None:
        for _, plain in self._pairs:
            plain.grad = None

    def commit(self, engine: Engine, now: Step) -> Tensor:
        """As the engine's `_reduced`, of all ranks: they take the step together, and its record is of whole gradients.

        Also averages what buffers have changed. Raises CommError, and ConsistencyError where the ranks' optimizers have
        other options, in a step in which these are compared.
        """
        length = t.RECORD_SLOTS + engine.measurement.tail - t.TAIL_SLOTS - len(engine.params)
        every = engine.options.check_every
        is_compared = every is not None and engine.step % every == 0
        numbers = float(engine.compared()[1] >> 24) if is_compared else 0.0  # fewer bits: their sum is exact

        def with_more() -> Tensor:
            record = engine._reduced(now)
            return torch.cat([record, record.new_tensor([numbers, any(change.any() for change in now.changes)])])

        averaged = [t.LOSS, *range(length - engine.figures, length + 1)]
        record = self.replica.commit(with_more, length + 2, (t.SUM_SQUARES, t.ADDED, t.GRAD_SQ, length + 1), averaged)
        if record[-2] != numbers:
            raise ConsistencyError(
                f"step {engine.step}: the ranks of a worker have other options of the optimizer, as a learning rate"
            )
        if record[-1] > 0:
            mine = torch.cat([change.reshape(-1) for change in now.changes])
            mean = self.replica.gather(mine, "changes of buffers").mean(0)
            for change, part in zip(now.changes, torch.split(mean, [*map(Tensor.numel, now.changes)]), strict=True):
                change.copy_(part.view(change.shape))
        return record[:-2]

    # -- the optimizer's state ------------------------------------------------------------------------------------

    def whole(self, state: dict[str, Any], only: int | None) -> dict[str, Any]:
        """A torch optimizer's state_dict with whole tensors. Every rank calls it. only: the rank that gets them."""
        self.replica.meet("gathering the optimizer's state")
        return _mapped(state, lambda index, value: whole(value, only in (None, self.replica.rank)))

    def common(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same with this rank's shards, as plain tensors."""
        return _mapped(state, lambda index, value: local(value))

    def sharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with whole tensors, or with this rank's shards, as the optimizer is to load it."""
        params = [p for group in self._opt.param_groups for p in group["params"]]

        def placed(index: int, value: Tensor) -> Tensor:
            p = params[index]
            return value if not value.ndim or isinstance(value, DTensor) else like(p, cut(p, value))

        return _mapped(state, placed)


def _deliver(p: Tensor) -> None:
    """A hook: a micro-batch's gradient of the sharded parameter has come."""
    plain: Parameter = getattr(p, _PLAIN)
    if p.grad is not None:
        plain.grad, p.grad = local(p.grad), None
        for hook in [*(plain._post_accumulate_grad_hooks or {}).values()]:
            hook(plain)


def _mapped(state: dict[str, Any], change: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    """Several optimizers' state, or one's, with its tensors changed. change(index of the parameter, tensor)."""
    if SEVERAL in state:
        first, states = 0, []
        for each in state[SEVERAL]:
            states.append(_mapped(each, lambda index, value, first=first: change(first + index, value)))  # type: ignore[misc]
            first += sum(len(group["params"]) for group in each["param_groups"])
        return {**state, SEVERAL: states}
    changed = {
        index: {name: change(index, value) if isinstance(value, Tensor) else value for name, value in of.items()}
        for index, of in state["state"].items()
    }
    return {**state, "state": changed}


# -- a tensor ---------------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This process's shard, in the same memory; a tensor that is not sharded itself."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, keeps: bool = True) -> Tensor:
    """All of a tensor. Every rank of the worker calls it for a sharded one. keeps: whether this one gets it."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard: Any = tensor.detach()
    full: Tensor = shard.full_tensor()
    return full if keeps else full.new_empty(0)


def like(p: Tensor, shard: Tensor) -> DTensor:
    """The tensor of the shape and the placement of `p` whose shard here is `shard`."""
    assert isinstance(p, DTensor)
    return DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def cut(p: DTensor, value: Tensor) -> Tensor:
    """The shard here of a whole tensor of the shape of `p`; a shard itself. Raises ValueError for any other shape."""
    mine = local(p).shape
    if value.shape == mine:
        return value
    if value.shape != p.shape:
        raise ValueError(f"a tensor of shape {list(value.shape)} for a parameter of shape {list(p.shape)}")
    placement = p.placements[0]
    assert isinstance(placement, Shard)
    parts, rank = value.chunk(p.device_mesh.size(), placement.dim), p.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else value.narrow(placement.dim, 0, 0)


class ShardedModel:
    """A part of the training state: a model with sharded parameters."""

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        self.model, self._replica = model, replica

    def state_dict(self) -> dict[str, Any]:
        """With whole tensors. Every rank of the worker calls it."""
        self._replica.meet("gathering the model")
        return whole_state(self.model.state_dict())

    def leaders_state(self) -> dict[str, Any]:
        """As `state_dict`, but rank 0 alone gets the whole tensors."""
        self._replica.meet("gathering the model for a checkpoint")
        return whole_state(self.model.state_dict(), self._replica.rank == 0)

    def common_state(self) -> dict[str, Any]:
        """With this rank's shards."""
        return _each(self.model.state_dict(), local)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes whole tensors, or this rank's shards. Raises ValueError or RuntimeError where they do not fit."""
        own, placed = self.model.state_dict(), copy(state)  # which has the modules' version numbers too
        for name, value in state.items():
            if isinstance(p := own.get(name), DTensor):
                placed[name] = like(p, cut(p, value))  # type: ignore[index]
        self.model.load_state_dict(placed)


def whole_state(state: dict[str, Any], keeps: bool = True) -> dict[str, Any]:
    """A model's state_dict with whole tensors. Every rank calls it for a sharded model. keeps: as of `whole`."""
    return _each(state, partial(whole, keeps=keeps))


def _each(state: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Changes each tensor once: a tied one is one tensor in the result too."""
    out, made = copy(state), dict[int, Tensor]()
    for name, value in state.items():
        if isinstance(value, Tensor):
            if id(value) not in made:
                made[id(value)] = change(value)
            out[name] = made[id(value)]
    return out
