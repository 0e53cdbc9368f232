"""`kf.fsdp_monitor`: gradient statistics of training with FSDP2 (`torch.distributed.fsdp.fully_shard`).

FSDP2 gathers a unit's parameters for a forward, and autograd leaves a micro-batch's gradient with these gathered
parameters. Then FSDP2 adds it to what earlier micro-batches left (without gradient sync), or averages it over the
workers and adds this worker's shard of the mean to the sharded parameter's `.grad`. The monitor squares the first by
`Tensor.register_hook` on the gathered parameters, so it sees each micro-batch by itself in either case, and the second
when a backward is over. It takes part in none of FSDP2's messages, so the parameters are bitwise those of plain FSDP2.

`FSDPModule.set_custom_reduce_scatter` is the other place where a micro-batch's gradient could be seen. It is not called
for one worker, sees only the sum of micro-batches without sync, does not work beside symmetric memory or with
several groups of parameters in a unit, and there is one only, which users may need themselves.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from kfuse.comm.gradients import at_the_end_of_backward
from kfuse.integrations.backward import before_updates
from kfuse.integrations.measure import Monitor, Options, block_norms, one_device, sum_squares, total_square

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_MONITORED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def fsdp_monitor(
    model: nn.Module,
    *,
    samples: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    name: str = "train",
) -> Monitor:
    """Measures the gradient statistics of a model sharded by fully_shard; parameters keep plain FSDP2's bits.

    Call it on every rank where the optimizer is made: after fully_shard, and after the parameters have their values. A
    step ends when an optimizer of torch that has some of the model's parameters steps; each backward before it is a
    micro-batch, whether FSDP2 reduces it or `set_requires_gradient_sync(False)` leaves that to a later one. Statistics
    are unknown where the last backward of a step was not reduced, and in the step after it. One message of 32 bytes is
    added a step (two under HSDP).

    samples: of each micro-batch; without it a micro-batch takes the sample's place. See `Monitor.samples`.
    accumulate: what each micro-batch's mean loss is divided by. With the usual `(loss / ACC).backward()` it is ACC.
    scaler: the loop's GradScaler, if there is one.
    name: names these figures where `kf.log_to` sends them.

    Raises TypeError for another model; ValueError for a value out of range, and for parameters that are on the meta
    device, not sharded, sharded by tensor parallelism too, or on several meshes; RuntimeError for a model that has a
    monitor. An optimizer that steps inside backward raises it in training.
    """
    _refuse_other_models(model)
    if model in _MONITORED:
        raise RuntimeError("kf.fsdp_monitor: the model has a monitor already: close() that one first")
    return _Sharded(model, Options(samples, accumulate, scaler, name)).monitor


def _refuse_other_models(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise TypeError("kf.fsdp_monitor: the model is wrapped in DistributedDataParallel: use kf.ddp_hook(model)")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError("kf.fsdp_monitor: the model is wrapped in FullyShardedDataParallel (FSDP1): use fully_shard")
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"kf.fsdp_monitor: the model is a {type(model).__name__}: must be sharded by fully_shard(model) as a "
            "whole, after its parts (kf.monitor measures one process, kf.ddp_hook DDP)"
        )


class _Sharded:
    """The hooks of one model, which keeps them. A step passes the methods in their order here."""

    monitor: Monitor
    _params: list[nn.Parameter]
    """The sharded parameters (DTensors) that require gradients."""
    _places: dict[nn.Module, list[tuple[nn.Module, str, int]]]
    """Of each unit of FSDP2: the modules, attributes and indices in `_params` of the parameters that it gathers."""
    _gathered: dict[int, Tensor]
    """By index, the gathered parameter that has a hook. FSDP2 makes it in the first forward, and keeps it."""
    _began: bool
    """A backward is under way."""
    _norms: list[Tensor]
    """Of its gradient, in blocks."""
    _before: list[int]
    """The versions of the shards' gradients as it began, and `_after` those as the latest one ended."""
    _forwards: int
    """Forwards of this step, so far; and `_backwards` likewise."""
    _pending: set[int]
    """Indices of parameters with a gradient that is not yet in their shards' `.grad`."""
    _carried: bool
    """Some were pending when the step before ended: FSDP2 adds them to this step's."""
    _unknown: bool
    """Something happened in this step that leaves its statistics unknown."""
    _total: Tensor | None
    """The square of this rank's shards of the gradient after the latest backward; None while it lacks a part."""
    _leftover: Tensor | None
    """The square of what `.grad` had before the step's first backward."""
    _left: Tensor | None
    """The square of the shards' gradients that the latest backward left."""
    _kept: Tensor | None
    """Whether these were unchanged when the backward under way began; None for its step's first, and without them."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.reshard()  # an evaluation leaves the root's parameters gathered
        named, self._places = _trained(model)
        self._params = [param for _, param in named]
        self._mesh = _mesh(named)
        self._workers, self._shards = self._mesh.size(), self._mesh.size(self._mesh.ndim - 1)
        self._groups = [group for unit in units for group in _param_groups(unit)]
        self._divisor()
        rank = self._mesh.mesh.flatten().tolist().index(dist.get_rank())
        self.monitor = Monitor(self._groups[0].device, options, workers=self._workers, rank=rank)
        if any(_reduced_in_16_bits(group) for group in self._groups):
            self.monitor.low_precision()
        self._gathered, self._pending, self._norms = {}, set(), []
        self._left = self._kept = None
        self._before = self._after = self._versions()
        self._began = self._carried = False
        self._begin_step()
        self._attach(model)

    def _attach(self, model: nn.Module) -> None:
        for unit in self._places:
            self.monitor.attach(unit.register_forward_pre_hook(self._before_unit))  # FSDP2 has gathered by then
        self.monitor.attach(model.register_forward_pre_hook(self._before_forward))
        self.monitor.attach(before_updates(self._params, self._before_update))
        self.monitor.attach(_Claim(model))

    def _begin_step(self) -> None:
        self._unknown = False
        self._total = self._leftover = None
        self._forwards = self._backwards = 0

    def _before_forward(self, module: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            self._forwards += 1
            if self._began:  # the last backward raised, and its gradients may still be there
                self._began, self._unknown = False, True

    def _before_unit(self, unit: nn.Module, arguments: object) -> None:
        for owner, attribute, index in self._places[unit]:
            param = getattr(owner, attribute)
            if param is not self._gathered.get(index) and param.requires_grad and not isinstance(param, DTensor):
                self._gathered[index] = param
                self.monitor.attach(param.register_hook(self._on_gradient(index)))

    def _on_gradient(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(grad: Tensor) -> None:
            if not self._began:
                self._begin_backward()
            self._pending.add(index)
            self._norms += block_norms(grad)

        return on_gradient

    def _begin_backward(self) -> None:
        self._began, self._norms = True, []
        at_the_end_of_backward(self._end_backward)  # behind FSDP2's, which was queued with the model's output
        self._before = self._versions()
        gradients = self._gradients()
        self._kept = None
        if not self.monitor.micro_batches:
            self._leftover = total_square(gradients).to(self.monitor.device) if gradients else None
        elif not gradients and not self._pending:  # dropped, by zero_grad without a step
            self.monitor.drop()
            self._begin_step()
            self._forwards = 1
        elif self._before != self._after:
            self._unknown = True  # changed since the last backward: set to zero, or clipped
        elif gradients and self._left is not None:  # torch._foreach functions, as clipping uses, leave the versions
            self._kept = total_square(gradients) == self._left

    def _end_backward(self) -> None:
        self._began = False
        self._after = self._versions()
        self._pending -= {index for index, before in enumerate(self._before) if before != self._after[index]}
        self._backwards += 1
        self.monitor.micro_batch(self._square())
        gradients = self._gradients()
        self._left = total_square(gradients) if gradients else None
        self._total = None if self._pending else self._left

    def _square(self) -> Tensor | float:
        """|s_j|^2 of the backward that is over, or NaN where it is unknown.

        Unknown are gradients beside an earlier step's that were not set to zero, those of parameters without a hook
        (their unit was not entered by its forward), and those of a backward that is one of several for a forward.
        """
        unseen = any(version >= 0 and index not in self._gathered for index, version in enumerate(self._after))
        if self._unknown or self._carried or unseen or self._backwards > self._forwards:
            return math.nan
        square = sum_squares(self._norms)
        if self._kept is not None:
            square = torch.where(self._kept.to(square.device), square, math.nan)
        return square if self._leftover is None else torch.where(self._leftover == 0, square, math.nan)

    def _before_update(self) -> None:
        if self._began:
            raise RuntimeError(
                "kf.fsdp_monitor: an optimizer steps inside backward, so a step's gradient is never there as a whole: "
                "step after backward"
            )
        if not self.monitor.micro_batches:
            return  # another optimizer of the same model ended this step
        seen = torch.full((), math.nan, dtype=torch.float64) if self._total is None else self._total
        # FSDP2 divides the sum over the workers by its divisor; under HSDP several workers have the same shards.
        factor = (self._divisor() / self._workers) ** 2 * self._shards / self._workers
        message = self.monitor.message(seen.to(self.monitor.device) * factor)
        sent: dist.Work | None = None
        for dim in range(self._mesh.ndim):
            if sent is not None:
                sent.wait()
            sent = dist.all_reduce(message, group=self._mesh.get_group(dim), async_op=True)
        self.monitor.step(message, sent)
        self._carried = bool(self._pending)
        self._begin_step()

    def _gradients(self) -> list[Tensor]:
        """This rank's shards of the gradients, of the parameters that have one."""
        with torch.no_grad():
            return [_local(param.grad) for param in self._params if param.grad is not None]

    def _versions(self) -> list[int]:
        """For each parameter a number that changes with its shard's `.grad`; -1 without one.

        FSDP2 adds to the local tensor; what users do to a DTensor in place counts as a version of that one alone,
        and torch._foreach functions count nowhere.
        """
        with torch.no_grad():
            grads = [param.grad for param in self._params]
            return [-1 if grad is None else grad._version + _local(grad)._version for grad in grads]

    def _divisor(self) -> float:
        """What FSDP2 divides the sum of the workers' gradients by.

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


def _trained(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], dict[nn.Module, list[tuple[nn.Module, str, int]]]]:
    """Names and parameters to be trained, and where each unit finds them: see `_Sharded`."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    index_of = {id(param): index for index, (_, param) in enumerate(named)}
    places: dict[nn.Module, list[tuple[nn.Module, str, int]]] = {}

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
    """The workers whose gradients FSDP2 averages. Raises ValueError for parameters that it does not average alone."""
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


def _param_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    """FSDP2's settings of a unit's parameters. They have public setters, and no getters."""
    groups: list[FSDPParamGroup] | None = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", None)
    if groups is None or not all(hasattr(group, "gradient_divide_factor") for group in groups):
        raise RuntimeError(f"kf.fsdp_monitor: torch {torch.__version__} has another FSDP2 than 2.13, which it measures")
    return groups


def _reduced_in_16_bits(group: FSDPParamGroup) -> bool:
    policy, param = group.mp_policy, group.fsdp_params[0].sharded_param
    return (policy.reduce_dtype or policy.param_dtype or param.dtype) in (torch.bfloat16, torch.float16)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard. Under no_grad, it is the tensor itself and no view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Claim:
    """Keeps a model from getting a second monitor until it is removed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        _MONITORED.add(model)

    def remove(self) -> None:
        """The model may get another monitor."""
        if (model := self._model()) is not None:
            _MONITORED.discard(model)
