"""What makes an optimizer's updates and has the state for them: torch's own optimizer, or flat buffers and a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from kfuse.comm.engine import Engine
from kfuse.comm.group import Group
from kfuse.comm.step import Step

# Each tensor of their state has its parameter's shape, and is zeros before the first update, or is a count.
COMMON = tuple(
    getattr(optim, name) for name in ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta", "Muon")
)
SEVERAL = "optimizers"  # a key of the state_dict of several optimizers


def named_parameters(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Parameter, str]]:
    """Returns all parameters of an optimizer's `param_groups`, frozen ones too, with their names in messages."""
    named: list[tuple[Parameter, str]] = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for p, name in zip(group["params"], names, strict=True):
            named.append((p, f"parameter {len(named)}" + (f" ({name})" if name else "")))
    return named


def without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under torch's decorator `_disable_dynamo`, or `method` itself if it has no decorator.

    The decorator imports torch's compiler at its first call, which takes longer than importing torch: a worker would
    start later, or all others would wait for it while the training state is transferred.
    """
    wrapped: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return wrapped


@dataclass
class Update:
    """An update, which this worker has begun to make. Tensors are on the gradients' device."""

    step: Step
    factor: Tensor | None  # fp32 scalar that the gradients are multiplied with; None: 1
    skip: Tensor | None  # fp32 scalar; non-zero leaves the update out. None: it is made.
    finite: Tensor | bool  # whether all gradients are finite: a bool on the CPU, a bool scalar on CUDA
    lr_factor: float
    # The batch over the one that Adam's betas are meant for. Moments are multiplied by beta^batch_factor, which keeps
    # their half-life in samples, and the update counts as so many: so 1 - beta^count stays the exact bias correction
    # however the batch changes. Of beta2: Marek et al. 2025; of both, to first order, Malladi et al. 2022.
    batch_factor: float = 1.0
    owner_is_lost: bool = False  # the update is resumed after a loss: the worker whose shards this one mirrors is gone

    def skip_of(self, index: int) -> Tensor | None:
        """`skip` for one parameter: not 0 either where it is in doubt, and no worker gave it a gradient."""
        if index not in self.step.in_doubt:
            return self.skip
        unused = (self.step.tail[index] == 0).to(torch.float32)
        return unused if self.skip is None else torch.maximum(unused, self.skip)


class ShardsLost(RuntimeError):
    """Parts of the optimizer's state that no worker of the group has."""


