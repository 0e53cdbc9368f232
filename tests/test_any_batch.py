"""Batches of any structure: dictionaries, tuples, dataclasses; models called by position and by keyword."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from problems import network, problem, update
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import kfuse as kf
from kfuse.data import Dataset, TensorData, as_dataset
from kfuse.data.dataset import to_device

CPU = torch.device("cpu")


@dataclass
class Sample:
    """What a user's collate function may return."""

    image: Tensor
    label: Tensor
    source: str = "here"


class Labelled(nn.Module):
    """Called as Hugging Face's models are: the labels are an argument, and the output has the loss."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.net, self.as_dict = network(), as_dict

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(inputs)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.as_dict else namedtuple("Output", "loss logits")(loss, logits)


def assert_as_plain_torch(params: Iterable[Tensor]) -> None:
    """After four full-batch steps over `problem()`."""
    model, (x, y) = network(), problem()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    torch.testing.assert_close([*params], [*model.parameters()], rtol=1e-5, atol=1e-6)


def fit(model: nn.Module, data: Any, **arguments: Any) -> dict[str, Any]:
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    summary = kf.fit(model, data, opt, epochs=4, batch_size=64, micro_batch=10, **arguments)
    assert summary is not None
    return summary


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_model_may_compute_the_loss_itself(as_dict: bool) -> None:
    x, y = problem()
    ours = Labelled(as_dict)
    summary = fit(ours, {"inputs": x, "labels": y}, heldout={"inputs": x, "labels": y})
    assert_as_plain_torch(ours.parameters())
    assert summary["heldout_loss"] == pytest.approx(F.cross_entropy(ours.net(x), y).item(), rel=1e-5)
    assert summary["heldout_accuracy"] is None


class Rows:
    """A map-style data set of dictionaries, as datasets of Hugging Face have."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y = problem()
        return {"inputs": x[i], "labels": int(y[i]), "name": f"row {i}"}


