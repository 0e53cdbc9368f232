"""The command `kfuse predict RUN_DIR FILES`: what a trained model says of images, texts and tables."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfuse.checkpoint.manager import ABOUT, load_weights
from kfuse.data import DataError, Dataset
from kfuse.settings import instantiate
from kfuse.settings.tree import ConfigError

USAGE = """\
kfuse predict RUN_DIR FILE [FILE ...]

Prints, as CSV, what the model that was trained in RUN_DIR says of files like those that it was trained on:
  images (data=image_folder, cifar10)        a line an image: its class, and the class's probability
  texts (data=hf with data.label)            a line a file: its class, and the class's probability
  tables (data=csv)                          a line a row: its class and probability, or the predicted number
  texts of a language model (data=text, hf)  a line a file: mean loss of a token (nats), part of tokens it has right
It is RUN_DIR/best.pt, where there is one, else RUN_DIR/model.pt; RUN_DIR/model.json says how it is used.
Tables need pip install 'kfuse[csv]', images kfuse[vision], Hugging Face's texts and models kfuse[transformers].
Exit status 0; 2 for what cannot be read."""

_BATCH = 64
Rows = Iterator[Sequence[Any]]


def main(words: Sequence[str]) -> int:
    """Prints the predictions. Returns the exit status. Raises ConfigError, in one line, for what cannot be read."""
    if len(words) < 2:
        raise ConfigError("kfuse predict: must be given a run's directory and the files")
    folder, files = Path(words[0]), [Path(word).expanduser() for word in words[1:]]
    try:
        about = json.loads((folder / ABOUT).read_text())
        form = (about["input"] or {}).get("format")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / ABOUT}: cannot be read: {instantiate.one_line(error)}") from error
    if form not in _FORMS:
        raise ConfigError(f"{folder}: its data are not made of files: load model.pt with torch (docs/train.md)")
    header, predict = _FORMS[form]
    write = csv.writer(sys.stdout, lineterminator="\n").writerow
    try:
        model = load_model(folder, about)
        rows = predict(model, about, files)
        for number, row in enumerate(rows):
            if number == 0:  # not before an error in the first file
                write(header)
            write(f"{value:.4f}" if isinstance(value, float) else value for value in row)
    except (DataError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    return 0


def load_model(folder: Path, about: Mapping[str, Any]) -> nn.Module:
    """Returns the trained model in eval mode. about: model.json's content. Raises ValueError."""
    model: nn.Module = instantiate.build(about["model"])
    best = folder / "best.pt"
    load_weights(model, str(best if best.exists() else folder / "model.pt"))
    return model.eval()


@torch.no_grad()
def outputs(model: nn.Module, data: Dataset) -> Iterator[tuple[Tensor, Any]]:
    """Yields the model's output of each batch, and the batch's target."""
    for start in range(0, len(data), _BATCH):
        x, y = data.fetch(np.arange(start, min(start + _BATCH, len(data))))
        yield model(**x) if isinstance(x, Mapping) else model(x), y


def _classes(found: Iterator[tuple[Tensor, Any]], names: Sequence[str] | None) -> Iterator[tuple[str, float]]:
    """Yields the likeliest class of each sample, and its probability."""
    for scores, _ in found:
        for probability, index in zip(*scores.softmax(-1).max(-1), strict=True):
            yield names[int(index)] if names else str(int(index)), float(probability)


def _images(model: nn.Module, about: Mapping[str, Any], files: Sequence[Path]) -> Rows:
    from kfuse.data.builtin import ImageFiles

    how = about["input"]
    data = ImageFiles(files, np.zeros(len(files)), how["size"], augment=False, pixels=(how["mean"], how["std"]))
    for file, found in zip(files, _classes(outputs(model, data), about["classes"]), strict=True):
        yield file, *found


def _texts(model: nn.Module, about: Mapping[str, Any], files: Sequence[Path]) -> Rows:
    from kfuse.data.hugging_face import load_tokenizer

    tokenizer = load_tokenizer(about["input"]["tokenizer"])
    for file in files:
        x = tokenizer(_text(file), truncation=True, max_length=about["input"]["block_size"], return_tensors="pt")
        with torch.no_grad():
            [found] = _classes(iter([(model(**x), None)]), about["classes"])
        yield file, *found


def _tables(model: nn.Module, about: Mapping[str, Any], files: Sequence[Path]) -> Rows:
    from kfuse.data.dataset import TensorData
    from kfuse.data.table import features, read

    columns, target = about["input"]["columns"], about["input"]["target"]
    for file in files:
        x = features(read(file, [column["name"] for column in columns if "values" in column]), columns)
        found = outputs(model, TensorData((x, x)))
        if about["classes"]:
            for row, each in enumerate(_classes(found, about["classes"])):
                yield file, row, *each
        else:
            for row, value in enumerate(value for scores, _ in found for value in scores.flatten().tolist()):
                yield file, row, value * target["std"] + target["mean"], None


def _language(model: nn.Module, about: Mapping[str, Any], files: Sequence[Path]) -> Rows:
    """With blocks as in training: a token is predicted from those before it in its block."""
    from kfuse.data.builtin import TextBlocks
    from kfuse.data.hugging_face import load_tokenizer

    how = about["input"]
    tokenizer = load_tokenizer(how["tokenizer"]) if how["format"] == "tokens" else None
    for file in files:
        text = _text(file)
        if tokenizer is None:
            found = np.frombuffer(text.encode(), np.uint8)
        else:
            found = np.array(tokenizer(text, verbose=False)["input_ids"])
        loss = right = tokens = 0.0
        for scores, target in outputs(model, TextBlocks([found], how["block_size"])):
            loss += float(F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum"))
            right += float((scores.argmax(-1) == target).sum())
            tokens += target.numel()
        if not tokens:
            raise DataError(f"{file} is shorter than a block of {how['block_size']} tokens")
        yield file, loss / tokens, right / tokens


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as UTF-8: {error}") from error


_OF_CLASSES = ("file", "class", "probability")
_OF_TOKENS = ("file", "loss", "accuracy")
_FORMS: dict[str, tuple[Sequence[str], Callable[[nn.Module, Mapping[str, Any], Sequence[Path]], Rows]]] = {
    "image": (_OF_CLASSES, _images),
    "texts": (_OF_CLASSES, _texts),
    "table": (("file", "row", "prediction", "probability"), _tables),
    "bytes": (_OF_TOKENS, _language),
    "tokens": (_OF_TOKENS, _language),
}
