"""The problems of time_to_accuracy.py: what is trained, on what data, and how good a model is.

    digits      a small residual network, on varied digits; held-out error
    text        a small GPT, on the source of Python's standard library; held-out loss
    quadratic   the noisy quadratic model (Zhang et al. 2019, arXiv 1907.04164), by plain SGD; the expected loss

Of each measure of quality, lower is better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfuse.data import DataSplit, TensorData
from kfuse.data.builtin import load_text
from kfuse.models import GPT, ConvNet

LARGEST = 8
"""batch.max over batch.size, as the defaults of the command line are."""
_WHOLE = 2 * LARGEST
"""A run's samples are a multiple of so many small batches: no fixed batch size has a shorter last step."""
_CHUNK = 512


@dataclass(frozen=True)
class Setting:
    """What all systems share."""

    batch_size: int
    """The small batch, samples over all workers."""
    micro_batch: int
    samples: int
    """Of a whole run."""
    optimizer: Literal["adamw", "sgd"]
    rates: tuple[float, ...]
    """Learning rates of the sweep."""


class Problem(ABC):
    """One problem. `part`: of the samples of a whole run, at most 1."""

    name: str
    quality: str
    """What `measure` returns, in words."""
    setting: Setting
    stops = True
    """Whether a run may end once its measured quality is at the target: not where `expected` counts."""

    def __init__(self, part: float = 1.0) -> None:
        unit = _WHOLE * self.setting.batch_size
        self.samples = max(1, round(part * self.setting.samples / unit)) * unit

    @abstractmethod
    def data(self, seed: int) -> TensorData:
        """The `samples` samples of a run, each of which is used once."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over a micro-batch, as kf.fit's loss_fn."""

    def expected(self, steps: Sequence[tuple[int, float]]) -> Sequence[float] | None:
        """The expected quality after 0, 1, ... steps with these batch sizes and rates; None where it is not known."""
        return None

    @abstractmethod
    def measure(self, model: nn.Module) -> float:
        """The model's quality on what it is not trained on. The model is in eval mode."""


