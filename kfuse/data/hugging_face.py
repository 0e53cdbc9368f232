"""Data sets of Hugging Face's `datasets`, tokenised: for causal language models, and for classification of texts.

What the tokenizer made lies in the cache of `datasets`, as Arrow files that all workers map into memory. The command's
check of the configuration makes them; workers find them there.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.data.builtin import TextBlocks, import_for, split_indices
from kfuse.data.dataset import DataError, Dataset, DataSplit

_INSTALL = "'kfuse[transformers]'"
_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_SAVED = ("dataset_info.json", "dataset_dict.json")  # in a folder that `save_to_disk` has written


def load_hf(
    name: str,
    tokenizer: str | None,
    subset: str | None = None,
    split: str = "train",
    heldout_split: str | None = None,
    heldout: float = 0.1,
    split_seed: int = 0,
    text: str = "text",
    label: str | None = None,
    block_size: int = 128,
) -> DataSplit:
    """Returns the rows of a data set, tokenised: `TextBlocks`, or with a `label` `LabelledTexts`.

    name: on the hub; or a file or folder that `load_dataset` or `load_from_disk` reads. Without `heldout_split` the
    fraction `heldout` of the rows is held out, chosen by a shuffle with `split_seed`. A text ends with the tokenizer's
    end-of-text token in language modelling, where it has one. Raises DataError, in one line.
    """
    datasets = import_for("datasets", "hf", "datasets", _INSTALL)
    if block_size < 1:
        raise DataError(f"block_size={block_size}: must be at least 1")
    tokens = load_tokenizer(tokenizer)
    datasets.disable_progress_bars()
    train = _read(datasets, name, subset, split)
    if heldout_split is not None:
        held = _read(datasets, name, subset, heldout_split)
    else:
        train, held = (train.select(part) for part in split_indices(len(train), heldout, split_seed))
    for key, column in {"text": text, "label": label}.items():
        if column is not None and column not in {*train.column_names} & {*held.column_names}:
            raise DataError(f"{key}={column}: {name} has no such column; it has {', '.join(train.column_names)}")
    if label is not None:
        return _for_classification(train, held, text, label, tokens, block_size)
    parts = [_blocks(rows, text, tokens, block_size) for rows in (train, held)]
    if not all(map(len, parts)):
        raise DataError(f"{name} is too short for block_size={block_size}: no block to train on, or none to hold out")
    about = {"format": "tokens", "tokenizer": tokens.name_or_path, "block_size": block_size}
    return DataSplit(parts[0], parts[1], {"vocab_size": len(tokens), "block_size": block_size}, about)


def load_tokenizer(name: str | None) -> Any:
    """Returns a tokenizer by its name on the hub, or its folder. Raises DataError, in one line."""
    auto = import_for("transformers", "hf", "transformers", _INSTALL).AutoTokenizer
    if name is None:
        raise DataError("tokenizer=null: must be the name of a tokenizer, or its folder")
    if _is_path(name) and not Path(name).expanduser().is_dir():
        raise DataError(f"tokenizer={name}: no such folder")
    try:
        return auto.from_pretrained(os.path.expanduser(name))
    except Exception as error:  # many types, by what the file or the hub gave
        raise DataError(f"tokenizer={name}: {_short(error)}") from error


def _read(datasets: Any, name: str, subset: str | None, split: str) -> Any:
    """Returns the rows of one split. A path that is not there is refused without asking the hub."""
    path = Path(name).expanduser()
    builder = _BUILDERS.get(path.suffix)
    if not path.exists() and (builder or _is_path(name)):
        raise DataError(f"name={name}: no such file or folder")
    if path.is_file() and builder is None:
        raise DataError(f"name={name}: a file must end in one of {' '.join(_BUILDERS)}")
    try:
        if path.is_file():
            return datasets.load_dataset(builder, data_files=str(path), split=split)
        if any((path / file).exists() for file in _SAVED):
            saved = datasets.load_from_disk(str(path))
            return (saved if isinstance(saved, Mapping) else {"train": saved})[split]
        return datasets.load_dataset(str(path) if path.is_dir() else name, subset, split=split)
    except StopIteration:
        raise DataError(f"name={name}, split {split}: has no row") from None
    except Exception as error:
        raise DataError(f"name={name}, split {split}: {_short(error)}") from error


def _is_path(name: str) -> bool:
    """Whether it cannot be a name on the hub."""
    return name.startswith(("/", ".", "~"))


def _short(error: BaseException) -> str:
    error = error.__cause__ or error
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)


# -- language modelling ------------------------------------------------------------------------------------------------


def _blocks(rows: Any, text: str, tokenizer: Any, block_size: int) -> TextBlocks:
    made = _tokenised(rows, partial(_tokens_of, text=text, tokenizer=tokenizer))
    pieces = [piece.flatten().to_numpy() for piece in made.data.column("input_ids").chunks]
    return TextBlocks(pieces, block_size)


def _tokens_of(batch: Mapping[str, list[Any]], text: str, tokenizer: Any) -> dict[str, list[list[int]]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found = tokenizer(batch[text], return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
    return {"input_ids": [ids if ids[-1:] == end else ids + end for ids in found]}


def _tokenised(rows: Any, make: Any) -> Any:
    """Returns a data set of `make` of the rows' batches. Raises DataError for a column that holds no texts."""
    try:
        # A call may change the tokenizer, whose state is part of the cache's key: so it is the same for all calls.
        make({make.keywords["text"]: ["a"]})
        return rows.map(make, batched=True, remove_columns=rows.column_names)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"text={make.keywords['text']}: must be a column of texts, none of them null: {_short(error)}"
        ) from error


