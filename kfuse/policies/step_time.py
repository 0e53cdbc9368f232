"""Pollux' model of a step's time, and its fit to measured steps (Qiao et al., OSDI 2021, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Point = tuple[int, int, float]  # Micro-batches of the worker that has most, workers, seconds of a step

_GAMMAS = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
_PREFER_NO_OVERLAP = 1e-6  # of (gamma - 1)^2 beside the mean squared error: where any gamma fits, it is 1
_PREFER_SCALING = 1e-3  # of the messages' time over a step's: small where times do not tell it from computation


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by a worker's micro-batches k and the workers n (Qiao et al., OSDI 2021, section 3.2).

        t_grad(k) = constant + micro_batch * k
        t_sync(n) = 0 for n = 1, else sync + more * (n - 2)
        t = (t_grad^gamma + t_sync^gamma)^(1 / gamma)

    gamma 1: messages and computation follow one another; 10: they overlap, and the longer one is a step's time.
    """

    constant: float
    micro_batch: float
    sync: float = 0.0  # Seconds of the messages between two workers; each further worker adds `more`
    more: float = 0.0
    gamma: float = 1.0

    def seconds(self, micro_batches: ArrayLike, workers: ArrayLike) -> Array:
        """Returns a step's seconds where the worker that has most has so many micro-batches: the arguments' shape."""
        k, n = np.asarray(micro_batches, np.float64), np.asarray(workers, np.float64)
        t_grad = self.constant + self.micro_batch * k
        t_sync = np.where(n > 1, self.sync + self.more * np.maximum(n - 2, 0), 0.0)
        longer = np.maximum(t_grad, t_sync)  # powers of what is at most 1 do not overflow
        shares = (t_grad / longer) ** self.gamma + (t_sync / longer) ** self.gamma
        total: Array = longer * shares ** (1 / self.gamma)
        return total


def fit(points: Collection[Point]) -> StepTime:
    """Returns the model that fits these points best, by the mean squared error of log seconds.

    What the points do not tell is assumed as in Pollux, so that it is tried: with one worker only, more of them need no
    messages; with two at most, further ones add nothing to these; with one number of micro-batches only, half of the
    computation does not depend on it.

    points: seconds above 0. Raises ValueError where there are none.
    """
    if not points:
        raise ValueError("a step's time is unknown: there are no points")
    k, n, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
    mean = float(np.exp(np.log(seconds).mean()))
    known_k, several, many = len(set(k)) > 1, bool((n > 1).any()), bool((n > 2).any())

    def parameters(x: Array) -> tuple[Any, Any, Any, Any]:
        """Returns constant, micro_batch, sync, more from the logarithms of the fitted ones: x [..., fitted]."""
        values = iter(np.moveaxis(mean * np.exp(x), -1, 0)[..., None])
        micro_batch = next(values)
        constant = next(values) if known_k else micro_batch * k[0]
        sync = next(values) if several else 0.0 * micro_batch
        return constant, micro_batch, sync, next(values) if many else 0.0 * micro_batch

    def residuals(x: Array, gamma: float) -> Array:
        of_models = parameters(x)  # several models at once: each parameter is [models, 1]
        errors = np.log(StepTime(*of_models, gamma).seconds(k, n) / seconds) / math.sqrt(len(seconds))
        return np.concatenate([errors, *(_PREFER_SCALING / mean * each for each in of_models[2:])], axis=-1)

    # From where each part has a share of the time: a parameter that begins at 0 would stay there.
    x = np.log([0.5 / k.mean(), *[0.25] * known_k, *[0.1] * several, *[0.01] * many])
    best, least = StepTime(mean, 0.0), math.inf
    for gamma in _GAMMAS if several and len(seconds) > len(x) else _GAMMAS[:1]:
        x, error = _least_squares(partial(residuals, gamma=gamma), x)
        error += _PREFER_NO_OVERLAP * (gamma - 1) ** 2
        if error < least:
            constant, micro_batch, sync, more = (each.item() for each in parameters(x))
            best, least = StepTime(constant, micro_batch, sync, more, gamma), error
    return best


def _least_squares(residuals: Callable[[Array], Array], x: Array) -> tuple[Array, float]:
    """Returns the minimum of the sum of squares that Levenberg and Marquardt's steps from `x` reach, and that sum.

    residuals: of one x [parameters], or of several at once [points, parameters].
    """
    found = residuals(x)
    error, damping, small, eye = float(found @ found), 1e-2, 1e-6, np.eye(len(x))
    for _ in range(40):
        jacobian = (residuals(x + small * eye) - found).T / small
        gram = jacobian.T @ jacobian
        move = np.linalg.solve(gram + damping * (np.diag(np.diag(gram)) + 1e-9 * eye), -jacobian.T @ found)
        there = np.clip(x + np.clip(move, -2, 2), -16, 3)
        new = residuals(there)
        less = float(new @ new)
        if less < error:
            is_done = error - less <= 1e-4 * error or less < 1e-10
            x, found, error, damping = there, new, less, damping / 4
            if is_done:
                break
        elif (damping := 4 * damping) > 1e6:
            break
    return x, error
