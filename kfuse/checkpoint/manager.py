"""When a run writes checkpoints and its trained model, and what it resumes from.

model.json says how to make the model, and its input of a file: `kfuse predict` follows it. Plain torch and safetensors
read the model's files, model.pt, best.pt and model.safetensors:

    model.load_state_dict(torch.load("model.pt", weights_only=True))
    safetensors.torch.load_model(model, "model.safetensors")
"""

from __future__ import annotations

import importlib.util
import logging
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfuse.checkpoint import snapshot
from kfuse.checkpoint.format import Checkpointer, CheckpointError, load, load_newest, load_plain, steps_in
from kfuse.elastic.link import Report, ignore
from kfuse.membership import Session
from kfuse.observe import first_line, write_json, write_whole
from kfuse.optim.refuse import uncompiled

_log = logging.getLogger("kfuse")

_LAST_TIMEOUT_S = 15.0  # a part of the grace period that a preempted job usually has
_MODEL, _SAFE, _BEST, ABOUT = "model.pt", "model.safetensors", "best.pt", "model.json"
CaptureState = Callable[[], dict[str, Any]]


class Checkpoints:
    """The checkpoints of one run, on every worker. Only the leader writes: the others have the same state.

    With sharded optimizer state the others send it their shards, so all of them call it at the same points.
    """

    def __init__(
        self,
        directory: Path | None,
        session: Session,
        *,
        every_steps: int | None = None,
        each_epoch: bool = False,
        keep: int = 3,
        resume: str = "never",
        script: bool = False,
        report: Report = ignore,
    ) -> None:
        """directory: of the checkpoints; None: there is none to look in. every_steps: steps between two.

        each_epoch: one at the end of each epoch. With neither, one is written only where a training that goes on by
        itself (resume=auto) is stopped, or loses its supervisor. keep: how many of the newest are kept.
        resume: which one to resume from: never, auto (the newest valid one in `directory`, if there is one), or a path.
        script: the directory is a script's, which may hold another run's too. report: gets events.
        """
        self._directory, self._every_steps, self._keep, self._resume = directory, every_steps, keep, resume
        self._each_epoch, self._script, self._session = each_epoch, script, session
        self._reported = report
        self._writer: Checkpointer | None = None
        self._written = -1  # step of the newest, written or under way
        self._written_epoch = 0  # epochs that were over then

    @property
    def restarts(self) -> bool:
        """Whether this training, started anew, resumes from the checkpoints that it writes."""
        return bool(self._every_steps or self._each_epoch) and self._resume == "auto"

    def load(self, restarted: bool = False) -> dict[str, Any] | None:
        """Returns the state to resume from; None to start from the beginning.

        restarted: all workers were lost, so this run's own checkpoints come first. Raises CheckpointError if the one
        asked for by path cannot be used, or there are checkpoints and none is good.
        """
        found = None
        if self._directory is not None and (self._resume == "auto" or (restarted and not self._script)):
            found = load_newest(self._directory, self._report)
            if found is None and steps_in(self._directory):  # training anew would replace what may yet be saved
                raise CheckpointError(f"{self._directory}: no checkpoint in it is good: move them away to begin anew")
        if found is None and self._resume not in ("never", "auto"):
            found = self._load_path(Path(self._resume).expanduser())
        if found is None:
            if self._resume == "auto" and not restarted and self._directory is not None and self._directory.is_dir():
                self._report({"kind": "started", "note": f"no checkpoint to resume from in {self._directory}"})
            return None
        state, path = found
        self._written, self._written_epoch = state["progress"]["step"], state["progress"]["epoch"]
        self._report({"kind": "resumed", "step": self._written, "path": str(path)})
        if self._session.leads:
            _log.info("checkpoint of step %d loaded from %s", self._written, path)
        return state

    def _load_path(self, path: Path) -> tuple[dict[str, Any], Path]:
        """`path` is a checkpoint, a folder of them, or a run directory."""
        for folder in (path, path / "checkpoints"):
            if (folder / "manifest.json").exists():
                return load(folder), folder
            if (found := load_newest(folder, self._report)) is not None:
                return found
        raise CheckpointError(f"checkpoint{'_' if self._script else '.'}resume={path}: no good checkpoint there")

    def save_when_due(self, step: int, epoch: int, state: CaptureState) -> None:
        """Starts a checkpoint every `every_steps` steps, or each epoch; later if the last is still being written.

        step, epoch: how many are over. state: returns the state to write; called on the leader, and with sharded state
        on every worker. Raises CommError.
        """
        every = self._every_steps
        due = every and step // every > max(self._written, 0) // every
        if (due or (self._each_epoch and epoch > self._written_epoch)) and self._save(step, state):
            self._written, self._written_epoch = step, epoch

    def is_due_after(self, steps: int) -> bool:
        """Whether `every_steps` asks for a checkpoint after so many steps. The same on every worker."""
        return bool(self._every_steps) and steps % (self._every_steps or 1) == 0

    def save_last(self, step: int, state: CaptureState, over: bool = False, alone: bool | None = None) -> None:
        """Writes one more and waits for it, unless this step has one: with the one under way `_LAST_TIMEOUT_S` at most.

        over: training has come to its end; else it ends before that, and the next process is to go on. alone: workers
        or the supervisor are lost; whether this worker writes it. None: all of them call it.
        """
        goes_on = self._resume == "auto" and not over
        if self._directory is None or not (self._every_steps or self._each_epoch or goes_on):
            return
        writes = self._session.group.rank == 0 if alone is None else alone  # so do all ranks of its worker
        if not writes and (alone is not None or not self._session.comm.sharded):
            return
        deadline = time.monotonic() + _LAST_TIMEOUT_S
        if self._writer is not None:
            self._writer.wait(_LAST_TIMEOUT_S)
        if step == self._written:
            return
        saved = self._write(step, state()) if alone else self._save(step, state)
        if saved and self._writer is not None:
            self._writer.wait(max(0.0, deadline - time.monotonic()))
        elif writes and not saved:
            why = f"the one before was still being written after {_LAST_TIMEOUT_S:.0f} s"
            self._report({"kind": "checkpoint_failed", "step": step, "why": why})

    def close(self) -> None:
        """Waits for the write under way, however long it takes."""
        if self._writer is not None:
            self._writer.wait()

    def agree(self) -> None:
        """In a new view, on every worker: with sharded state all must find the same ones due. Raises CommError."""
        if self._session.comm.sharded:
            group = self._session.group
            written = torch.tensor([self._written, self._written_epoch], device=group.device)
            group.broadcast(written, "the newest checkpoint").wait()
            self._written, self._written_epoch = (int(number) for number in written)

    def _save(self, step: int, state: CaptureState) -> bool:
        """Returns False while the leader still writes the last one. With sharded state all workers call `state`."""
        group = self._session.group
        leads = group.rank == 0
        if self._session.comm.sharded:
            ready = int(not leads or self._writer is None or self._writer.wait(0.0))
            told = torch.tensor([ready], device=group.device)
            group.broadcast(told, "whether a checkpoint can be written").wait()
            if not told.item():
                return False
        elif leads and (replica := self._session.replica) is not None:
            ready = self._writer is None or self._writer.wait(0.0)
            if not replica.every([ready], "whether a checkpoint can be written")[0][0]:
                return False
        captured = state() if leads or self._session.comm.sharded else {}
        return self._write(step, captured) if leads else True

    def _write(self, step: int, captured: dict[str, Any]) -> bool:
        """Returns False while the last one is being written. Of a worker's ranks the first one writes."""
        if self._session.part[0]:
            return True
        if self._writer is None:
            assert self._directory is not None
            self._writer = Checkpointer(self._directory, self._keep, self._report)
        return self._writer.save(step, captured)

    def _report(self, event: dict[str, Any]) -> None:
        self._reported("event", {"step": None, **event})