def step_of_rows(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    assert batch["name"] and all(name.startswith("row ") for name in batch["name"])
    return F.cross_entropy(model(batch["inputs"]), batch["labels"])


@pytest.mark.parametrize("workers", [1, 2])
@on_workers()
def test_dictionaries_with_other_values_go_to_a_step_function(workers: int) -> None:
    model = network()
    fit(model, Rows(), step_fn=step_of_rows, heldout=Rows())
    assert_as_plain_torch(model.parameters())


class Structs(Dataset):
    """A data set of kfuse's kind, whose batches are dataclasses."""

    def __len__(self) -> int:
        return 64

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> Sample:
        x, y = problem()
        return Sample(x[indices], y[indices])


@pytest.mark.parametrize("data", [Structs(), dict(zip(("image", "label"), problem(), strict=True))])
def test_the_loader_yields_the_structure_of_the_data_set(data: Any) -> None:
    ours = network()
    opt = kf.FusedSGD(ours.parameters(), lr=0.5)
    for step in kf.DataLoader(ours, data, opt, batch_size=64, micro_batch=10, epochs=4):
        for batch in step:
            got = vars(batch) if isinstance(batch, Sample) else batch
            F.cross_entropy(ours(got["image"]), got["label"]).backward()
        update(opt)
    assert_as_plain_torch(ours.parameters())


@dataclass
class Columns:
    """All samples."""

    x: Tensor
    y: dict[str, Tensor]


def test_nested_tensors_are_samples() -> None:
    x, y = torch.randn(5, 2), torch.arange(5)
    rows = np.array([4, 1])
    for nested in (Columns(x, {"y": y}), {"x": x, "y": {"y": y}}, {"x": x.numpy(), "y": {"y": y}}):
        data = as_dataset(nested)
        assert isinstance(data, TensorData) and len(data) == 5
        got = data.fetch(rows)
        got = vars(got) if isinstance(got, Columns) else got
        assert torch.equal(got["x"], x[[4, 1]]) and got["y"]["y"].tolist() == [4, 1]
    for samples in ([(x, y), (x, y)], ((x, 1), (x, 2)), ((x, y), (x[:2], y[:2]))):
        assert not isinstance(as_dataset(samples), TensorData)  # two samples
    with pytest.raises(ValueError, match=r"\(5, 2\), \(4,\): must have the same first dimension"):
        as_dataset({"x": x, "y": y[:4]})
    uneven = torch.nested.nested_tensor([torch.ones(1, 2)] * 5)  # has no rows to be taken at once
    assert as_dataset(TensorDataset(x, uneven)).fetch(rows)[1].shape == (2, 1, 2)


@dataclass
class Scaled:
    """Its class changes what it is given; its field `to` is no method."""

    to: Tensor

    def __post_init__(self) -> None:
        self.to, self.length = self.to * 2, len(self.to)


class Priced:
    to = "EUR"


def odd_batch(samples: list[int]) -> list[Any]:
    rows = [torch.ones(1 + i % 2, 3) for i in samples]
    return [
        {"x": torch.ones(len(samples), 1), "sparse": torch.eye(3).to_sparse()},
        [torch.nested.nested_tensor(rows, layout=torch.jagged), torch.Size([1, 2])],
        (Scaled(torch.arange(3.0)), Priced(), np.array([None, "text"], dtype=object), pack_sequence([torch.ones(2)])),
    ][: 2 + len(samples) % 2]


def told(part: Any) -> Any:
    """The values of a batch's part, with the types of what holds them."""
    if isinstance(part, (dict, list, tuple)):
        values = part.items() if isinstance(part, dict) else part
        return type(part), [told(value) for value in values]
    if isinstance(part, Tensor) and part.layout is torch.jagged:
        return torch.jagged, told(list(part.unbind()))
    return type(part) if isinstance(part, Priced) else repr(vars(part) if isinstance(part, Scaled) else part)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_may_hold_what_torchs_loader_hands_over(workers: int) -> None:
    model = nn.Linear(1, 1)
    opt, found = kf.FusedSGD(model.parameters(), lr=0.1), list[Any]()
    how: dict[str, Any] = {"batch_size": 5, "micro_batch": 3, "collate_fn": odd_batch, "num_workers": workers}
    for step in kf.DataLoader(model, [1] * 5, opt, **how):  # micro-batches of three samples and of two
        for batch in step:
            found.append(told(batch))
            model(batch[0]["x"]).sum().backward()
        opt.step()
    assert found == [told(batch) for batch in DataLoader([1] * 5, 3, collate_fn=odd_batch)]


def test_what_torch_keeps_on_the_cpu_stays_there() -> None:
    moved = to_device({"a": pack_sequence([torch.ones(2)])}, torch.device("meta"))["a"]
    assert moved.data.is_meta and not moved.batch_sizes.is_meta


def test_moving_a_batch_keeps_its_structure_and_its_other_values() -> None:
    point = namedtuple("point", "x y")
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"a": [torch.ones(2), "text"], "b": point(torch.ones(1), None), "c": Sample(torch.ones(3), torch.ones(1))}
    moved = to_device({**batch, "p": packed}, CPU)
    assert moved["a"][1] == "text" and moved["b"].y is None and isinstance(moved["b"], point)
    assert (
        isinstance(moved["c"], Sample) and moved["c"].source == "here" and torch.equal(moved["c"].image, torch.ones(3))
    )
    assert isinstance(moved["p"], PackedSequence)
    meta = to_device(Sample(torch.ones(2), torch.ones(2)), torch.device("meta"))
    assert meta.image.device.type == meta.label.device.type == "meta"


def clipped_by_hand() -> list[float]:
    """Steps of one sample: one of two workers has none."""
    kf.init()
    model, x = torch.nn.Linear(3, 1, bias=False), torch.arange(12.0).view(4, 3)
    torch.nn.init.ones_(model.weight)
    opt = kf.FusedSGD(model.parameters(), lr=1.0)
    for step in kf.DataLoader(model, TensorDataset(x), opt, batch_size=1, micro_batch=1, steps=1):
        for (batch,) in step:
            model(batch).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return [float(w) for w in model.weight.detach().flatten()]


def test_a_worker_without_a_micro_batch_clips_by_hand_as_the_others() -> None:
    one, other = run_workers(2, clipped_by_hand)
    assert one == other and torch.tensor(one).sub(1).norm() == pytest.approx(0.5, rel=1e-4)
