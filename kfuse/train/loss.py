"""How a batch becomes a loss: by a loss function of a pair, by a step function, or by the model itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfuse.data import batch as batches

LossFunction = Callable[[Any, Any], Tensor]
"""loss_fn(output, target): the MEAN loss over a micro-batch, a scalar."""
WeightFunction = Callable[[Any], Any]
"""weight_fn(batch): a micro-batch's weight in the mean, such as its target tokens: a number above 0."""
StepFunction = Callable[[nn.Module, Any], Any]
"""step_fn(model, batch): the MEAN loss over a micro-batch, or (loss, {name: scalar tensor or number})."""


def default_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return cross entropy for integer targets and mean squared error for floating ones, a mean, fp32 scalar.

    Classes are the last dimension of `output`: `[B, C]` with targets `[B]`, or `[B, T, V]` with `[B, T]`,
    where the mean is over all tokens. Raises ValueError for shapes that do not match (nothing is broadcast).
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise TypeError(
            f"output of type {type(output).__name__} for a target of type {type(target).__name__}: the default loss "
            "takes two tensors; pass loss_fn= or step_fn="
        )
    if target.is_floating_point():
        if output.shape != target.shape:
            raise ValueError(
                f"output of shape {tuple(output.shape)} for floating targets of shape {tuple(target.shape)}: "
                "mean squared error needs equal shapes"
            )
        return F.mse_loss(output.float(), target.float())
    if target.dtype == torch.bool or target.is_complex():
        raise ValueError(f"targets of {target.dtype}: they must be integers (classes) or floating")
    if output.shape[:-1] != target.shape:
        raise ValueError(
            f"output of shape {tuple(output.shape)} for integer targets of shape {tuple(target.shape)}: "
            "cross entropy needs the targets' shape and one dimension of classes after it"
        )
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
                raise TypeError(f"step_fn's figure {name!r} is a {batches.describe(value)}: must be a number")
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
        self._loss_of_pair = loss_fn or default_loss

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Raises TypeError or ValueError for a batch that it cannot take, or a loss that is not a mean loss."""
        if self.step_fn is not None:
            return self._by_step_function(model, batch)
        if not is_pair(batch):
            return self._by_the_model(model, batch)
        inputs, target = batch
        output = model(inputs) if isinstance(inputs, Tensor) else _call(model, inputs)
        return Outcome(_checked("loss_fn", self._loss_of_pair(output, target)), output, target)

    def weight(self, batch: Any, samples: int) -> float:
        """The weight of a batch of `samples`, as it was fetched. Raises TypeError or ValueError for a wrong one."""
        if self.weight_fn is None:
            return float(samples)
        given = self.weight_fn(batch)
        try:
            weight = float(given)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"weight_fn returned a {batches.describe(given)}: must be a number above 0") from None
        if not 0 < weight < math.inf:
            raise ValueError(f"weight_fn returned {weight}: must be a number above 0")
        return weight

    def _by_step_function(self, model: nn.Module, batch: Any) -> Outcome:
        assert self.step_fn is not None
        result = self.step_fn(model, batch)
        figures: Mapping[str, Tensor | float] = {}
        if isinstance(result, tuple) and len(result) == 2:
            result, figures = result
            if not isinstance(figures, Mapping):
                raise TypeError(
                    f"step_fn returned (loss, {type(figures).__name__}): must be a loss, or (loss, {{name: value}})"
                )
        return Outcome(_checked("step_fn", result), figures=figures)

    def _by_the_model(self, model: nn.Module, batch: Any) -> Outcome:
        if not isinstance(batch, Mapping):
            raise TypeError(_NOT_A_PAIR.format(batches.describe(batch)))
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise TypeError(
                f"model(**batch) of a {batches.describe(batch)} returned {batches.describe(output)} without a loss: "
                "give the batch its labels, or pass step_fn="
            )
        return Outcome(_checked("the model", loss), output, batch)

    def check(self, model: nn.Module, batch: Any, source: str) -> None:
        """Before the first forward: raises TypeError, which names `source`, for a batch that cannot become a loss.

        The model is not run: its forward's signature is compared with what the batch would be passed as.
        """
        if not batches.tensors(batch) and not any(hasattr(leaf, "to") for leaf in batches.flatten(batch)[0]):
            raise TypeError(f"a batch of {source} is a {batches.describe(batch)}: it has no tensor")
        if self.step_fn is not None:
            return
        if is_pair(batch):
            _check_call(model, batch[0], source)
            if self.loss_fn is None and not isinstance(batch[1], Tensor):
                raise TypeError(
                    f"{source}: the target of a batch, an (input, target) pair, is a {batches.describe(batch[1])}: the "
                    "default loss takes a tensor; pass loss_fn= or step_fn="
                )
        elif not isinstance(batch, Mapping):
            raise TypeError(f"{source}: {_NOT_A_PAIR.format(batches.describe(batch))}")
        elif self.loss_fn is not None:
            raise TypeError(
                f"a batch of {source} is a {batches.describe(batch)}: loss_fn(output, target) needs an (input, target) "
                "pair; pass step_fn= instead, or neither where model(**batch) returns the loss"
            )
        else:
            _check_call(model, batch, source)


_NOT_A_PAIR = "a batch is a {}: it must be an (input, target) pair of tensors or numbers, or pass step_fn="


def is_pair(batch: Any) -> bool:
    """Whether `batch` is (input, target), as a tuple or a list."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """How a model is called with `inputs`: its positional arguments and its keywords."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _call(model: nn.Module, inputs: Any) -> Any:
    positional, keywords = _arguments(inputs)
    return model(*positional, **keywords)


def _check_call(model: nn.Module, inputs: Any, source: str) -> None:
    """Raises TypeError if the model's forward does not take these inputs, as far as its signature tells."""
    positional, keywords = _arguments(inputs)
    wrong = [key for key in keywords if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"a batch of {source} has the key {wrong[0]!r}: model(**batch) needs names; pass step_fn=")
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a compiled or scripted forward may have none
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        way = "model(**input)" if keywords else "model(*input)" if isinstance(inputs, (tuple, list)) else "model(input)"
        raise TypeError(
            f"{type(model).__name__}{signature} cannot be called as {way} with a {batches.describe(inputs)} of "
            f"{source}: {error}; pass step_fn="
        ) from None


def _checked(source: str, loss: Any) -> Tensor:
    """The loss. Raises TypeError or ValueError if it is not a scalar tensor with a gradient."""
    if not isinstance(loss, Tensor):
        or_figures = ", or (loss, {name: number})" if source == "step_fn" else ""
        raise TypeError(
            f"{source} returned {type(loss).__name__}: must return the mean loss, a scalar tensor{or_figures}"
        )
    if loss.numel() != 1:
        raise ValueError(f"{source} returned a loss of shape {list(loss.shape)}: must be its mean, a scalar")
    if not loss.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{source} returned a loss without a gradient: it was detached, computed under torch.no_grad(), or does "
            "not come from a parameter that is trained"
        )
    return loss
