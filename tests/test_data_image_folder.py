"""Images are read by folder, augmentation depends on the generator alone, and errors name the file."""

import sys

import numpy as np
import pytest
import torch

from kfuse.data import DataError, load_image_folder
from kfuse.data.images import IMAGENET_PIXELS, middle_square, random_box

Image = pytest.importorskip("PIL.Image")

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET_PIXELS)
COLOURS = {"blue": (0, 0, 200), "green": (0, 150, 0), "red": (250, 0, 0)}


def write_images(root, per_class=4, colours=COLOURS):
    for name, colour in colours.items():
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            suffix = [".png", ".JPG"][i % 2]
            Image.new("RGB", (20 + i, 30), colour).save(root / name / f"{i}{suffix}", quality=100)
    return root


def pixels(x):
    """Undo the normalisation: `[B, 3, H, W]` in 0..255."""
    return (x * STD + MEAN) * 255


def test_labels_follow_the_sorted_folder_names(tmp_path):
    split = load_image_folder(write_images(tmp_path), size=16, heldout=0.25)
    assert split.spec == {"input_shape": (3, 16, 16), "num_classes": 3, "classes": ("blue", "green", "red")}
    assert (len(split.train), len(split.heldout)) == (9, 3)
    seen = []
    for data in (split.train, split.heldout):
        x, y = data.fetch(np.arange(len(data)))
        assert x.shape == (len(data), 3, 16, 16)
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        expected = torch.tensor([COLOURS[split.spec["classes"][label]] for label in y]).view(-1, 3, 1, 1)
        # JPEG rounds colours by a few steps.
        torch.testing.assert_close(pixels(x), expected.expand_as(x).float(), atol=4, rtol=0)
        seen += data.files
    assert len(set(seen)) == 12


def test_train_and_val_folders_are_used_as_they_are(tmp_path):
    write_images(tmp_path / "train", per_class=3)
    write_images(tmp_path / "val", per_class=1, colours={"red": COLOURS["red"]} | {"blue": COLOURS["blue"]})
    split = load_image_folder(tmp_path, size=8)
    assert (len(split.train), len(split.heldout)) == (9, 2)
    assert split.heldout.fetch(np.arange(2))[1].tolist() == [0, 2]
    write_images(tmp_path / "val", per_class=1, colours={"violet": (90, 0, 90)})
    with pytest.raises(DataError, match=r"has classes that .*train has not: violet"):
        load_image_folder(tmp_path)


def test_without_augmentation_the_middle_square_is_kept(tmp_path):
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = np.arange(100, dtype=np.uint8).reshape(10, 10, 1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(wide).save(tmp_path / name / "wide.png")
    split = load_image_folder(tmp_path, size=10, heldout=0.5)
    x, _ = split.heldout.fetch(np.array([0]))
    torch.testing.assert_close(pixels(x)[0, 0], torch.arange(100.0).view(10, 10), atol=1e-3, rtol=0)
    assert middle_square(30, 10) == (10, 0, 20, 10)
    assert middle_square(10, 31) == (0, 10.5, 10, 20.5)


def test_grey_and_transparent_images_become_rgb(tmp_path):
    for name, mode in [("a", "L"), ("b", "RGBA")]:
        (tmp_path / name).mkdir()
        Image.new(mode, (9, 9), 77 if mode == "L" else (77, 77, 77, 255)).save(tmp_path / name / "x.png")
    split = load_image_folder(tmp_path, size=8, heldout=0.5)
    for data in (split.train, split.heldout):
        x, _ = data.fetch(np.array([0]))
        torch.testing.assert_close(pixels(x), torch.full((1, 3, 8, 8), 77.0), atol=1e-3, rtol=0)


def test_augmentation_comes_from_the_generator_alone(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(8):
            noise = np.random.default_rng(i).integers(0, 256, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / name / f"{i}.png")
    data = load_image_folder(tmp_path, size=12).train
    rows = np.arange(len(data))
    first, _ = data.fetch(rows, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    again, _ = data.fetch(rows, torch.Generator().manual_seed(5))
    other, _ = data.fetch(rows, torch.Generator().manual_seed(6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    plain, _ = data.fetch(rows)
    assert torch.equal(plain, data.fetch(rows)[0])
    assert not torch.equal(first, plain)


def test_images_are_mirrored_half_of_the_time(tmp_path):
    ramp = np.repeat(np.arange(0, 256, 8, dtype=np.uint8)[None, :, None], 32, axis=0).repeat(3, axis=2)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(ramp).save(tmp_path / name / "ramp.png")
    data = load_image_folder(tmp_path, size=8, heldout=0.5).train
    x, _ = data.fetch(np.zeros(100, dtype=np.int64), torch.Generator().manual_seed(0))
    mirrored = (x[:, 0, 0, 0] > x[:, 0, 0, -1]).sum().item()
    assert 30 < mirrored < 70  # 50 expected, standard deviation 5


def test_random_boxes_lie_in_the_image():
    draws = np.random.default_rng(0).random((500, 4))
    corners = np.array(np.meshgrid(*[[0.0, 1 - 2**-53]] * 4)).reshape(4, -1).T
    for width, height in [(64, 64), (300, 20), (3, 7)]:
        for draw in [*draws, *corners]:
            left, top, right, bottom = random_box(width, height, draw)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            assert (right - left) * (bottom - top) <= width * height * (1 + 1e-9)


def test_a_corrupt_image_is_named(tmp_path):
    root = write_images(tmp_path)
    whole = (root / "red" / "0.png").read_bytes()
    for damaged in (b"not an image", whole[: len(whole) // 2], b""):
        for file in (root / "red").iterdir():
            file.write_bytes(damaged)
        split = load_image_folder(root, size=8)
        red = [i for i, file in enumerate(split.train.files) if file.parent.name == "red"]
        with pytest.raises(DataError, match=r"red/\d\.\w+ cannot be decoded as an image"):
            split.train.fetch(np.array(red))


def test_unusable_folders_are_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"data\.path=FOLDER"):
        load_image_folder()
    with pytest.raises(DataError, match="is not a folder"):
        load_image_folder(tmp_path / "missing")
    with pytest.raises(DataError, match="has 0 class folders: at least 2"):
        load_image_folder(tmp_path)
    write_images(tmp_path, per_class=1)
    (tmp_path / ".cache").mkdir()  # hidden folders are no classes
    assert load_image_folder(tmp_path, size=8).spec["num_classes"] == 3
    (tmp_path / "zebra").mkdir()
    (tmp_path / "zebra" / "notes.txt").touch()
    with pytest.raises(DataError, match=r"zebra has no image: files must end in one of \.bmp"):
        load_image_folder(tmp_path)
    with pytest.raises(DataError, match="size=0"):
        load_image_folder(tmp_path, size=0)


def test_without_pillow_the_remedy_is_named(tmp_path, monkeypatch):
    write_images(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"pip install 'kfuse\[vision\]'"):
        load_image_folder(tmp_path)
