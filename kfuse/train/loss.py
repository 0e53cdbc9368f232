"""How a batch becomes a loss: by a loss function of a pair, by a step function, or by the model; and in what precision.

fp32, bf16 (autocast over fp32 parameters), or bf16-true (bf16 parameters). With the latter fp32 are: BatchNorm's
parameters and running statistics, the loss that kfuse computes, gradients from their packing on (partial sums, messages
unless comm.dtype=bf16, statistics), and the fused optimizers' master weights and moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfuse.data.dataset import map_leaves

if TYPE_CHECKING:
    from kfuse.optim import DistributedOptimizer

LossFunction = Callable[[Any, Any], Tensor]
"""loss_fn(output, target): the MEAN loss over a micro-batch, a scalar."""
WeightFunction = Callable[[Any], Any]
"""weight_fn(batch): a micro-batch's weight in the mean, such as its target tokens: a number above 0."""
Metric = Callable[[Any, Any], Any]
"""metric(output, target): a value for each sample, [B], or their mean, a scalar."""
StepFunction = Callable[[nn.Module, Any], Any]
"""step_fn(model, batch): the MEAN loss over a micro-batch, or (loss, {name: scalar tensor or number})."""


def default_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns cross entropy for integer targets and mean squared error for floating ones, a mean, fp32 scalar.

    Classes are the last dimension of `output`: `[B, C]` with targets `[B]`, or `[B, T, V]` with `[B, T]`,
    where the mean is over all tokens. Raises ValueError for shapes that do not match (nothing is broadcast).
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise TypeError(
            f"output of type {type(output).__name__} for a target of type {type(target).__name__}: the default loss "
            "takes two tensors; pass loss_fn= or step_fn="
        )
    floating = target.is_floating_point()
    if target.dtype == torch.bool or target.is_complex():
        raise ValueError(f"targets of {target.dtype}: they must be integers (classes) or floating")
    if target.shape != (output.shape if floating else output.shape[:-1]):
        needs = "equal shapes" if floating else "the targets' shape and one dimension of classes after it"
        raise ValueError(
            f"output of shape {tuple(output.shape)} for targets of {target.dtype} of shape {tuple(target.shape)}: "
            f"{'mean squared error' if floating else 'cross entropy'} needs {needs}"
        )
    if floating:
        return F.mse_loss(output.float(), target.float())
    if output.ndim != 2:
        output, target = output.flatten(0, -2), target.flatten()
    return F.cross_entropy(output.float(), target.long())


class Outcome(NamedTuple):
    """What a micro-batch's forward gave."""

    loss: Tensor  # the mean loss, a scalar
    output: Any = None  # what the model returned; None with a step function, which keeps it to itself
    target: Any = None  # the pair's target. The whole batch where the model computes the loss by itself.
    figures: Mapping[str, Tensor | float] = {}  # what a step function returned beside the loss


