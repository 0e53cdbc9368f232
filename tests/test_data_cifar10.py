"""CIFAR-10 is read from both published formats, and other files are refused."""

import pickle

import numpy as np
import pytest
import torch

from kfuse.data import DataError, load_cifar10
from kfuse.data.images import CIFAR10_PIXELS, Cifar10, crop_and_flip

NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
ROWS = 4
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in CIFAR10_PIXELS)


def batches():
    rng = np.random.default_rng(0)
    return {name: (rng.integers(0, 256, (ROWS, 3072), dtype=np.uint8), rng.integers(0, 10, ROWS)) for name in NAMES}


def write_binary(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in batches().items():
        records = np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_pickle(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in batches().items():
        batch = {b"batch_label": b"training batch", b"labels": labels.tolist(), b"data": pixels}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("write", [write_binary, write_pickle])
@pytest.mark.parametrize("nested", [False, True])
def test_both_formats_give_the_images_written(tmp_path, write, nested):
    subfolder = "cifar-10-batches-bin" if write is write_binary else "cifar-10-batches-py"
    write(tmp_path / subfolder if nested else tmp_path)
    split = load_cifar10(tmp_path)
    assert split.spec == {"input_shape": (3, 32, 32), "num_classes": 10}
    assert (len(split.train), len(split.heldout)) == (5 * ROWS, ROWS)
    expected = batches()
    for data, names in [(split.train, NAMES[:5]), (split.heldout, NAMES[5:])]:
        x, y = data.fetch(np.arange(len(data)))
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        pixels = np.concatenate([expected[name][0] for name in names]).reshape(-1, 3, 32, 32)
        torch.testing.assert_close((x * STD + MEAN) * 255, torch.from_numpy(pixels).float(), atol=1e-3, rtol=0)
        assert y.tolist() == [label for name in names for label in expected[name][1]]


def test_the_files_of_python_2_can_be_read(tmp_path):
    """As published: text is bytes, and NumPy's internals are named as before version 2."""
    write_pickle(tmp_path)
    pixels, labels = batches()["data_batch_1"]
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
    dtype = b"cnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntb"
    state = b"(I1\n(I%d\nI3072\nt" % ROWS + dtype + b"I00\nT" + pixels.nbytes.to_bytes(4, "little")
    content = (
        b"\x80\x02}(U\x04data"
        + array
        + state
        + pixels.tobytes()
        + b"tbU\x06labels]("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eu."
    )
    (tmp_path / "data_batch_1").write_bytes(content)
    x, y = load_cifar10(tmp_path).train.fetch(np.arange(ROWS))
    assert y.tolist() == labels.tolist()
    restored = ((x * STD + MEAN) * 255).round().to(torch.uint8)
    assert np.array_equal(restored.numpy().reshape(ROWS, 3072), pixels)


class Malicious:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_a_pickle_cannot_run_code(tmp_path):
    write_pickle(tmp_path)
    target = tmp_path / "created"
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps({b"data": Malicious(target), b"labels": []}))
    with pytest.raises(DataError, match=r"data_batch_2 is not a pickled batch.*it asks for .*open"):
        load_cifar10(tmp_path)
    assert not target.exists()


PIXELS, LABELS = np.zeros((2, 3072), np.uint8), [1, 2]


def test_a_pickle_that_is_not_a_batch(tmp_path):
    for batch, message in [
        ({b"labels": LABELS}, "KeyError.*data"),
        ([1, 2], "not a pickled batch"),
        ({b"data": PIXELS.astype(np.int32), b"labels": LABELS}, "pixels int32"),
        ({b"data": PIXELS[:, :100], b"labels": LABELS}, r"uint8\[2, 100\].*must be uint8\[N, 3072\]"),
        ({b"data": PIXELS, b"labels": [1]}, "for 2 images"),
        ({b"data": PIXELS, b"labels": [1, 10]}, "labels from 1 to 10"),
        ({b"data": PIXELS, b"labels": [0.5, 1.5]}, "labels float64"),
        ({b"data": PIXELS[:0], b"labels": []}, "for 0 images"),
    ]:
        write_pickle(tmp_path)
        (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=4))
        with pytest.raises(DataError, match=message) as caught:
            load_cifar10(tmp_path)
        assert str(tmp_path / "test_batch") in str(caught.value)


def test_damaged_files_are_named(tmp_path):
    write_pickle(tmp_path / "py")
    whole = (tmp_path / "py" / "data_batch_3").read_bytes()
    (tmp_path / "py" / "data_batch_3").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="data_batch_3 is not a pickled batch"):
        load_cifar10(tmp_path / "py")
    write_binary(tmp_path / "bin")
    for content, message in [
        (b"", "data_batch_4.bin is empty"),
        (bytes(3072), "data_batch_4.bin has 3072 bytes: it must be whole records of 3073 bytes"),
        (b"\x0a" + bytes(3072), "data_batch_4.bin has labels from 10 to 10"),
    ]:
        (tmp_path / "bin" / "data_batch_4.bin").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_cifar10(tmp_path / "bin")


def test_missing_files_are_named(tmp_path):
    write_binary(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_2\.bin, test_batch\.bin missing"):
        load_cifar10(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no CIFAR-10 in it: data_batch_1\.bin"):
        load_cifar10(tmp_path / "empty")
    with pytest.raises(DataError, match="is not a folder"):
        load_cifar10(tmp_path / "missing")
    with pytest.raises(DataError, match=r"data\.path=FOLDER"):
        load_cifar10()


def test_augmentation_comes_from_the_generator_alone():
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    data = Cifar10(images, torch.arange(64), augment=True)
    rows = np.arange(64)
    first, _ = data.fetch(rows, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    again, _ = data.fetch(rows, torch.Generator().manual_seed(5))
    other, _ = data.fetch(rows, torch.Generator().manual_seed(6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    plain, _ = data.fetch(rows)
    unaugmented, _ = Cifar10(images, torch.arange(64), augment=False).fetch(rows, torch.Generator())
    assert torch.equal(plain, unaugmented)
    assert not torch.equal(first, plain)


def test_crops_are_shifts_of_the_padded_image_or_its_mirror():
    images = torch.randint(1, 256, (200, 2, 6, 5), dtype=torch.uint8)
    crops = crop_and_flip(images, torch.Generator().manual_seed(0), padding=1)
    padded = torch.nn.functional.pad(images, (1,) * 4)
    kinds = set()
    for crop, source in zip(crops, padded, strict=True):
        matches = [
            (top, left, flip)
            for top in range(3)
            for left in range(3)
            for flip in (False, True)
            for window in [source[:, top : top + 6, left : left + 5]]
            if torch.equal(crop, window.flip(2) if flip else window)
        ]
        assert len(matches) == 1
        kinds.update(matches)
    assert len(kinds) == 18  # every shift, mirrored and not, occurs in 200 images