# -- classification ----------------------------------------------------------------------------------------------------


class LabelledTexts(Dataset):
    """Texts and their classes, int64 `[B]`. Inputs: what the tokenizer gives, padded to the batch's longest text."""

    def __init__(self, rows: Any, labels: Tensor, tokenizer: Any) -> None:
        self.rows, self.labels, self.tokenizer = rows, labels, tokenizer

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[dict[str, Tensor], Tensor]:
        chosen = indices.tolist()
        rows = self.rows[chosen]
        longest = max(1, *map(len, rows["input_ids"]))  # texts may be empty, all of them
        padded = self.tokenizer.pad(rows, padding="max_length", max_length=longest, return_tensors="pt", verbose=False)
        return dict(padded), self.labels[chosen]


def _for_classification(train: Any, held: Any, text: str, label: str, tokenizer: Any, block_size: int) -> DataSplit:
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError("tokenizer: has nothing to pad with: must have a pad_token or an eos_token")
        tokenizer.pad_token = tokenizer.eos_token
    classes, labels = _labels(train, held, label)
    make = partial(_cut, text=text, tokenizer=tokenizer, length=block_size)
    parts = [LabelledTexts(_tokenised(rows, make), y, tokenizer) for rows, y in zip((train, held), labels, strict=True)]
    spec = {"vocab_size": len(tokenizer), "block_size": block_size, "pad_token_id": tokenizer.pad_token_id}
    about = {"format": "texts", "tokenizer": tokenizer.name_or_path, "block_size": block_size}
    return DataSplit(parts[0], parts[1], spec | {"num_classes": len(classes), "classes": classes}, about)


def _cut(batch: Mapping[str, list[Any]], text: str, tokenizer: Any, length: int) -> dict[str, list[list[int]]]:
    return dict(tokenizer(batch[text], truncation=True, max_length=length))


def _labels(train: Any, held: Any, label: str) -> tuple[tuple[str, ...], list[Tensor]]:
    """Returns the classes' names, and the labels of both parts. Texts are numbered in their sorted order."""
    columns = [list(rows[label]) for rows in (train, held)]
    values = [*columns[0], *columns[1]]
    if all(isinstance(value, str) for value in values):
        classes = tuple(sorted(set(values)))
        number = {name: k for k, name in enumerate(classes)}
        columns = [[number[value] for value in column] for column in columns]
    elif all(isinstance(value, int) and value >= 0 for value in values):
        classes = tuple(getattr(train.features[label], "names", None) or map(str, range(max(values) + 1)))
    else:
        raise DataError(f"label={label}: must be a column of texts, or of whole numbers from 0")
    if len(classes) < 2:
        raise DataError(f"label={label}: has 1 class: at least 2 are needed")
    return classes, [torch.tensor(column, dtype=torch.int64) for column in columns]
