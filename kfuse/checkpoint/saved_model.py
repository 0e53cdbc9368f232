"""The trained model as files that plain torch reads: model.pt, model.safetensors, best.pt.

    model.load_state_dict(torch.load("model.pt", weights_only=True))
    safetensors.torch.load_model(model, "model.safetensors")

Each file is written under a hidden name and then renamed: it is there whole, or not at all.
"""

from __future__ import annotations

import importlib.util
import textwrap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfuse.checkpoint.format import load_plain, one_line
from kfuse.checkpoint.snapshot import snapshot
from kfuse.membership import Record, Session
from kfuse.observe.whole_file import write_whole

_MODEL, _SAFE, _BEST = "model.pt", "model.safetensors", "best.pt"


class SavedModel:
    """Writes the model of one training, on rank 0. What goes wrong with a file is an event, never an exception."""

    def __init__(self, directory: Path, session: Session, numbered: bool = False, report: Record | None = None) -> None:
        """directory: where the files go; made if need be.

        numbered: the directory is the whole job's, so a process's second training writes to its folder 2, and so on.
        report: gets events, as ("event", fields); None: `session.report`.
        """
        self._directory, self._session, self._numbered = directory, session, numbered
        self._report = report or session.report
        self._thread: threading.Thread | None = None

    @property
    def directory(self) -> Path:
        """The folder of the training under way."""
        number = self._session.training
        return self._directory / str(number) if self._numbered and number > 1 else self._directory

    def save_best(self, model: nn.Module) -> None:
        """Writes best.pt in the background, from a copy. Waits for the one before, if it is still being written."""
        if self._session.group.rank != 0:
            return
        self.close()
        path = self.directory / _BEST
        if (weights := self._attempt(path, model_weights, model)) is not None:
            self._thread = threading.Thread(target=self._attempt, args=(path, _write, path, weights), name=_BEST)
            self._thread.start()

    def save_last(self, model: nn.Module, has_best: bool) -> dict[str, str]:
        """Writes model.pt and, where safetensors is installed, model.safetensors. Returns paths for the summary.

        By name: `model`, `model_safetensors`, `best_model`; those that are written. has_best: this training has had a
        best evaluation. Without one, a best.pt in the folder is another training's.
        """
        if self._session.group.rank != 0:
            return {}
        self.close()
        directory = self.directory
        paths = {"model": directory / _MODEL}
        if importlib.util.find_spec("safetensors"):
            paths["model_safetensors"] = directory / _SAFE
        found = {}
        if (weights := self._attempt(paths["model"], model_weights, model)) is not None:
            found = {key: str(path) for key, path in paths.items() if self._attempt(path, _write, path, weights)}
        if has_best and (directory / _BEST).exists():
            found["best_model"] = str(directory / _BEST)
        return found

    def close(self) -> None:
        """Waits for the write under way."""
        if self._thread is not None:
            self._thread.join()

    def _attempt(self, path: Path, act: Callable[..., Any], *given: Any) -> Any:
        """Returns what act(*given) returns; None, and makes an event, if it fails."""
        try:
            return act(*given)
        except Exception as error:
            self._report("event", {"step": None, "kind": "model_failed", "path": str(path), "why": one_line(error)})


def model_weights(model: nn.Module) -> dict[str, Any]:
    """Returns a copy of the state_dict on the host. Tensors are dense; a shared (tied) one is one tensor in it too.

    Raises TypeError for what torch.load(weights_only=True) would not read.
    """
    # Variables are kept, so that a tied parameter is one object.
    copy: dict[str, Any] = snapshot(uncompiled(model).state_dict(keep_vars=True), "model")
    return copy


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns what `torch.compile(model)` wraps, whose parameters' names have no prefix; any other model itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def load_weights(model: nn.Module, path: str, assign: bool = False) -> None:
    """Loads model.pt or model.safetensors, or any file of a state_dict, into `model`.

    assign: the file's tensors replace the model's, which may be on the meta device. Raises ValueError, in one line, for
    a file that cannot be read, and for names or shapes that differ.
    """
    model, weights = uncompiled(model), read_weights(path)
    own = model.state_dict(keep_vars=True)
    there = {id(value): weights[name] for name, value in own.items() if name in weights}
    # safetensors keeps one name of a shared tensor.
    missing = {name: id(value) for name, value in own.items() if name not in weights and id(value) in there}
    weights.update({name: there[tensor] for name, tensor in missing.items()})
    try:
        model.load_state_dict(weights, assign=assign)
    except RuntimeError as error:
        raise ValueError(f"{path}: {textwrap.shorten(str(error), 400)}") from error


def read_weights(path: str) -> dict[str, Any]:
    """Returns the state_dict in a file of torch's or of safetensors, on the CPU; nothing in it can run code.

    Raises ValueError, in one line.
    """
    file = Path(path).expanduser()
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(file)
        else:
            found = load_plain(file)
    except Exception as error:  # torch raises many types for a file that is not its own
        raise ValueError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict) or not any(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path}: must hold a model's state_dict, tensors by name")
    return found


def _save_safetensors(weights: Mapping[str, Any], path: Path) -> None:
    """As `safetensors.torch.save_model` writes it: one name of each shared tensor, the others in the metadata.

    That function itself takes the live model, and refuses shared weights that are views of an optimizer's flat buffer.
    """
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    for name, value in weights.items():
        first.setdefault(id(value), name)
    tensors = {name: weights[name].contiguous() for name in first.values()}
    shared = {name: first[id(value)] for name, value in weights.items() if name not in tensors}
    save_file(tensors, path, {"format": "pt", **shared})


def _write(path: Path, weights: Mapping[str, Any]) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    save = _save_safetensors if path.name == _SAFE else torch.save
    write_whole(path, lambda to: save(weights, to))
    return True
