"""`kf.fsdp_monitor`: gradient statistics of training with FSDP2 (`torch.distributed.fsdp.fully_shard`).

FSDP2 gathers a unit's parameters for a forward, and autograd leaves a micro-batch's gradient with these gathered
parameters. Then FSDP2 adds it to what earlier micro-batches left (without gradient sync), or averages it over the
workers and adds this worker's shard of the mean to the sharded parameter's `.grad`. The monitor squares the first by
`Tensor.register_hook` on the gathered parameters, so it sees each micro-batch by itself in either case, and the second
when a backward is over. It takes part in none of FSDP2's messages, so the parameters are bitwise those of plain FSDP2.

`FSDPModule.set_custom_reduce_scatter` is no place to see it: it is not called for one worker, and sees only the sum of
micro-batches without sync.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from kfuse.integrations.backward import BackwardWatch
from kfuse.integrations.measure import Monitor, Options, one_device, total_square
from kfuse.kernels.private_names import need

# Of each unit of FSDP2: the modules, attributes and indices of the parameters that it gathers.
Places = dict[nn.Module, list[tuple[nn.Module, str, int]]]


def fsdp_monitor(
    model: nn.Module,
    *,
    samples: float | None = None,
    accumulate: float = 1,
    scaler: torch.amp.GradScaler | None = None,
    name: str = "train",
) -> Monitor:
    """Measures the gradient statistics of a model sharded by fully_shard; parameters keep plain FSDP2's bits.

    Call it on every rank where the optimizer is made: after fully_shard, and after the parameters have their values. A
    step ends when an optimizer of torch that has some of the model's parameters steps; each backward before it is a
    micro-batch, whether FSDP2 reduces it or `set_requires_gradient_sync(False)` leaves that to a later one. Statistics
    are unknown where the last backward of a step was not reduced, and in the step after it. One message of 48 bytes is
    added a step (two under HSDP).

    samples, accumulate, scaler, name: as of `kf.monitor`.

    Raises TypeError for another model; ValueError for a value out of range, and for parameters that are on the meta
    device, not sharded, sharded by tensor parallelism too, or on several meshes; RuntimeError for a torch with another
    FSDP2. An optimizer that steps inside backward raises RuntimeError in training.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"kf.fsdp_monitor: the model is a {type(model).__name__}: must be sharded by fully_shard(model) as a "
            "whole, after its parts (kf.monitor measures one process, kf.ddp_hook DDP)"
        )
    return _Sharded(model, Options(samples, accumulate, scaler, name)).monitor


