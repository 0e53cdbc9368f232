"""Data in any supported form becomes a Dataset; anything else is refused with a clear error."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

import kfuse as kf
from kfuse.data import DataError, Dataset, MapData, as_dataset, load_digits
from kfuse.data.builtin import split_indices


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return torch.tensor([i, i * i], dtype=torch.float32), i % 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


ROWS = np.array([3, 0, 3])


def test_as_dataset_takes_what_torch_users_have():
    x, y = torch.randn(4, 2), torch.arange(4)
    for obj in [
        (x, y),
        [x, y],
        TensorDataset(x, y),
        list(zip(x, y, strict=True)),
        Subset(TensorDataset(x, y), range(4)),
    ]:
        data = as_dataset(obj)
        assert isinstance(data, Dataset) and len(data) == 4
        got_x, got_y = data.fetch(ROWS)
        assert torch.equal(got_x, x[[3, 0, 3]]) and got_y.tolist() == [3, 0, 3]
    assert as_dataset(data) is data
    got_x, got_y = MapData(Squares()).fetch(ROWS)
    assert got_x.tolist() == [[3, 9], [0, 0], [3, 9]] and got_y.tolist() == [1, 0, 1] and got_y.dtype == torch.int64


def test_arrays_become_what_models_and_losses_take():
    for pair in [tuple, list]:
        x, y = np.linspace(0, 1, 8)[::-1].reshape(4, 2), np.array([2, 0, 1, 2], dtype=np.int32)
        got_x, got_y = as_dataset(pair([x, y])).fetch(ROWS)
        assert torch.equal(got_x, torch.tensor(x[ROWS], dtype=torch.float32))
        assert got_y.tolist() == [2, 2, 2] and got_y.dtype == torch.int64
        model = torch.nn.Linear(2, 3)
        assert kf.fit(model, pair([x, y]), kf.FusedSGD(model.parameters(), lr=0.1), batch_size=2)["steps"] == 2
    # Bytes and bools keep their type, and a tensor is taken as it is.
    pixels, masks = np.zeros((3, 2), dtype=np.uint8), np.ones(3, dtype=bool)
    assert [part.dtype for part in as_dataset((pixels, masks)).fetch(ROWS % 3)] == [torch.uint8, torch.bool]
    assert as_dataset([torch.zeros(3, dtype=torch.float64), masks]).fetch(ROWS % 3)[0].dtype == torch.float64


def test_other_data_is_refused_in_one_line():
    for obj, kind, said in [
        ((np.zeros((4, 2)), np.zeros(5)), ValueError, "same first dimension"),
        ((torch.zeros(()), torch.zeros(())), ValueError, "same first dimension, at least 1"),
        ((torch.zeros(4),) * 3, TypeError, r"tuple of 3 tensors or arrays: a pair \(x, y\) has two"),
        *(
            (other, TypeError, rf"{type(other).__name__} is not a data set: pass a pair of tensors")
            for other in [torch.zeros(4), {"x": 1}, "data.csv", Stream(), None]
        ),
    ]:
        with pytest.raises(kind, match=said) as caught:
            as_dataset(obj)
        assert "\n" not in str(caught.value)


def test_split_is_a_partition_that_depends_on_the_seed():
    train, held = split_indices(30, 0.1, seed=1)
    assert len(held) == 3 and sorted([*train, *held]) == list(range(30))
    assert set(held) != set(split_indices(30, 0.1, seed=2)[1])
    for heldout in [0.0, 1.0, -0.5, 0.999]:
        with pytest.raises(DataError, match=f"heldout={heldout}"):
            split_indices(10, heldout, seed=0)


def all_of(data):
    return data.fetch(np.arange(len(data)))


def test_digits_are_the_published_ones(monkeypatch):
    split = load_digits()
    assert (len(split.train), len(split.heldout)) == (1437, 360)
    assert split.spec == {"input_shape": (1, 8, 8), "num_classes": 10}
    x, y = (torch.cat(parts) for parts in zip(all_of(split.train), all_of(split.heldout), strict=True))
    assert (x.shape, x.dtype, y.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (x.min(), x.max()) == (0.0, 1.0)
    # All 1797 images once: the published pixels sum to 561718 sixteenths, and the classes have these sizes.
    assert (x.double() * 16).sum().item() == 561718
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    monkeypatch.setattr(Path, "is_file", lambda path: False)  # as if scikit-learn kept them in another place
    assert all(map(torch.equal, all_of(split.train), all_of(load_digits().train)))
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        load_digits()


def test_a_data_set_has_an_order_of_its_own() -> None:
    class Turned(Dataset):
        def __init__(self) -> None:
            self.used: list[int] = []

        def __len__(self) -> int:
            return 5

        def order(self, epoch: int) -> np.ndarray:
            return np.roll(np.arange(5), epoch)

        def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> torch.Tensor:
            self.used += indices.tolist()
            return torch.ones(len(indices), 1)

    model, data = torch.nn.Linear(1, 1), Turned()
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    kf.fit(model, data, opt, step_fn=lambda model, x: model(x).mean(), batch_size=2, micro_batch=1, epochs=2)
    assert data.used == [0, 1, 2, 3, 4, 4, 0, 1, 2, 3]