class Updates:
    """Makes the updates of an optimizer's parameters. Without shards, those about shards do nothing."""

    weight_names: tuple[str, ...] = ()  # entries of torch's `state` that `weights` returns: they are not averaged twice
    engine: Engine
    shards: Any = None  # `kfuse.optim.shards.Shards`, where parameters are sharded over the processes of this worker

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt

    @property
    def skips_on_device(self) -> bool:
        """Whether `update` leaves parameters alone where the device says so, and the host need not ask it."""
        raise NotImplementedError

    def check_layout(self, named: list[tuple[Parameter, str]]) -> None:
        """Before buckets are built: raises ValueError for parameters that cannot be laid out."""

    def owner_costs(self, params: Sequence[Parameter], group: Mapping[str, Any]) -> list[int] | None:
        """Of a group's parameters, what each one's update costs, where one worker makes it and needs all of it."""
        return None

    def lay_out(self, engine: Engine) -> None:
        """The engine, or its buckets, are new; values are kept."""
        self.engine = engine

    def update(self, given: Update) -> None:
        """Updates the parameters whose `.grad` is set: their mean gradient, in their dtype; in the buckets it is fp32.
        With sharded state, where no `.grad` is set, updates those that some worker gave a gradient.

        Raises CommError with sharded state.
        """
        raise NotImplementedError

    # -- averages -------------------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """The tensors that updates change: the parameters, or what they are computed from. Between steps."""
        return [p.detach() for p in self.engine.params]

    def weights_changed(self) -> None:
        """The caller has changed what `weights` returned: parameters that are computed from them follow."""

    @torch.no_grad()
    def average_models(self, weights: bool = True, states: bool = True) -> None:
        """Makes parameters, optimizer state and BatchNorm's running statistics the mean of all workers' (local SGD).

        Between steps, on every worker. All of it or nothing is replaced. weights, states: whether parameters and
        optimizer state are averaged. Raises CommError, and RuntimeError with sharded state.
        """
        if self.engine.options.sharded:
            raise RuntimeError("comm.state=sharded has one model only, so none are averaged; use comm.state=replicated")
        values = self.weights() if weights else []
        if states:
            values += [value for p in self.engine.params for value in self._states_of(p)]
        _average(self.engine.group, [*values, *self.engine.averaged.tensors])
        if weights:
            self.weights_changed()

    @torch.no_grad()
    def agree_on_state(self) -> None:
        """Before states are averaged, on every worker: all have state of the same parameters afterwards.

        For after steps in which some workers made no update. What a worker lacks is zeros, as of no update. Raises
        CommError; calling it again is harmless.
        """
        params, group = self.engine.params, self.engine.group
        if group.size == 1 or not params:
            return
        mine = torch.tensor([int(bool(self._states_of(p))) for p in params], device=group.device)
        everywhere = mine.clone()
        group.all_reduce(everywhere, "which parameters have optimizer state").wait()
        lacking = ((mine == 0) & (everywhere > 0)).tolist()
        self.make_state([index for index, lacks in enumerate(lacking) if lacks])

    def make_state(self, lacking: Sequence[int]) -> None:
        """Makes the state of these parameters (indices in `engine.params`, perhaps none), as of no update."""
        raise NotImplementedError

    def _states_of(self, p: Parameter) -> list[Tensor]:
        """The tensors of a parameter's state, without those that are weights."""
        state = self.opt.state.get(p, {})
        names = sorted(name for name in state if name not in self.weight_names)
        return [state[name] for name in names if isinstance(state[name], Tensor)]

    # -- what is compared and saved -------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        """Returns what must be equal on all workers with sharded state, by name."""
        return {}

    def counts(self) -> list[tuple[Sequence[int], Tensor]]:
        """Returns how many updates each parameter has had, with sharded state, as it must be equal on all workers.

        Pairs of parameters (indices in `engine.params`) and fp32 counts, one each, on the device.
        """
        return []

    def state_dict(self, only: int | None = None) -> dict[str, Any]:
        """Returns torch's state_dict, whole. With sharded state every worker calls it at the same point, and gets it in
        the host's memory. only: the rank that gets the shards. Raises CommError, which names those that did not call.
        """
        state: dict[str, Any] = without_compiler(torch.optim.Optimizer.state_dict)(self.opt)
        return state

    def common_state(self) -> dict[str, Any]:
        """Returns what every worker has alike: with sharded state all but the shards. No collective."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any], whole: bool = False) -> None:
        """Loads what `state_dict` gave, or torch's optimizer. whole: with sharded state all of it, also what other
        workers are to own, which get it by `regroup`. Raises ValueError where it does not fit the parameters; then
        nothing is loaded.
        """
        without_compiler(torch.optim.Optimizer.load_state_dict)(self.opt, state)

    def load_common_state(self, state: dict[str, Any], keeps_shards: bool) -> None:
        """Takes over another worker's `common_state`. The shards come by `regroup`.

        keeps_shards: those that this worker has are of the same step.
        """
        self.load_state_dict(state)

    def make_room(self, state: dict[str, Any]) -> None:
        """Makes the state tensors that `state` has and this worker has not, where it knows how.

        So a state that arrives from another worker is written where it stays. It is loaded once all has arrived.
        """

    def shards_shown(self) -> AbstractContextManager[None]:
        """Context in which buckets are laid out anew: torch's `state` is whole. A collective with sharded state."""
        return nullcontext()

    def regroup(self, has_state: bool) -> None:
        """After the group has changed, on every worker of the new one: each gets the shards that are its own now.

        has_state: this worker's shards are of the newest state. Raises CommError, and ShardsLost where no worker has a
        part of the state. After an error nothing is lost that was there.
        """

    def hand_over(self, leavers: Collection[int]) -> None:
        """Before a planned change of the view, on every worker: these ranks give their shards to the others.

        Raises CommError.
        """

    def collect_parameters(self, rank: int, has_state: bool) -> None:
        """Gives rank `rank` all parameters, each from a worker that has updated it. Every rank calls it.

        has_state: this worker has updated its parts. Raises CommError and ShardsLost.
        """


def _average(group: Group, tensors: Sequence[Tensor]) -> None:
    """Makes these tensors the mean of all workers', in place: all of them or none. Integers are rounded.

    The mean of equal values is that value. Raises CommError.
    """
    if group.size == 1 or not tensors:
        return
    # The sum of 2 or 4 equal fp32 values is exact in any order; of other numbers only float64 holds it.
    dtype = torch.float32 if group.size in (2, 4) else torch.float64
    flat = torch.cat([tensor.detach().reshape(-1).to(group.device, dtype) for tensor in tensors])
    group.all_reduce(flat, "average of the workers' models").wait()
    flat.div_(group.size)
    for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        mean = mean.view(tensor.shape)
        tensor.copy_(mean if tensor.is_floating_point() else mean.round())
