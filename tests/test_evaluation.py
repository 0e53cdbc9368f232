"""Held-out loss and accuracy are correct, or None where they are unknown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.group import Group
from kfuse.data import TensorData
from kfuse.train.evaluation import evaluate
from kfuse.train.loss import Objective


class Fixed(nn.Module):
    """Returns its input as a model's output, or a part of it."""

    def __init__(self, pick: Any) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor) -> Any:
        return self.pick(x)


def binary_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.reshape(-1), target.float().reshape(-1))


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda x: x[:, 0], None),  # one score a sample: no argmax over the batch
        (lambda x: x[:, :1], None),  # one column: its argmax is always 0
        (lambda x: torch.stack([-x[:, 0], x[:, 0]], 1), 1.0),
    ],
)
def test_accuracy_needs_a_score_for_each_class(pick: Any, expected: float | None) -> None:
    target = torch.arange(300) % 2
    x = (2.0 * target - 1.0).unsqueeze(1)  # a perfect classifier's scores
    loss = F.cross_entropy if expected is not None else binary_loss
    result = evaluate(Fixed(pick), TensorData(x, target), Objective(loss), Group())
    assert result.accuracy == expected
    assert result.loss < 0.4


def test_accuracy_of_sequences_counts_tokens() -> None:
    target = torch.arange(40).view(10, 4) % 3
    scores = F.one_hot(target, 3).float()
    scores[:5, 0] = torch.tensor([0.0, 0.0, 5.0]).where(target[:5, :1] != 2, torch.tensor([5.0, 0.0, 0.0]))
    data = TensorData(torch.arange(10), target)
    model = Fixed(lambda index: scores[index])
    result = evaluate(model, data, Objective(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())), Group())
    assert result.accuracy == pytest.approx(35 / 40)


def test_a_model_with_dict_outputs_is_trained_and_evaluated() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(x)}

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)

    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    net = Net()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    summary = kf.fit(net, (x, y), opt, batch_size=8, loss_fn=loss, heldout=(x, y))  # type: ignore[arg-type]
    assert summary is not None and summary["eval_accuracy"] is None
    assert summary["eval_loss"] == pytest.approx(loss(net(x), y).item(), rel=1e-5)
