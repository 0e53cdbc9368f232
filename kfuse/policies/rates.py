"""Learning rates that fall along a cosine, half of it by a larger batch."""

from __future__ import annotations

import math
from typing import Literal, get_args

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_number

Curve = Literal["cosine", "quarter_cosine"]


class SeesawPolicy(ConfiguredPolicy):
    """Where a cosine decay would cut the learning rate by a, cuts it by sqrt(a) and grows the batch by a.

    Seesaw (Meterez et al. 2025, arXiv 2510.14717, algorithm 1): for the same samples the loss falls alike, in fewer
    steps. With d the part of the run that is over, `done`, the decay left at d is

        cosine          (1 + cos(pi d)) / 2, that of lr.decay=cosine    saves 1/2 of the steps
        quarter_cosine  cos(pi d / 2)                                   saves 1 - 2/pi = 0.363, the paper's limit

    less where batch.max ends the growth. In cuts of a = `cut`:

        c = the smallest power cut^-k that is at least the curve
        batch size = base batch size / c, in whole micro-batches, at most batch.max
        lr_scale   = c

    1) lr.scaling gives back what the batch size has gained: with sqrt (the default) the rate is c sqrt(B / B0), which
       is sqrt(c), Seesaw's, for Adam and its kin. With linear it is constant: "increase the batch size instead" (Smith
       et al. 2018), the same equivalence for SGD. lr.scaling=none would cut the noise twice, and is refused; so is
       adascale, whose gain is another one.
    2) The product is right where the batch size could not follow: rounded down, or at batch.max, where the rate falls
       by all of `cut`. A rate that fell by less would be unstable (the paper's lemma on alpha >= sqrt(beta)).
    3) This policy is the decay: lr.decay must be none. The curve begins with the run, also where there is a warm-up.
    4) It holds while noise makes up most of the gradient (the paper's assumption 3), and only at rates that curvature
       does not limit. So set batch.max to about 8 times batch.size, as the defaults are: that costs few of the steps
       saved (benchmarks/results/seesaw.json).
    5) A run that train.epochs ends goes by samples, as in the paper. One that train.steps ends goes by steps: it takes
       as many steps as without Seesaw, and more samples.

    cut: factor of one cut; finite, above 1. The paper's experiments have 1.1; larger ones save fewer steps.
    curve: cosine or quarter_cosine.
    """

    owned_fields = ("batch_size", "lr_scale")

    def __init__(self, cut: float = 1.1, curve: Curve = "cosine") -> None:
        check_number("policy.cut", cut, above=1)
        if curve not in get_args(Curve):
            raise ValueError(f"policy.curve={curve}: must be one of {', '.join(get_args(Curve))}")
        self.cut, self.curve = cut, curve
        self.lr_settings = {"scaling": ("sqrt", "linear"), "decay": ("none", "constant")}

    def decide(self, signals: Signals) -> Decision | None:
        base, micro = signals.base_batch_size, signals.micro_batch
        if signals.done is None or base is None or signals.done >= 1:
            return None
        left = self.left(signals.done)
        most = signals.bounds.batch_max // micro * micro
        batch_size = max(base, min(math.floor(base / left / micro + 1e-9) * micro, most))  # 12 may come out below 12
        return Decision(batch_size=batch_size, lr_scale=left).changes(signals)

    def left(self, done: float) -> float:
        """Returns what the cuts leave of the learning rate's decay when `done`, in [0, 1), of the run is over: c."""
        # (1 + cos x) / 2 is the square of cos(x / 2), which does not round to zero.
        value = math.cos(math.pi * done / 2) ** (2 if self.curve == "cosine" else 1)
        cuts = math.floor(-math.log(value) / math.log(self.cut) + 1e-9)  # a half by halves is 1, rounded or not
        return self.cut**-cuts
