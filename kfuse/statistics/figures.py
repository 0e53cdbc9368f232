"""A step's figures, each defined once: name, unit and meaning.

`Measured` is what a step's gradients say, `StepSettings` what the step was made with, `StepContext` that and its times.
From them come `StepStats`, `policies.Signals`, the columns of metrics.jsonl, TensorBoard's tags and the display.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def _figure(unit: str, help: str, label: str = "", shown: str | None = None) -> dict[str, str | None]:
    """A field's metadata. label: on the display, instead of the name. shown: its format there; None: not there."""
    return {"unit": unit, "help": help, "label": label, "shown": shown}


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step was made with, and how far training was after it. The same on every worker."""

    epoch: int = field(metadata=_figure("", "Epoch of this step, from 0", shown="d"))
    samples: int = field(metadata=_figure("samples", "Samples trained on so far, this step included"))
    lr: float = field(metadata=_figure("", "Learning rate of this step", shown=".3g"))
    lr_scale: float = field(metadata=_figure("", "Factor of lr that policies set; 1.0 at first"))
    batch_size: int = field(
        metadata=_figure(
            "samples",
            "Global batch size now in force. A short last step of an epoch does not change it",
            label="batch",
            shown="d",
        )
    )
    workers: int = field(metadata=_figure("workers", "Workers that made this step", shown="d"))


@dataclass(frozen=True, kw_only=True)
class StepContext(StepSettings):
    """A step's settings and times, kept until its statistics have arrived."""

    cursor: int
    """Samples of the epoch that were used before this step."""
    members: tuple[int, ...]
    """The numbers of the workers that made this step, in rank order."""
    step_time_s: float = field(metadata=_figure("s", "Wall time of this step on the leader"))
    data_wait_s: float = field(metadata=_figure("s", "Part of step_time_s spent fetching data"))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one step measured over all workers. The same on every worker; None is unknown.

    The statistics are per-sample quantities (McCandlish et al. 2018, appendix A), so they stay comparable when the
    batch size changes. Without sample counts a micro-batch takes the sample's place.
    """

    micro_batches: int = field(metadata=_figure("micro-batches", "M, the micro-batches of this step"))
    loss: float | None = field(
        default=None, metadata=_figure("", "Mean training loss over this step's samples", shown=".4g")
    )
    grad_norm: float | None = field(
        default=None,
        metadata=_figure("", "Norm of the mean gradient, before clipping, after loss scaling is undone"),
    )
    grad_sq: float | None = field(
        default=None, metadata=_figure("", "G2 of this step: unbiased for |G|^2, so it can be negative")
    )
    grad_variance: float | None = field(
        default=None, metadata=_figure("", "S of this step: unbiased for tr(Sigma), one sample's gradient covariance")
    )
    noise_scale: float | None = field(
        default=None,
        metadata=_figure("samples", "Running estimate of B_simple = tr(Sigma) / |G|^2, this step included"),
    )
    noise_scale_low: float | None = field(
        default=None,
        metadata=_figure(
            "samples",
            "Lower end of the noise scale's confidence interval. Known without noise_scale where that may be anything "
            "from here upwards",
        ),
    )
    noise_scale_high: float | None = field(
        default=None, metadata=_figure("samples", "Upper end of the noise scale's confidence interval")
    )
    mean_grad_sq: float | None = field(
        default=None, metadata=_figure("", "Running mean of grad_sq; it too can be negative")
    )
    mean_grad_variance: float | None = field(default=None, metadata=_figure("", "Running mean of grad_variance"))


@dataclass(frozen=True)
class Figure:
    """A figure's description."""

    name: str
    unit: str
    help: str
    label: str
    shown: str | None

    @property
    def described(self) -> str:
        """Meaning and unit in one text."""
        return f"{self.help} [{self.unit}]" if self.unit else self.help

    def text(self, record: Mapping[str, Any]) -> str | None:
        """Label and value as the display shows them; None where the value is unknown."""
        value = record.get(self.name)
        return None if value is None else f"{self.label} {value:{self.shown or ''}}"


def _described(*classes: type) -> dict[str, Figure]:
    step = Figure("step", "steps", "Optimizer steps taken before this one", "step", "d")
    described = {"step": step}
    for one in classes:
        for each in fields(one):
            if each.metadata:
                about: dict[str, Any] = dict(each.metadata)
                about["label"] = about["label"] or each.name.replace("_", " ")
                described[each.name] = Figure(each.name, **about)
    return described


FIGURES = _described(StepContext, Measured)
"""All figures of a step, by name."""

METRICS = (
    "step",
    "epoch",
    "samples",
    "loss",
    "lr",
    "batch_size",
    "micro_batches",
    "workers",
    "noise_scale",
    "noise_scale_low",
    "noise_scale_high",
    "grad_variance",
    "grad_sq",
    "grad_norm",
    "step_time_s",
    "data_wait_s",
)
"""The columns of metrics.jsonl and of TensorBoard's group "train", in order."""
assert set(METRICS) <= set(FIGURES)
