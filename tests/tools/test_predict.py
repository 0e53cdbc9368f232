"""A trained model used: by `kfuse predict`, and by the lines of docs/train.md, which need torch alone."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kfuse.data import DataError, load_csv, load_image_folder, load_text
from kfuse.data.builtin import split_indices
from kfuse.models import GPT, MLP, ConvNet

RED, GREEN = np.array([150, 90, 90]), np.array([90, 150, 90])


def kfuse(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "kfuse", *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(folder: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains, and returns summary.json and model.json. Without best.pt `kfuse predict` takes the last model."""
    kfuse(*words, "policy=none", "workers.max=1", "observe.sinks=[]", f"hydra.run.dir={folder}")
    (folder / "best.pt").unlink()
    summary, about = (json.loads((folder / name).read_text()) for name in ("summary.json", "model.json"))
    return summary, about


def predicted(folder: Path, *files: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(kfuse("predict", str(folder), *map(str, files))))]


def test_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, colour in (("cat", RED), ("dog", GREEN)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(30):
            pixels = np.clip(rng.normal(0, 60, (20, 26, 3)) + colour, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    words = "data=image_folder", f"data.path={tmp_path / 'images'}", "data.size=16", "data.heldout=0.4"
    summary, about = trained(tmp_path / "run", *words, "model=convnet", "model.width=4", "train.epochs=2")
    files = load_image_folder(tmp_path / "images", size=16, heldout=0.4).heldout.files
    model = ConvNet(about["model"]["input_shape"], about["model"]["num_classes"], width=4)
    model.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True))
    model.eval()
    how, right = about["input"], 0
    mean, std = (torch.tensor(how[name]).view(3, 1, 1) for name in ("mean", "std"))
    for file, row in zip(files, predicted(tmp_path / "run", *files), strict=True):
        with Image.open(file) as image:
            side = min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box, size = (left, top, left + side, top + side), (how["size"], how["size"])
            image = image.convert("RGB").resize(size, Image.Resampling.BILINEAR, box)
        x = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std
        named = about["classes"][int(model(x[None]).argmax())]
        assert row["class"] == named
        right += named == file.parent.name
    assert right / len(files) == pytest.approx(summary["heldout_accuracy"], abs=1e-12)


def test_text(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat, the dog sat on the log. " * 200)
    words = "data=text", f"data.path={book}", "data.block_size=16", "model=gpt", "model.layers=1", "model.width=16"
    summary, about = trained(tmp_path / "run", *words, "train.steps=30")
    model = GPT(**{name: value for name, value in about["model"].items() if name != "_target_"})
    model.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True))
    held = load_text(book, block_size=16).heldout
    x, y = held.fetch(np.arange(len(held)))
    right = (model.eval()(x).argmax(-1) == y).float().mean()
    assert float(right) == pytest.approx(summary["heldout_accuracy"], abs=1e-6)
    (tmp_path / "held.txt").write_bytes(held.pieces[0].tobytes())
    [row] = predicted(tmp_path / "run", tmp_path / "held.txt")
    assert float(row["accuracy"]) == pytest.approx(summary["heldout_accuracy"], abs=1e-4)
    assert float(row["loss"]) == pytest.approx(summary["heldout_loss"], abs=1e-4)


@pytest.mark.parametrize("target", ["colour", "price"])
def test_a_table(target: str, tmp_path: Path) -> None:
    """A number that is missing counts as the mean. A word that training has not seen is none of those that it has."""
    rng = np.random.default_rng(1)
    table = tmp_path / "table.csv"
    with table.open("w") as file:
        write = csv.writer(file).writerow
        write(("width", "shop", "colour", "price"))
        for _ in range(200):
            width, shop = rng.normal(5, 3), rng.choice(["01", "02", "x1"])
            red = width + 3 * (shop == "01") > 6
            write((f"{width:.3f}" if rng.random() < 0.9 else "", shop, "red" if red else "blue", f"{2 * width:.3f}"))
    words = "data=csv", f"data.path={table}", f"data.target={target}", "data.heldout=0.5", "train.epochs=3"
    summary, about = trained(tmp_path / "run", *words, "model.hidden=[8]")
    split = load_csv(table, target, heldout=0.5)
    assert json.dumps(split.remark) in (tmp_path / "run" / "events.jsonl").read_text()
    model = MLP(about["model"]["input_shape"], about["model"]["num_classes"], hidden=[8])
    model.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True))
    x, y = split.heldout.fetch(np.arange(len(split.heldout)))
    scores, rows = model(x), predicted(tmp_path / "run", table)
    assert len(rows) == 200
    lines = table.read_text().splitlines()
    (tmp_path / "numbers.csv").write_text("\n".join(line for line in lines if ",x1," not in line))  # 01 is no number
    some = [row["prediction"] for row, line in zip(rows, lines[1:], strict=True) if ",x1," not in line]
    assert [row["prediction"] for row in predicted(tmp_path / "run", tmp_path / "numbers.csv")] == some
    held = split_indices(200, 0.5, 0)[1].tolist()
    if target == "colour":
        right = (scores.argmax(-1) == y).float().mean()
        assert float(right) == pytest.approx(summary["heldout_accuracy"], abs=1e-6)
        assert [rows[k]["prediction"] for k in held] == [about["classes"][k] for k in scores.argmax(-1)]
    else:
        assert float((scores - y).detach().square().mean()) == pytest.approx(summary["heldout_loss"], rel=1e-4)
        price = scores.flatten() * about["input"]["target"]["std"] + about["input"]["target"]["mean"]
        assert [float(rows[k]["prediction"]) for k in held] == pytest.approx(price.tolist(), abs=1e-3)


def test_wrong_tables_are_refused_in_one_line(tmp_path: Path) -> None:
    def said(content: str, target: str | None) -> str:
        (tmp_path / "t.csv").write_text(content)
        with pytest.raises(DataError) as caught:
            load_csv(tmp_path / "t.csv", target)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "data.target=COLUMN" in said("a,b\n1,2\n", None)
    assert "no such column; it has a, b" in said("a,b\n1,2\n", "c")
    assert "no empty b" in said("a,b\n1,2\n1,\n", "b")
    assert "has no row" in said("a,b\n", "b")
    assert "1 class" in said("a,b\n1,x\n2,x\n", "b")
    (tmp_path / "t.csv").write_text("a,b\n1,3\n2,4\n")
    assert "2 classes is predicted, since it has whole numbers" in str(load_csv(tmp_path / "t.csv", "b").remark)
