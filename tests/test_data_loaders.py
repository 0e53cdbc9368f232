"""CIFAR-10, image folders and text are read as published, augmented by the generator alone; other files are refused."""

import numpy as np
import pytest
import torch

from kfuse.data import DataError, load_cifar10, load_image_folder, load_text
from kfuse.data.builtin import (
    CIFAR10_PIXELS,
    IMAGENET_PIXELS,
    STDLIB_BYTES,
    Cifar10,
    TextBlocks,
    crop_and_flip,
    stdlib_source,
)

Image = pytest.importorskip("PIL.Image")

COLOURS = {"blue": (0, 0, 200), "green": (0, 150, 0), "red": (250, 0, 0)}


def pixels(x, of=IMAGENET_PIXELS):
    """Undoes the normalisation: `[B, 3, H, W]` in 0..255."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in of)
    return (x * std + mean) * 255


def assert_augmented_by_the_generator_alone(data):
    rows = np.arange(len(data))
    first = data.fetch(rows, torch.Generator().manual_seed(5))[0]
    torch.manual_seed(1)
    assert torch.equal(first, data.fetch(rows, torch.Generator().manual_seed(5))[0])
    assert not torch.equal(first, data.fetch(rows, torch.Generator().manual_seed(6))[0])
    plain = data.fetch(rows)[0]
    assert torch.equal(plain, data.fetch(rows)[0]) and not torch.equal(first, plain)


def cifar10_files(folder):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    written = {name: (rng.integers(0, 256, (4, 3072), dtype=np.uint8), rng.integers(0, 10, 4)) for name in names}
    for name, (images, labels) in written.items():
        np.concatenate([labels[:, None].astype(np.uint8), images], axis=1).tofile(folder / name)
    return written


def test_cifar10_has_the_images_of_its_files(tmp_path):
    written = list(cifar10_files(tmp_path).values())
    split = load_cifar10(tmp_path)
    assert split.spec == {"input_shape": (3, 32, 32), "num_classes": 10}
    for data, expected in [(split.train, written[:5]), (split.heldout, written[5:])]:
        x, y = data.fetch(np.arange(4 * len(expected)))
        images, labels = (np.concatenate(parts) for parts in zip(*expected, strict=True))
        same = torch.from_numpy(images.reshape(-1, 3, 32, 32)).float()
        torch.testing.assert_close(pixels(x, CIFAR10_PIXELS), same, atol=1e-3, rtol=0)
        assert y.tolist() == labels.tolist() and len(data) == len(y)


def test_cifar10_is_augmented_by_the_generator_alone():
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    assert_augmented_by_the_generator_alone(Cifar10(images, torch.arange(64), augment=True))
    still = Cifar10(images, torch.arange(64), augment=False)
    assert torch.equal(still.fetch(np.arange(64), torch.Generator())[0], still.fetch(np.arange(64))[0])


def test_crops_are_shifts_of_the_padded_image_or_its_mirror():
    images = torch.randint(1, 256, (200, 2, 6, 5), dtype=torch.uint8)
    crops = crop_and_flip(images, torch.Generator().manual_seed(0), padding=1)
    kinds = set()
    for crop, source in zip(crops, torch.nn.functional.pad(images, (1,) * 4), strict=True):
        shifts = {(top, left): source[:, top : top + 6, left : left + 5] for top in range(3) for left in range(3)}
        windows = shifts | {(*shift, "mirrored"): window.flip(2) for shift, window in shifts.items()}
        [match] = [kind for kind, window in windows.items() if torch.equal(crop, window)]
        kinds.add(match)
    assert len(kinds) == 18  # every shift, mirrored and not, occurs in 200 images


def write_images(root, per_class=4):
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            Image.new("RGB", (20 + i, 30), colour).save(root / name / f"{i}{['.png', '.JPG'][i % 2]}", quality=100)
    return root


def write_pair(root, *images):
    """Two classes, each with these images."""
    for name in ("a", "b"):
        (root / name).mkdir()
        for i, image in enumerate(images):
            Image.fromarray(image).save(root / name / f"{i}.png")
    return root


def test_labels_follow_the_sorted_folder_names(tmp_path):
    split = load_image_folder(write_images(tmp_path), size=16, heldout=0.25)
    assert split.spec == {"input_shape": (3, 16, 16), "num_classes": 3, "classes": ("blue", "green", "red")}
    assert (len(split.train), len(split.heldout)) == (9, 3)
    for data in (split.train, split.heldout):
        x, y = data.fetch(np.arange(len(data)))
        assert x.shape == (len(data), 3, 16, 16) and (x.dtype, y.dtype) == (torch.float32, torch.int64)
        expected = torch.tensor([COLOURS[split.spec["classes"][label]] for label in y]).view(-1, 3, 1, 1)
        # JPEG rounds colours by a few steps.
        torch.testing.assert_close(pixels(x), expected.expand_as(x).float(), atol=4, rtol=0)
    assert len({*split.train.files, *split.heldout.files}) == 12


def test_train_and_val_folders_are_used_as_they_are_and_the_middle_square_without_augmentation(tmp_path):
    wide = np.zeros((10, 30), np.uint8)  # grey
    wide[:, 10:20] = np.arange(100, dtype=np.uint8).reshape(10, 10)
    for part, count in (("train", 3), ("val", 1)):
        (tmp_path / part).mkdir()
        write_pair(tmp_path / part, *[wide] * count)
    split = load_image_folder(tmp_path, size=10)
    assert (len(split.train), len(split.heldout)) == (6, 2)
    x, y = split.heldout.fetch(np.arange(2))
    torch.testing.assert_close(pixels(x)[0, 0], torch.arange(100.0).view(10, 10), atol=1e-3, rtol=0)
    assert y.tolist() == [0, 1]


def test_images_are_augmented_by_the_generator_alone_and_half_are_mirrored(tmp_path):
    ramp = np.repeat(np.arange(0, 256, 8, dtype=np.uint8)[None, :, None], 32, axis=0).repeat(3, axis=2)
    data = load_image_folder(write_pair(tmp_path, *[ramp] * 8), size=12).train
    assert_augmented_by_the_generator_alone(data)
    x, _ = data.fetch(np.zeros(100, dtype=np.int64), torch.Generator().manual_seed(0))
    assert 30 < (x[:, 0, 0, 0] > x[:, 0, 0, -1]).sum().item() < 70  # 50 expected, standard deviation 5


def test_what_is_damaged_missing_or_unusable_is_named(tmp_path):
    cifar10_files(cifar := tmp_path / "cifar")
    for content in (b"", bytes(3072), b"\x0a" + bytes(3072)):
        (cifar / "data_batch_4.bin").write_bytes(content)
        with pytest.raises(DataError, match=r"data_batch_4\.bin is no batch of CIFAR-10"):
            load_cifar10(cifar)
    root = write_images(tmp_path / "images", per_class=2)
    (root / ".cache").mkdir()  # hidden folders are no classes
    whole = (root / "red" / "0.png").read_bytes()
    for damaged in (b"not an image", whole[: len(whole) // 2], b""):
        for file in (root / "red").iterdir():
            file.write_bytes(damaged)
        data = load_image_folder(root, size=8).train
        with pytest.raises(DataError, match=r"red/\d\.\w+ cannot be decoded as an image"):
            data.fetch(np.array([i for i, file in enumerate(data.files) if file.parent.name == "red"]))
    (root / "zebra").mkdir()
    (root / "zebra" / "notes.txt").touch()
    (short := tmp_path / "short.txt").write_bytes(b"x" * 644)
    (latin := tmp_path / "latin.txt").write_bytes(b"x" * 700 + b"\xff" + b"x" * 700)
    for load, path, said in [
        (load_image_folder, cifar, "has 0 class folders: at least 2"),
        (load_image_folder, root, r"zebra has no image: files must end in one of \.bmp"),
        (load_text, short, "too short.*580 to train on and 64 held out"),
    ]:
        with pytest.raises(DataError, match=said):
            load(path)
    with pytest.raises(UnicodeDecodeError):
        load_text(latin)


def test_blocks_are_contiguous_and_targets_are_the_next_bytes():
    data = TextBlocks([np.arange(9, dtype=np.uint8), np.arange(9, 22, dtype=np.uint8)], 5)
    x, y = data.fetch(np.array([3, 0]))
    assert len(data) == 4 and x.dtype == y.dtype == torch.int64
    assert x.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert torch.equal(y, x + 1) and x.is_contiguous() and y.is_contiguous()
    for length, blocks in [(4, 0), (5, 0), (6, 1), (10, 1), (11, 2)]:  # a block counts only with its last target
        assert len(TextBlocks([np.zeros(length, dtype=np.uint8)], 5)) == blocks


def test_a_file_is_split_at_its_last_tenth(tmp_path):
    text = ("Ein Stück Text, über zwölf Bytes. " * 40).encode()
    file = tmp_path / "text.txt"
    file.write_bytes(text)
    split = load_text(file, block_size=8)
    [train], [held] = split.train.pieces, split.heldout.pieces
    assert train.tobytes() + held.tobytes() == text and len(held) == round(len(text) / 10)
    assert split.spec == {"vocab_size": 256, "block_size": 8}
    file.write_bytes(b"x" * 650)
    assert len(load_text(file, block_size=64).heldout) == 1  # the shortest one


def test_the_default_is_the_standard_library(tmp_path, monkeypatch):
    split = load_text()
    assert len(split.train.pieces[0]) + len(split.heldout.pieces[0]) == STDLIB_BYTES
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no source of the standard library"):
        load_text()
    for name in ["b/x.py", "a.py", "test/t.py", "site-packages/p.py", "b/tests/u.py", "b/notes.txt", "c.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name + "\n")
    assert stdlib_source() == b"a.py\nb/x.py\nc.py\n" and stdlib_source(limit=7) == b"a.py\nb/"