class Objective:
    """Calls the model on a batch and returns the loss.

    1) With `step_fn`: it does all of it.
    2) A pair (input, target): `loss_fn(output, target)`. The model is called `model(input)`; `model(*input)` where
       input is a tuple or a list; `model(**input)` where it is a mapping.
    3) A mapping, without `loss_fn`: `model(**batch)`, whose output has the loss as `.loss` or `["loss"]` (the
       convention of Hugging Face's models).
    """

    def __init__(
        self,
        loss_fn: LossFunction | None = None,
        step_fn: StepFunction | None = None,
        weight_fn: WeightFunction | None = None,
    ) -> None:
        """loss_fn: None: `default_loss` for pairs. weight_fn: None: a batch weighs as much as it has samples.

        Raises TypeError for what cannot be called, ValueError for both loss_fn and step_fn.
        """
        for name, function in (("loss_fn", loss_fn), ("step_fn", step_fn), ("weight_fn", weight_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r}: must be a function")
        if loss_fn is not None and step_fn is not None:
            raise ValueError("loss_fn= and step_fn=: pass one of them; a step function computes the loss by itself")
        self.loss_fn, self.step_fn, self.weight_fn = loss_fn, step_fn, weight_fn

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Raises TypeError or ValueError for a batch that it cannot take, or a loss that is not a mean loss."""
        if self.step_fn is not None:
            return _of_step_function(self.step_fn(model, batch))
        if is_pair(batch):
            inputs, target = batch
            output = _call(model, inputs)
            return Outcome(_checked("loss_fn", (self.loss_fn or default_loss)(output, target)), output, target)
        if self.loss_fn is not None or not isinstance(batch, Mapping):
            raise TypeError(
                f"a batch is a {type(batch).__name__}: {'loss_fn needs' if self.loss_fn else 'it must be'} an (input, "
                "target) pair of tensors or numbers; pass step_fn= for any other"
            )
        output = _call(model, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise TypeError(
                f"model(**batch) returned a {type(output).__name__} without a loss: give the batch its labels, or pass "
                "step_fn="
            )
        return Outcome(_checked("the model", loss), output, batch)

    def weight(self, batch: Any, samples: int) -> float:
        """The weight of a batch of `samples`, as it was fetched. Raises TypeError or ValueError for a wrong one."""
        if self.weight_fn is None:
            return float(samples)
        given = self.weight_fn(batch)
        try:
            weight = float(given)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"weight_fn returned a {type(given).__name__}: must be a number above 0") from None
        if not 0 < weight < math.inf:
            raise ValueError(f"weight_fn returned {weight}: must be a number above 0")
        return weight


def is_pair(batch: Any) -> bool:
    """Whether `batch` is (input, target), as a tuple or a list."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Tensor):  # to ask whether it is a Mapping takes longer
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _of_step_function(result: Any) -> Outcome:
    figures: Mapping[str, Tensor | float] = {}
    if isinstance(result, tuple) and len(result) == 2:
        result, figures = result
        if not isinstance(figures, Mapping):
            raise TypeError(
                f"step_fn returned (loss, {type(figures).__name__}): must be a loss, or (loss, {{name: number}})"
            )
    return Outcome(_checked("step_fn", result), figures=figures)


def _checked(source: str, loss: Any) -> Tensor:
    """Returns the loss. Raises TypeError or ValueError if it is not a scalar tensor."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"{source} returned {type(loss).__name__}: must return the mean loss, a scalar tensor")
    if loss.numel() != 1:
        raise ValueError(f"{source} returned a loss of shape {list(loss.shape)}: must be its mean, a scalar")
    return loss


MOST_FIGURES = 16
"""Figures of a step function that each step averages: they have slots in the tail, whose size is known before."""


def cast_parameters(model: nn.Module) -> None:
    """Makes the floating-point parameters and buffers of `model` bf16, in place, but for BatchNorm's.

    Running statistics are means over hundreds of micro-batches, which 8 bits of mantissa would not hold, and torch's
    batch normalisation takes bf16 inputs with fp32 parameters. Other layers, LayerNorm too, have parameters of their
    inputs' dtype.
    """
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            module._apply(_in_bf16, recurse=False)  # type: ignore[no-untyped-call]


class Forward:
    """Runs the model and the loss on each micro-batch of kf.fit and the command line."""

    def __init__(self, model: nn.Module, objective: Objective, opt: DistributedOptimizer, precision: str) -> None:
        self._model, self._objective, self._precision = model, objective, precision
        self._device, self._statistics = opt.engine.group.device, opt.statistics
        opt.carry_figures(MOST_FIGURES if self._objective.step_fn is not None else 0)

    def __call__(self, batch: Any) -> tuple[Tensor, list[Tensor | float]]:
        """Returns the micro-batch's mean loss, and the step function's figures, which are averaged like it."""
        done = forward(self._objective, self._model, batch, self._precision, self._device)
        return done.loss, [] if self._objective.step_fn is None else self._scalars(done.figures)

    def _scalars(self, figures: Mapping[str, Tensor | float]) -> list[Tensor | float]:
        """The figures as scalars, in the order of the first micro-batch's names: of several values their mean.

        Raises ValueError for others than these, or too many, TypeError for one that is no number or has no name.
        """
        for name in figures:
            if not isinstance(name, str):
                raise TypeError(f"step_fn's figure {name!r}: its name must be a text")
        known = self._statistics.figure_names
        names = tuple(sorted(figures)) if known is None else known
        if len(names) > MOST_FIGURES:
            raise ValueError(f"step_fn returned {len(names)} figures: must be at most {MOST_FIGURES}")
        if figures.keys() != set(names):
            raise ValueError(
                f"step_fn returned the figures {sorted(figures)}, and {sorted(names)} before: must be the same"
            )
        self._statistics.figure_names = names
        scalars: list[Tensor | float] = []
        for name in names:
            value = figures[name]
            if isinstance(value, Tensor):
                scalars.append(value.detach() if value.ndim == 0 else value.detach().double().mean())
            elif isinstance(value, (int, float)):
                scalars.append(value)
            else:
                raise TypeError(f"step_fn's figure {name!r} is a {type(value).__name__}: must be a number")
        return scalars


def forward(objective: Objective, model: nn.Module, batch: Any, precision: str, device: torch.device) -> Outcome:
    """The objective of a batch in this precision.

    With bf16-true the model's floating-point inputs are cast to bf16: the first of a pair, all of a mapping. Targets
    and the batch of a step function are left as they are.
    """
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            return objective(model, batch)
    if precision == "fp32" or objective.step_fn is not None:
        inputs = batch
    elif is_pair(batch):
        inputs = (map_leaves(_in_bf16, batch[0]), batch[1])
    else:
        inputs = map_leaves(_in_bf16, batch)
    if torch.is_autocast_enabled(device.type):  # the script's: asking takes a fraction of the 20 us of switching it off
        with torch.autocast(device.type, enabled=False):
            done = objective(model, inputs)
    else:
        done = objective(model, inputs)
    return done._replace(target=batch) if inputs is not batch and isinstance(batch, Mapping) else done


def _in_bf16(leaf: Any) -> Any:
    """A floating-point tensor in bf16; anything else as it is."""
    return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