class Digits(Problem):
    """ConvNet on 50,000 varied digits, made of scikit-learn's; the error on 2,000."""

    name, quality = "digits", "held-out error"
    setting = Setting(64, 32, 49_152, "adamw", (0.002, 0.004, 0.008, 0.016))

    def data(self, seed: int) -> TensorData:
        (x, y), _ = self._digits
        return TensorData((x[: self.samples], y[: self.samples]))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ConvNet((1, 8, 8), 10)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def measure(self, model: nn.Module) -> float:
        _, (x, y) = self._digits
        x, y = x[:2000], y[:2000]
        hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True))
        return 1 - hits / len(y)

    @cached_property
    def _digits(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """50,000 for training and 10,000 held out: shifted by up to two pixels, of other contrast and with noise."""
        from sklearn.datasets import load_digits

        found, generator = load_digits(), torch.Generator().manual_seed(0)
        images, labels = torch.tensor(found.images, dtype=torch.float32) / 16, torch.tensor(found.target)
        order = torch.randperm(len(images), generator=generator)

        def vary(which: Tensor, count: int) -> tuple[Tensor, Tensor]:
            chosen = which[torch.randint(len(which), (count,), generator=generator)]
            down, right = torch.randint(-2, 3, (2, count, 1, 1), generator=generator)
            padded, place = F.pad(images[chosen], (2, 2, 2, 2)), torch.arange(8)
            shifted = padded[torch.arange(count)[:, None, None], place[:, None] + 2 + down, place + 2 + right]
            contrast = 0.5 + torch.rand(count, 1, 1, generator=generator)
            varied = shifted * contrast + 0.1 * torch.randn(shifted.shape, generator=generator)
            return varied[:, None], labels[chosen]

        return vary(order[360:], 50_000), vary(order[:360], 10_000)


class Text(Problem):
    """GPT of one layer and width 96 on blocks of 16 bytes; the loss on 1,024 held-out ones, in nats a byte."""

    name, quality = "text", "held-out loss"
    setting = Setting(16, 8, 49_152, "adamw", (0.001, 0.002, 0.004, 0.008, 0.016))
    block = 16

    def data(self, seed: int) -> TensorData:
        train = self._split.train
        return TensorData(train.fetch(np.linspace(0, len(train) - 1, self.samples).astype(np.int64)))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(256, self.block, layers=1, heads=2, width=96, dropout=0.0)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def measure(self, model: nn.Module) -> float:
        pairs = zip(*(each.split(_CHUNK) for each in self._held_out), strict=True)
        return float(np.mean([self.loss(model(x), y).item() for x, y in pairs]))

    @cached_property
    def _split(self) -> DataSplit:
        return load_text(block_size=self.block)

    @cached_property
    def _held_out(self) -> tuple[Tensor, Tensor]:
        held_out = self._split.heldout
        pair: tuple[Tensor, Tensor] = held_out.fetch(np.linspace(0, len(held_out) - 1, 1024).astype(np.int64))
        return pair


class Quadratic(Problem):
    """The noisy quadratic model: loss(x) = sum_i h_i x_i^2 / 2 with h_i = 1 / i, i = 1 .. 100, from x_i = 1 on.

    The gradient of a sample is h_i x_i plus noise of variance c_i = h_i. As samples: e_i ~ N(0, c_i / h_i^2), and the
    loss of a sample is sum_i h_i (x_i - e_i)^2 / 2. All samples of a run are drawn anew for each seed, and each is used
    once. So with plain SGD, of rate a and batch size B, `Recursion` holds exactly.
    """

    name, quality = "quadratic", "loss"
    stops = False
    setting = Setting(32, 16, 32_768, "sgd", (0.05, 0.1, 0.2, 0.4, 0.8, 1.6))
    h = 1 / torch.arange(1.0, 101.0)

    def data(self, seed: int) -> TensorData:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.samples, len(self.h), generator=generator) / self.h.sqrt()
        return TensorData((noise, torch.zeros(self.samples)))

    def model(self, seed: int) -> nn.Module:
        return _Point(self.h)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output.mean()

    def measure(self, model: nn.Module) -> float:
        x = next(model.parameters()).detach().double()
        return float((self.h.double() * x**2).sum() / 2)

    def expected(self, steps: Sequence[tuple[int, float]]) -> list[float]:
        """By `Recursion`: the loss of one run goes up and down by chance, its expectation does not."""
        exact = Recursion()
        losses = [exact.loss]
        for batch_size, lr in steps:
            exact.step(lr, batch_size)
            losses.append(exact.loss)
        return losses


class _Point(nn.Module):
    """x; its output is the loss of each sample, [B]."""

    def __init__(self, h: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones_like(h))
        self.register_buffer("h", h, persistent=False)

    def forward(self, noise: Tensor) -> Tensor:
        """fp32 [B, 100] to [B]."""
        loss: Tensor = (self.h * (self.x - noise) ** 2).sum(1) / 2
        return loss


class Recursion:
    """The exact distribution of x on the quadratic model, float64: normal, with independent coordinates.

    With rate a and batch size B, E[x^2] <- (1 - a h)^2 E[x^2] + a^2 c / B (Zhang et al. 2019). Here that is the sum of
    two terms: the mean's square, where mean <- (1 - a h) mean, and variance <- (1 - a h)^2 variance + a^2 c / B.
    """

    def __init__(self) -> None:
        self.h = Quadratic.h.double().numpy()
        self.mean, self.variance = np.ones_like(self.h), np.zeros_like(self.h)

    def step(self, lr: float, batch_size: int) -> None:
        """One step of SGD; the noise has variance c = h."""
        kept = 1 - lr * self.h
        self.mean, self.variance = kept * self.mean, kept**2 * self.variance + lr**2 * self.h / batch_size

    @property
    def loss(self) -> float:
        """Its expectation."""
        return float((self.h * (self.mean**2 + self.variance)).sum() / 2)


PROBLEMS: dict[str, type[Problem]] = {each.name: each for each in (Digits, Text, Quadratic)}
