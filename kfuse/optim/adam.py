"""What the optimizers that keep Adam's two moments have in common."""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter

from kfuse.comm.buckets import Bucket
from kfuse.kernels import AdamOptions
from kfuse.optim.flat import FlatOptimizer, _Flat


class AdamMoments(FlatOptimizer):
    """State as torch's Adam: `exp_avg`, `exp_avg_sq`, and each parameter's number of updates."""

    _moment_names = ("exp_avg", "exp_avg_sq")

    def _publish(self, p: Parameter, flat: _Flat, bucket: Bucket, k: int) -> None:
        super()._publish(p, flat, bucket, k)
        self.state[p]["step"] = flat.steps[k]


def adam_options(group: dict[str, Any], lr_factor: float) -> AdamOptions:
    """Of a parameter group, whose learning rate is multiplied with `lr_factor`."""
    beta1, beta2 = map(float, group["betas"])
    lr = float(group["lr"]) * lr_factor
    return AdamOptions(lr, beta1, beta2, group["eps"], group["weight_decay"], maximize=group["maximize"])
