"""Tables of numbers and words: CSV files, read by pandas."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.data.builtin import import_for, split_indices
from kfuse.data.dataset import DataError, DataSplit, TensorData


def load_csv(
    path: str | os.PathLike[str] | None = None, target: str | None = None, heldout: float = 0.1, split_seed: int = 0
) -> DataSplit:
    """Returns the rows of a CSV file with a header: features float32 `[B, F]`, and the column `target`.

    A column of numbers becomes one feature, with mean 0 and standard deviation 1 over the training rows; a missing
    number becomes 0, the mean. A column of words becomes a feature for each word of the training rows, 1.0 or 0.0. A
    target of words, of true and false or of whole numbers is a class, int64 `[B]`; other numbers are predicted, float32
    `[B, 1]`, scaled as the features are: a mean squared error of 1 is that of the mean. The fraction `heldout` is
    chosen by a shuffle with `split_seed`. Needs pandas. Raises DataError, in one line.
    """
    if path is None or target is None:
        raise DataError("data=csv needs data.path=FILE and data.target=COLUMN, what is to be predicted")
    frame = read(path)
    if target not in frame.columns:
        raise DataError(f"target={target}: {path} has no such column; it has {', '.join(map(str, frame.columns))}")
    rows = frame.drop(columns=target)
    if frame[target].isna().any() or not len(rows.columns):
        raise DataError(f"{path}: must have a column beside {target}, and no empty {target}")
    train, held = split_indices(len(frame), heldout, split_seed)
    columns = [_described(rows[name].iloc[train]) for name in rows.columns]
    scale = _described(frame[target].iloc[train]) if frame[target].dtype.kind == "f" else None
    x, (y, classes) = features(rows, columns), _targets(frame[target], scale)
    about = {"format": "table", "columns": columns, "target": scale or {"name": target}}
    spec: dict[str, Any] = {"input_shape": (x.shape[1],), "num_classes": len(classes) if classes else 1}
    spec |= {"classes": classes} if classes else {}
    parts = (TensorData((x, y), chosen.tolist()) for chosen in (train, held))
    remark = f"{target}: one of {len(classes)} classes is predicted" if classes else f"{target}: a number is predicted"
    if frame[target].dtype.kind in "iu":
        remark += ", since it has whole numbers; write them with a decimal point, 3.0, to predict numbers"
    return DataSplit(next(parts), next(parts), spec, about, remark)


def read(path: str | os.PathLike[str], words: Collection[str] = ()) -> Any:
    """Returns the file as a pandas DataFrame. Raises DataError where it cannot be read, and where it has no row.

    words: the columns that are words, whatever they look like here: 01 stays 01.
    """
    pandas = import_for("pandas", "csv", "pandas", "'kfuse[csv]'")
    try:
        frame = pandas.read_csv(Path(path).expanduser(), dtype=dict.fromkeys(words, str))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not len(frame):
        raise DataError(f"{path} has no row")
    return frame


def features(rows: Any, columns: Sequence[dict[str, Any]]) -> Tensor:
    """Returns the features of a DataFrame's rows, float32 `[rows, F]`.

    columns: what is made of each, as model.json has it: its name, with mean and std, or with values (its words).
    Raises DataError for a column that is missing, and for one of numbers that holds something else.
    """
    found = []
    for column in columns:
        name = column["name"]
        if name not in rows.columns:
            raise DataError(f"the table has no column {name}")
        if "values" in column:
            words = rows[name].astype(str).to_numpy()
            found += [(words == value).astype(np.float32) for value in column["values"]]
            continue
        try:
            numbers = rows[name].to_numpy(np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(f"column {name}: must hold numbers: {error}") from error
        found.append(np.nan_to_num((numbers - column["mean"]) / column["std"]).astype(np.float32))
    return torch.from_numpy(np.stack(found, axis=1))


def _described(column: Any) -> dict[str, Any]:
    """Returns what is made of a column, by its training rows."""
    if column.dtype.kind in "biuf":
        std = float(column.std(ddof=0))
        mean = 0.0 if column.isna().all() else float(column.mean())
        return {"name": column.name, "mean": mean, "std": std if std > 0 else 1.0}
    return {"name": column.name, "values": sorted(set(column.dropna().astype(str)))}


def _targets(column: Any, scale: dict[str, Any] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Returns the targets, and the classes' names: none for numbers that are to be predicted. scale: of these."""
    if scale is not None:
        scaled = (column.to_numpy(np.float64) - scale["mean"]) / scale["std"]
        return torch.from_numpy(scaled.astype(np.float32)).view(-1, 1), ()
    names = sorted(set(column), key=lambda value: (str(type(value)), value))
    number = {name: k for k, name in enumerate(names)}
    if len(names) < 2:
        raise DataError(f"target={column.name}: has 1 class: at least 2 are needed")
    return torch.tensor([number[value] for value in column]), tuple(map(str, names))