class _Sharded(BackwardWatch):
    """The hooks of one model, which keeps them. Backwards are seen at the gathered parameters."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.reshard()  # an evaluation leaves the root's parameters gathered
        named, self._places = _trained(model)
        self._mesh = _mesh(named)
        self._workers, self._shards = self._mesh.size(), self._mesh.size(self._mesh.ndim - 1)
        self._groups = [group for unit in units for group in _param_groups(unit)]
        self._divisor()
        rank = self._mesh.mesh.flatten().tolist().index(dist.get_rank())
        self._gathered: dict[int, Tensor] = {}  # by index, those with a hook: FSDP2 makes each once, in a forward
        self._pending = set[int]()  # indices of parameters with a gradient that is not yet in their shards' `.grad`
        self._left: Tensor | None = None  # the square of the shards' gradients, as the latest backward left them
        monitor = Monitor(self._groups[0].device, options, workers=self._workers, rank=rank)
        super().__init__(model, [param for _, param in named], monitor)
        for policy, param in ((group.mp_policy, group.fsdp_params[0].sharded_param) for group in self._groups):
            if (policy.reduce_dtype or policy.param_dtype or param.dtype) in (torch.bfloat16, torch.float16):
                monitor.low_precision()
        for place in self._places:
            monitor.handles.append(place.register_forward_pre_hook(self._before_unit))  # FSDP2 has gathered by then
        self.end_steps_with_updates()

    def before_forward(self, module: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled() and self._began:
            self.unknown = True  # the backward raised, and FSDP2 may keep a part of its gradient
        super().before_forward(module, arguments)

    def _before_unit(self, unit: nn.Module, arguments: object) -> None:
        for owner, attribute, index in self._places[unit]:
            param = getattr(owner, attribute)
            if param is not self._gathered.get(index) and param.requires_grad and not isinstance(param, DTensor):
                self._gathered[index] = param
                self.watch(index, param)

    def on_gradient(self, index: int, grad: Tensor) -> None:
        super().on_gradient(index, grad)
        self._pending.add(index)

    def begins(self) -> bool:
        """torch._foreach functions, as clipping uses, leave the versions of DTensors: so squares are compared too."""
        if self.monitor.micro_batches and self.kept and self._left is not None:
            self._conditions.append(total_square(self.gradients()) == self._left)
        return True

    def waits(self) -> bool:
        return bool(self._pending)

    def ended(self) -> None:
        self._pending -= {index for index, before in enumerate(self.before) if before != self.after[index]}
        if any(mark is not None and index not in self._gathered for index, mark in enumerate(self.after)):
            self.unknown = True  # a parameter's unit of FSDP2 was not entered by its forward
        self.monitor.micro_batch(self.square())
        gradients = self.gradients()
        self._left = total_square(gradients) if gradients else None

    def end_step(self) -> None:
        # Without a part of the gradient its square is unknown.
        total = torch.tensor(math.nan) if self._pending or self._left is None else self._left
        # FSDP2 divides the sum over the workers by its divisor; under HSDP several workers have the same shards.
        factor = (self._divisor() / self._workers) ** 2 * self._shards / self._workers
        message = self.monitor.message(total * factor)
        sent: dist.Work | None = None
        for dim in range(self._mesh.ndim):
            if sent is not None:
                sent.wait()
            sent = dist.all_reduce(message, group=self._mesh.get_group(dim), async_op=True)
        self.monitor.step(message, sent)

    def begin_step(self) -> None:
        super().begin_step()
        if self._pending:
            self.unknown = True  # FSDP2 had not reduced a gradient as the step before ended, and adds it to this one

    def gradients(self) -> list[Tensor]:
        """Returns this rank's shards of the gradients."""
        with torch.no_grad():
            return [_local(param.grad) for param in self.params if param.grad is not None]

    def marks(self) -> list[tuple[int, int] | None]:
        """FSDP2 adds to the local tensor; what users do to a DTensor in place counts as a version of that one alone."""
        grads = [param.grad for param in self.params]
        with torch.no_grad():
            return [None if grad is None else (id(grad), grad._version + _local(grad)._version) for grad in grads]

    def _divisor(self) -> float:
        """Returns what FSDP2 divides the sum of the workers' gradients by.

        Raises ValueError where that is not one number, or where a hook may average over more workers than the mesh has.
        """
        if any(group._all_reduce_hook is not None for group in self._groups):
            raise ValueError("kf.fsdp_monitor: set_all_reduce_hook: must be left out, as it may change the gradient")
        factors = {group.gradient_divide_factor for group in self._groups}
        if len(factors) > 1:
            raise ValueError(
                f"kf.fsdp_monitor: set_gradient_divide_factor was called with {factors}: must be one for all units"
            )
        factor = factors.pop()
        if factor is not None and self._shards == 1:
            raise ValueError(
                "kf.fsdp_monitor: set_gradient_divide_factor was called where one worker has all shards, and torch may "
                "divide twice: must be left out"
            )
        return float(self._workers) if factor is None else float(factor)


def _trained(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], Places]:
    """Returns names and parameters to be trained, and where FSDP2 gathers them."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    index_of = {id(param): index for index, (_, param) in enumerate(named)}
    places: Places = {}

    def walk(module: nn.Module, unit: nn.Module) -> None:
        unit = module if isinstance(module, FSDPModule) else unit
        for attribute, param in module.named_parameters(recurse=False):
            if id(param) in index_of:
                places.setdefault(unit, []).append((module, attribute, index_of[id(param)]))
        for child in module.children():
            walk(child, unit)

    walk(model, model)
    return named, places


def _mesh(named: Sequence[tuple[str, nn.Parameter]]) -> DeviceMesh:
    """Returns the workers whose gradients FSDP2 averages. Raises ValueError for what it does not average alone."""
    one_device("kf.fsdp_monitor", [param for _, param in named])
    meshes = []
    for name, param in named:
        if not isinstance(param, DTensor):
            raise ValueError(f"kf.fsdp_monitor: {name} is not sharded (ignored_params?): must be sharded or frozen")
        if param.is_meta:
            raise ValueError(f"kf.fsdp_monitor: {name} is on the meta device: give it its values first")
        *copies, shards = param.placements
        if not isinstance(shards, Shard) or len(copies) > 1 or not all(isinstance(copy, Replicate) for copy in copies):
            raise ValueError(
                f"kf.fsdp_monitor: {name} is placed as {param.placements}: must be sharded by fully_shard alone, "
                "on one dimension of a mesh, or on the second of two (HSDP)"
            )
        meshes.append(param.device_mesh)
        if param.device_mesh != meshes[0]:
            raise ValueError(f"kf.fsdp_monitor: {name} and {named[0][0]} are on two meshes: must be on one")
    return meshes[0]


def _param_groups(unit: FSDPModule) -> list[Any]:
    """Returns FSDP2's settings of a unit's parameters. They have public setters, and no getters."""
    need("torch.distributed.fsdp.FSDPModule._get_fsdp_state", of=unit)
    state: Any = unit._get_fsdp_state()
    need("torch.distributed.fsdp.FSDPState._fsdp_param_groups", of=state)
    groups: list[Any] = state._fsdp_param_groups
    for group in groups:
        need("torch.distributed.fsdp.FSDPParamGroup._all_reduce_hook", of=group)
        need("torch.distributed.fsdp.FSDPParamGroup.gradient_divide_factor", of=group)
    return groups


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard. Under no_grad, it is the tensor itself and no view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
