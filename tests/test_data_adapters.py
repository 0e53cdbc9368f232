"""What users hand in becomes a Dataset, or a clear error."""

import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from kfuse.data import DataError, Dataset, MapData, TensorData, as_dataset, load_digits
from kfuse.data.base import read_bytes, split_indices


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return torch.tensor([i, i * i], dtype=torch.float32), i % 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


ROWS = np.array([3, 0, 3])


def test_tensor_data_returns_the_rows_asked_for():
    x, y = torch.randn(4, 2), torch.arange(4)
    data = TensorData(x, y)
    got_x, got_y = data.fetch(ROWS)
    assert len(data) == 4
    assert torch.equal(got_x, x[[3, 0, 3]])
    assert got_y.tolist() == [3, 0, 3]


@pytest.mark.parametrize("x, y", [((3, 2), (4,)), ((0, 2), (0,)), ((), ())])
def test_tensor_data_needs_equal_lengths(x, y):
    with pytest.raises(ValueError, match="same first dimension"):
        TensorData(torch.zeros(x), torch.zeros(y))


def test_map_data_collates_samples():
    x, y = MapData(Squares()).fetch(ROWS)
    assert x.tolist() == [[3, 9], [0, 0], [3, 9]]
    assert y.tolist() == [1, 0, 1]
    assert y.dtype == torch.int64


@pytest.mark.parametrize("samples", [[torch.zeros(2)] * 3, [(1, 2, 3)] * 3, [{"x": 1}] * 3, [(1, {"y": 2})] * 3])
def test_map_data_needs_pairs(samples):
    with pytest.raises(TypeError, match=r"\(input, target\) pair"):
        MapData(samples).fetch(np.array([0, 1, 2]))


@pytest.mark.parametrize(
    "obj, kind",
    [
        ((torch.zeros(4, 2), torch.zeros(4)), TensorData),
        (TensorDataset(torch.zeros(4, 2), torch.zeros(4)), TensorData),
        (Squares(), MapData),
        (Subset(Squares(), [0, 1, 2, 4]), MapData),
        ([(1.0, 0)] * 4, MapData),
    ],
)
def test_as_dataset_takes_what_torch_users_have(obj, kind):
    data = as_dataset(obj)
    assert isinstance(data, kind)
    assert isinstance(data, Dataset)
    x, y = data.fetch(ROWS)
    assert len(x) == len(y) == 3


def test_as_dataset_leaves_a_dataset_alone():
    data = TensorData(torch.zeros(2), torch.zeros(2))
    assert as_dataset(data) is data


@pytest.mark.parametrize(
    "obj",
    [torch.zeros(4), np.zeros(4), {"x": 1}, "data.csv", Stream(), DataLoader(Squares()), None, 7],
    ids=lambda obj: type(obj).__name__,
)
def test_as_dataset_names_what_it_takes(obj):
    with pytest.raises(TypeError, match=rf"{type(obj).__name__} is not a data set: pass a pair of tensors"):
        as_dataset(obj)


def test_split_is_a_partition_that_depends_on_the_seed():
    train, held = split_indices(30, 0.1, seed=1)
    assert len(held) == 3
    assert sorted([*train, *held]) == list(range(30))
    assert set(held) != set(split_indices(30, 0.1, seed=2)[1])


@pytest.mark.parametrize("heldout", [0.0, 1.0, -0.5, 0.999])
def test_split_needs_samples_on_both_sides(heldout):
    with pytest.raises(DataError, match=f"heldout={heldout}"):
        split_indices(10, heldout, seed=0)


def test_digits_are_the_published_ones():
    split = load_digits()
    assert (len(split.train), len(split.heldout)) == (1437, 360)
    assert split.spec == {"input_shape": (1, 8, 8), "num_classes": 10}
    x, y = split.train.fetch(np.arange(1437))
    held_x, held_y = split.heldout.fetch(np.arange(360))
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert x.shape == (1437, 1, 8, 8)
    everything = torch.cat([x, held_x])
    assert (everything.min(), everything.max()) == (0.0, 1.0)
    # All 1797 images once: the published pixels sum to 561718 sixteenths, and the classes have these sizes.
    assert (everything.double() * 16).sum().item() == 561718
    assert torch.cat([y, held_y]).bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(load_digits().train.fetch(np.arange(5))[0], x[:5])


def test_digits_without_scikit_learn_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        load_digits()


def test_reading_bytes_names_the_file(tmp_path):
    (tmp_path / "empty").touch()
    for name, message in [
        ("missing", "does not exist"),
        (".", "is a folder"),
        ("empty", "is empty"),
        ("empty/below", "cannot be read: Not a directory"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            read_bytes(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