class SavedModel:
    """Writes the model of one training, on rank 0. What goes wrong with a file is an event, never an exception."""

    def __init__(
        self, directory: Path, session: Session, report: Report = ignore, about: Mapping[str, Any] | None = None
    ) -> None:
        """directory: where the files go; made if need be. report: gets events.

        about: what model.json is to hold; None: there is none.
        """
        self._directory, self._session, self._report, self._about = directory, session, report, about
        self._thread: threading.Thread | None = None

    def save_best(self, model: nn.Module) -> None:
        """Writes best.pt in the background, from a copy. Waits for the one before, if it is still being written."""
        if self._session.group.rank != 0:
            return
        self.close()
        path = self._directory / _BEST
        weights = self._attempt(path, model_weights, model, self._session.leads)
        if weights is not None and self._session.leads:
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
        directory = self._directory
        paths = {"model": directory / _MODEL}
        if importlib.util.find_spec("safetensors"):
            paths["model_safetensors"] = directory / _SAFE
        found = {}
        weights = self._attempt(paths["model"], model_weights, model, self._session.leads)
        if weights is not None and self._session.leads:
            found = {key: str(path) for key, path in paths.items() if self._attempt(path, _write, path, weights)}
            if self._about is not None:
                self._attempt(directory / ABOUT, write_json, directory / ABOUT, self._about)
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
            self._report("event", {"step": None, "kind": "model_failed", "path": str(path), "why": first_line(error)})


def model_weights(model: nn.Module, keeps: bool = True) -> dict[str, Any]:
    """Returns a copy of the state_dict on the host. Tensors are dense; a shared (tied) one is one tensor in it too.

    A sharded model's are whole, and all ranks of its worker call this function. keeps: whether this one gets them.

    Raises TypeError for what torch.load(weights_only=True) would not read.
    """
    # Variables are kept, so that a tied parameter is one object.
    state = uncompiled(model).state_dict(keep_vars=True)
    if any(hasattr(value, "full_tensor") for value in state.values()):
        from kfuse.optim.shards import whole_state

        state = whole_state(state, keeps)
    copy: dict[str, Any] = snapshot(state, "model")
    return copy


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
        raise ValueError(f"{path}: cannot be read: {first_line(error)}") from error
    if not isinstance(found, dict) or not any(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path}: must hold a model's state_dict, tensors by name")
    return found


def _save_safetensors(weights: Mapping[str, Any], path: Path) -> None:
    """Writes as `safetensors.torch.save_model` does: one name of each shared tensor, the others in the metadata.

    That function takes the live model, and refuses shared weights that are views of an optimizer's flat buffer.
    """
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):  # not a module's extra state
            first.setdefault(id(value), name)
    tensors = {name: weights[name].contiguous() for name in first.values()}
    shared = {name: first[id(value)] for name, value in weights.items() if id(value) in first and name not in tensors}
    save_file(tensors, path, {"format": "pt", **shared})


def _write(path: Path, weights: Mapping[str, Any]) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    save = _save_safetensors if path.name == _SAFE else torch.save
    write_whole(path, lambda to: save(weights, to))
    return True
