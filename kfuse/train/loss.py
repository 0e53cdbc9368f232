"""How a batch becomes a loss: by a loss function of a pair, by a step function, or by the model itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfuse.data.dataset import describe

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
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten().long())


class Outcome(NamedTuple):
    """What a micro-batch's forward gave."""

    loss: Tensor
    """The mean loss, a scalar."""
    output: Any = None
    """What the model returned; None with a step function, which keeps it to itself."""
    target: Any = None
    """The pair's target. The whole batch where the model computes the loss by itself."""
    figures: Mapping[str, Tensor | float] = {}
    """What a step function returned beside the loss."""

    def scalars(self, names: tuple[str, ...]) -> list[Tensor | float]:
        """The figures in the order of `names`, as scalars: of one that has several values, their mean.

        Raises ValueError where they are not those of `names`, TypeError for one that is no number.
        """
        if self.figures.keys() != set(names):
            raise ValueError(
                f"step_fn returned the figures {sorted(self.figures)}, and {sorted(names)} before: must be the same"
            )
        scalars: list[Tensor | float] = []
        for name in names:
            value = self.figures[name]
            if isinstance(value, Tensor):
                scalars.append(value.detach() if value.ndim == 0 else value.detach().double().mean())
            elif isinstance(value, (int, float)):
                scalars.append(value)
            else:
                raise TypeError(f"step_fn's figure {name!r} is a {describe(value)}: must be a number")
        return scalars


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
                f"a batch is a {describe(batch)}: {'loss_fn needs' if self.loss_fn else 'it must be'} an (input, "
                "target) pair of tensors or numbers; pass step_fn= for any other"
            )
        output = _call(model, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise TypeError(
                f"model(**batch) of a {describe(batch)} returned {describe(output)} without a loss: give the batch its "
                "labels, or pass step_fn="
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
            raise TypeError(f"weight_fn returned a {describe(given)}: must be a number above 0") from None
        if not 0 < weight < math.inf:
            raise ValueError(f"weight_fn returned {weight}: must be a number above 0")
        return weight


def is_pair(batch: Any) -> bool:
    """Whether `batch` is (input, target), as a tuple or a list."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _call(model: nn.Module, inputs: Any) -> Any:
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
