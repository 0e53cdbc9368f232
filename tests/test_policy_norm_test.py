"""The norm test against figures computed by hand, and against the authors' formula."""

from __future__ import annotations

from typing import Any

from policy_signals import signals

from kfuse.policies import NormTestPolicy
from kfuse.policies.signals import Decision, Signals


def measured(batch_size: int, variance: float | None, grad_sq: float | None, **changes: Any) -> Signals:
    """Signals with running means of S and G2."""
    return signals(batch_size, mean_grad_variance=variance, mean_grad_sq=grad_sq, **changes)


def test_norm_test_grows_as_computed_by_hand() -> None:
    for theta, batch_size, variance, grad_sq, expected in [
        # theta 0.5: S / (0.25 G2) = 100 / (0.25 * 4) = 100 samples, 12.5 micro-batches of 8, so 13.
        (0.5, 64, 100.0, 4.0, 104),
        # The test holds at 104: 100 / 104 = 0.96 <= 0.25 * 4 = 1. And at 100 exactly.
        (0.5, 104, 100.0, 4.0, None),
        (0.5, 100, 100.0, 4.0, None),
        # theta 1: 100 / 4 = 25 samples; theta 0.1: 100 / (0.01 * 4) = 2500, of which 64 may double only.
        (1.0, 64, 100.0, 4.0, None),
        (1.0, 16, 100.0, 4.0, 32),
        (0.1, 64, 100.0, 4.0, 128),
        # At batch.max = 1024 nothing grows, just below it up to it.
        (0.1, 1024, 1e6, 1.0, None),
        (0.1, 1000, 1e6, 1.0, 1024),
        # A mean that is not above zero tells nothing.
        (0.5, 64, 100.0, 0.0, None),
        (0.5, 64, 100.0, -3.0, None),
        (0.5, 64, -1.0, 4.0, None),
    ]:
        decided = NormTestPolicy(theta).decide(measured(batch_size, variance, grad_sq))
        assert decided == (None if expected is None else Decision(batch_size=expected))


def test_norm_test_is_the_authors_with_their_estimate_of_the_gradient() -> None:
    """AdAdaGrad, tests.py: norm_test is ceil(variance_one_norm / (eta^2 batch_grad_norm_squared)), if that is more.

    The same figures with |gbar|^2 in place of G2: 12 / (0.25 * 0.5) = 96, 12 / (0.01 * 0.5) = 2400, 12 / 0.5 = 24.
    """
    for eta, theirs in ((0.5, 96), (0.1, 2400), (1.0, 24)):
        ours = NormTestPolicy(eta).decide(measured(64, 12.0, 0.5))
        assert (ours.batch_size if ours else None) == (min(theirs, 128) if theirs > 64 else None)


def test_norm_test_with_the_unbiased_estimate_asks_for_more_than_with_one_batchs() -> None:
    """S = 64, |G|^2 = 1, B = 64: the mean of |gbar|^2 is 1 + 64 / 64 = 2. With theta = 0.9, S / (theta^2 2) = 39.5
    would do, as if the test held; 64 / 0.81 = 79.01 are needed.
    """
    assert NormTestPolicy(0.9).decide(measured(64, 64.0, 2.0)) is None
    assert NormTestPolicy(0.9).decide(measured(64, 64.0, 1.0)) == Decision(batch_size=80)


def test_norm_test_changes_the_batch_by_whole_micro_batches_upwards_only() -> None:
    assert NormTestPolicy().decide(measured(60, 15.5, 1.0)) == Decision(batch_size=64)  # 15.5 / 0.25 = 62
    assert NormTestPolicy().decide(measured(62, 15.75, 1.0, micro_batch=64)) == Decision(batch_size=64)  # 63
    assert NormTestPolicy().decide(measured(70, 17.75, 1.0, micro_batch=64)) == Decision(batch_size=128)  # 71
