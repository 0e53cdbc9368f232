"""A step's figures, each defined once: name, unit and meaning.

`Measured` is computed from a step's gradients. `StepSettings` is what the step was made with; `StepContext` adds times.
From them come `StepStats`, `policies.Signals`, the columns of metrics.jsonl, TensorBoard's tags and the display.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def _about(unit: str, help: str, label: str = "", shown: str = "") -> dict[str, str]:
    """A figure's description. label: its name on the display, if another; shown: its format there."""
    return {"unit": unit, "help": help, "label": label, "shown": shown}


def required(*about: str, **more: str) -> Any:
    """A field that every step has. The arguments are `_about`'s."""
    return field(metadata=_about(*about, **more))


def optional(*about: str, default: Any = None, **more: str) -> Any:
    """A field with a default: None, unknown, unless another is given. The other arguments are `_about`'s."""
    return field(default=default, metadata=_about(*about, **more))


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step was made with, and how far training was after it. The same on every worker."""

    epoch: int = required("", "Epoch of this step, from 0", shown="d")
    samples: int = required("samples", "Samples trained on so far, this step included")
    lr: float = required("", "Learning rate of this step", shown=".3g")
    lr_scale: float = required("", "Factor of lr that policies set; 1.0 at first")
    batch_size: int = required("samples", "Global batch size; a last step may be shorter", label="batch", shown="d")
    workers: int = required("workers", "Workers that made this step", shown="d")
    done: float | None = optional(
        "",
        "Part of the run that is over after this step, in [0, 1]; unknown where it has no set length",
    )
    curvature: float | None = optional(
        "", "(PG)'H(PG) / |PG|^2, the loss's second derivative along the update; if statistics.curvature_every is set"
    )
    curvature_noise_scale: float | None = optional(
        "samples", "tr(PHP Sigma) / (PG)'H(PG): the batch size at which the best rate is half of best_lr"
    )
    best_lr: float | None = optional("", "G'PG / (PG)'H(PG): the best learning rate of a step with the whole gradient")


@dataclass(frozen=True, kw_only=True)
class StepContext(StepSettings):
    """A step's settings and times, kept until its statistics have arrived."""

    cursor: int  # Samples of the epoch that were used before this step
    # The numbers of the workers that made this step, in rank order; this worker's alone where it has a `share`.
    members: tuple[int, ...]
    # Pair averaging: the figures are this worker's own, of its micro-batches from the first number up to the second,
    # which is not among them. None: they are of all workers.
    share: tuple[int, int] | None = None
    # Samples of each of the step's micro-batches but the last; None: the first steps', in an older checkpoint.
    micro_batch: int | None = None
    step_time_s: float = required("s", "Wall time of this step on the leader")
    data_wait_s: float = required("s", "Part of step_time_s that the leader waited for data")
    data_bytes_per_s: float | None = optional("B/s", "Bytes of the leader's batches in this step, over step_time_s")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one step measured over all workers. The same on every worker; None is unknown.

    The statistics are per-sample quantities (McCandlish et al. 2018, appendix A), so they stay comparable when the
    batch size changes. Without sample counts a micro-batch takes the sample's place.
    """

    micro_batches: int = required("micro-batches", "M, the micro-batches of this step")
    loss: float | None = optional("", "Mean training loss over this step's samples", shown=".4g")
    grad_norm: float | None = optional("", "Norm of the mean gradient, before clipping, without the loss scale")
    grad_sq: float | None = optional("", "G2 of this step: unbiased for |G|^2, so it can be negative")
    grad_variance: float | None = optional("", "S of this step: unbiased for tr(Sigma)")
    noise_scale: float | None = optional("samples", "Running estimate of tr(Sigma) / |G|^2, this step included")
    noise_scale_low: float | None = optional("samples", "Confidence interval's lower end; may be known alone")
    noise_scale_high: float | None = optional("samples", "Confidence interval's upper end")
    mean_grad_sq: float | None = optional("", "Running mean of grad_sq; it too can be negative")
    mean_grad_variance: float | None = optional("", "Running mean of grad_variance")


# All figures of a step by name: unit, help, label and shown of each.
FIGURES: dict[str, Mapping[str, str]] = {
    "step": _about("steps", "Optimizer steps taken before this one", shown="d"),
    **{each.name: each.metadata for kind in (StepContext, Measured) for each in fields(kind) if each.metadata},
}

# The columns of metrics.jsonl and of TensorBoard's group "train", in order.
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
    "curvature",
    "curvature_noise_scale",
    "best_lr",
    "step_time_s",
    "data_wait_s",
    "data_bytes_per_s",
)


def display_text(name: str, record: Mapping[str, Any]) -> str | None:
    """A figure of this record as the display shows it: label and value. None where the value is unknown."""
    value, about = record.get(name), FIGURES[name]
    return None if value is None else f"{about['label'] or name.replace('_', ' ')} {value:{about['shown']}}"
