"""Losses are means over samples, the same for classes and sequences, and never broadcast silently."""

import math

import pytest
import torch
import torch.nn.functional as F

from kfuse.train.loss import default_loss


def test_cross_entropy_of_classes_and_of_sequences():
    logits = torch.randn(4, 6, 10)
    target = torch.randint(0, 10, (4, 6))
    by_hand = -logits.double().log_softmax(-1).gather(-1, target[..., None]).mean()
    torch.testing.assert_close(default_loss(logits, target).double(), by_hand, rtol=1e-5, atol=0)
    rows = default_loss(logits.flatten(0, 1), target.flatten())
    assert torch.equal(rows, default_loss(logits, target))


def test_known_answer():
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [math.log(3), 0.0]])
    loss = default_loss(logits, torch.tensor([1, 0, 0]))
    assert loss.item() == pytest.approx((2 * math.log(4 / 3) + math.log(4)) / 3)
    sequence_loss = default_loss(logits.expand(2, 3, 2), torch.tensor([[1, 0, 0]] * 2))
    assert sequence_loss.item() == pytest.approx(loss.item())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integer_is_a_class(dtype):
    logits = torch.randn(5, 3)
    target = torch.tensor([0, 2, 1, 1, 0], dtype=dtype)
    assert torch.equal(default_loss(logits, target), F.cross_entropy(logits, target.long()))


def test_floating_targets_are_regressed():
    output, target = torch.randn(5, 2), torch.randn(5, 2, dtype=torch.float64)
    loss = default_loss(output, target)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(((output - target) ** 2).mean().item(), rel=1e-5)


def test_low_precision_outputs_are_compared_in_fp32():
    logits = torch.randn(8, 100).bfloat16().requires_grad_()
    target = torch.arange(8)
    loss = default_loss(logits, target)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(logits.float(), target))
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "output, target, message",
    [
        (torch.zeros(4, 1), torch.zeros(4), "needs equal shapes"),
        (torch.zeros(4, 10), torch.zeros(5, dtype=torch.int64), "one dimension of classes"),
        (torch.zeros(4, 10), torch.zeros(4, 6, dtype=torch.int64), "one dimension of classes"),
        (torch.zeros(4, 10), torch.zeros(4, dtype=torch.bool), "torch.bool"),
    ],
)
def test_shapes_and_types_that_do_not_match_are_refused(output, target, message):
    with pytest.raises(ValueError, match=message):
        default_loss(output, target)
