"""Data in any supported form becomes a Dataset; anything else is refused with a clear error."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import kfuse as kf
from kfuse.data import DataError, Dataset, MapData, TensorData, as_dataset, load_digits
from kfuse.data.loading import read_bytes, split_indices


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


def test_tensor_data_needs_equal_lengths():
    for x, y in [((3, 2), (4,)), ((0, 2), (0,)), ((), ())]:
        with pytest.raises(ValueError, match="same first dimension"):
            TensorData(torch.zeros(x), torch.zeros(y))


def test_map_data_collates_samples():
    x, y = MapData(Squares()).fetch(ROWS)
    assert x.tolist() == [[3, 9], [0, 0], [3, 9]]
    assert y.tolist() == [1, 0, 1]
    assert y.dtype == torch.int64


def test_samples_that_cannot_become_a_loss_are_refused():
    for samples in [[torch.zeros(2)] * 3, [(1, 2, 3)] * 3]:
        model = torch.nn.Linear(2, 1)
        with pytest.raises(TypeError, match=r"\(input, target\) pair"):
            kf.fit(model, MapData(samples), kf.FusedSGD(model.parameters(), lr=0.1), batch_size=2)


def test_as_dataset_takes_what_torch_users_have():
    for obj, kind in [
        ((torch.zeros(4, 2), torch.zeros(4)), TensorData),
        (TensorDataset(torch.zeros(4, 2), torch.zeros(4)), TensorData),
        (Squares(), MapData),
        (Subset(Squares(), [0, 1, 2, 4]), MapData),
        ([(1.0, 0)] * 4, MapData),
    ]:
        data = as_dataset(obj)
        assert isinstance(data, kind)
        assert isinstance(data, Dataset)
        x, y = data.fetch(ROWS)
        assert len(x) == len(y) == 3


def test_a_pair_of_arrays_becomes_what_models_and_losses_take():
    for pair in [tuple, list]:
        x, y = np.linspace(0, 1, 8)[::-1].reshape(4, 2), np.array([2, 0, 1, 2], dtype=np.int32)
        got_x, got_y = as_dataset(pair([x, y])).fetch(ROWS)
        assert (got_x.dtype, got_y.dtype) == (torch.float32, torch.int64)
        assert torch.equal(got_x, torch.tensor(x[ROWS], dtype=torch.float32))
        assert got_y.tolist() == [2, 2, 2]
        model = torch.nn.Linear(2, 3)
        assert kf.fit(model, pair([x, y]), kf.FusedSGD(model.parameters(), lr=0.1), batch_size=2)["steps"] == 2


def test_arrays_of_bytes_and_bools_keep_their_type():
    pixels, masks = np.zeros((3, 2), dtype=np.uint8), np.ones(3, dtype=bool)
    got_x, got_y = as_dataset((pixels, masks)).fetch(np.array([0]))
    assert (got_x.dtype, got_y.dtype) == (torch.uint8, torch.bool)
    mixed = as_dataset([torch.zeros(3, dtype=torch.float64), masks])  # a tensor is taken as it is
    assert mixed.fetch(np.array([0]))[0].dtype == torch.float64


def test_a_list_of_two_tensors_is_a_pair():
    x, y = torch.randn(4, 2), torch.arange(4)
    got_x, got_y = as_dataset([x, y]).fetch(ROWS)
    assert torch.equal(got_x, x[[3, 0, 3]]) and got_y.tolist() == [3, 0, 3]


def test_a_pair_that_is_none_is_refused_in_one_line():
    for obj, kind, said in [
        ([torch.zeros(4), torch.zeros(5)], ValueError, "same first dimension"),
        ((np.zeros((4, 2)), np.zeros(5)), ValueError, "same first dimension"),
        ((torch.zeros(4),) * 3, TypeError, r"tuple of 3 tensors or arrays: a pair \(x, y\) has two"),
        ([torch.zeros(4)], TypeError, "list of 1 tensors"),
        ((np.array(["a", "b"]), np.zeros(2)), TypeError, "dtype <U1"),
        ((np.array([[1], None], dtype=object), np.zeros(2)), TypeError, "dtype object"),
    ]:
        with pytest.raises(kind, match=said) as caught:
            as_dataset(obj)
        assert "\n" not in str(caught.value)


def test_as_dataset_leaves_a_dataset_alone():
    data = TensorData(torch.zeros(2), torch.zeros(2))
    assert as_dataset(data) is data


def test_as_dataset_names_what_it_takes():
    for obj in [torch.zeros(4), np.zeros(4), {"x": 1}, "data.csv", Stream(), DataLoader(Squares()), None, 7]:
        with pytest.raises(TypeError, match=rf"{type(obj).__name__} is not a data set: pass a pair of tensors"):
            as_dataset(obj)


def test_split_is_a_partition_that_depends_on_the_seed():
    train, held = split_indices(30, 0.1, seed=1)
    assert len(held) == 3
    assert sorted([*train, *held]) == list(range(30))
    assert set(held) != set(split_indices(30, 0.1, seed=2)[1])


def test_split_needs_samples_on_both_sides():
    for heldout in [0.0, 1.0, -0.5, 0.999]:
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


def test_digits_are_those_of_scikit_learn(monkeypatch):
    split = load_digits()
    monkeypatch.setattr(Path, "is_file", lambda path: False)  # as if scikit-learn kept them in another place
    other = load_digits()
    for part, same in ((split.train, other.train), (split.heldout, other.heldout)):
        assert torch.equal(part.x, same.x) and torch.equal(part.y, same.y)


def test_digits_without_scikit_learn_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
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
