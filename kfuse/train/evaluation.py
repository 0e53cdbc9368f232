"""What a training results in: evaluations on the held-out data over all workers, and the content of summary.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kfuse.comm.devices import generators_restored
from kfuse.comm.group import Group
from kfuse.data import Dataset
from kfuse.data.dataset import to_device
from kfuse.data.fetching import random_key, seed_host
from kfuse.membership import Session
from kfuse.train.arguments import TrainArguments
from kfuse.train.loss import Metric, Objective, Outcome, forward
from kfuse.train.progress import Evaluation, Progress
from kfuse.train.reporter import Reporter
from kfuse.train.step import seed_forward
from kfuse.train.synchronisation import Synchronisation


@dataclass
class Evaluations:
    """The evaluations of one training, and its summary."""

    given: TrainArguments
    session: Session
    progress: Progress
    reporter: Reporter
    synchronisation: Synchronisation

    def is_due(self, epoch_is_over: bool) -> bool:
        every = self.given.settings["heldout_every"]
        return (self.progress.step + 1) % every == 0 if every else epoch_is_over

    def evaluate_once(self, steps: int) -> None:
        """Evaluates on the held-out data after `steps` steps, unless that has been done.

        Raises ValueError where training is to end at an accuracy, and the model has none.
        """
        at, given, settings = self.progress, self.given, self.given.settings
        if given.heldout is None or at.evaluated == steps:
            return
        with self.synchronisation.method.shown():
            how = self.session.group, settings["train_precision"], given.metrics, settings["heldout_batch"]
            act = partial(evaluate, given.model, given.heldout, given.objective, *how)
            result = self.session.together(act, "evaluation")
            is_best = at.take_evaluation(result, steps)
            if given.scheduler is not None:
                given.scheduler.after("evaluation", result.loss)
            if is_best and given.saved_model is not None:
                given.saved_model.save_best(given.model)
        target = settings["train_target_accuracy"]
        if target is not None and result.accuracy is None:
            why = "the accuracy is unknown: the output has no score for each class"
            raise ValueError(f"target_accuracy={target}: {why}")
        self.reporter.event(at.step, "evaluation", **asdict(result))

    def take_logged(self) -> None:
        """Takes what the user has logged in this step as `heldout_loss` and `heldout_accuracy`, if kfuse does not
        evaluate itself.
        """
        at, given = self.progress, self.given
        logged = at.logged.get(at.step, {})
        loss, accuracy = logged.get("heldout_loss"), logged.get("heldout_accuracy")
        if given.heldout is not None or (loss is None and accuracy is None) or self.session.replica is not None:
            return  # the ranks of a worker may have logged different ones
        result = Evaluation(loss, accuracy)
        if at.take_evaluation(result, at.step + 1) and given.saved_model is not None:
            given.saved_model.save_best(given.model)
        self.reporter.event(at.step, "evaluation", **asdict(result))

    def summary(self, lr: float, wall_s: float) -> dict[str, Any]:
        """Writes the model, if one is to be saved, and returns the content of summary.json. lr: the last step's."""
        at, model, saved = self.progress, self.given.model, self.given.saved_model
        stats = self.given.opt.statistics.latest
        return {
            "steps": at.step,
            "epochs": at.epoch,
            "samples": at.samples,
            "wall_s": wall_s,
            "loss": at.loss,
            "heldout_loss": at.evaluation.loss,
            "heldout_accuracy": at.evaluation.accuracy,
            "heldout_metrics": at.evaluation.metrics,
            "batch_size": at.batch_size,
            "noise_scale": stats and stats.noise_scale,
            "noise_scale_low": stats and stats.noise_scale_low,
            "lr": lr,
            "workers": self.session.group.size,
            "params_sha256": params_sha256(model),
            "exit_reason": at.exit_reason(self.given.settings),
            **at.pulls,
            **({} if saved is None else saved.save_last(model, at.best is not None)),
        }


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Dataset,
    objective: Objective,
    group: Group,
    precision: str = "fp32",
    metrics: Mapping[str, Metric] | None = None,
    chunk: int = 256,
) -> Evaluation:
    """Evaluates the model, in eval mode. Each worker takes every n-th chunk; every worker returns the same numbers.

    chunk: how many samples it has, on any number of workers. A chunk's sums come from one worker, so that adding zeros
    from the others is exact; chunks are summed in order. The random numbers of a chunk are seeded by its place. Raises
    ValueError for a metric that is neither [B] nor a scalar.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        chunks = -(-len(data) // chunk)
        mine = range(group.rank, chunks, group.size)
        rows: dict[int, tuple[list[str], Tensor]] = {}
        with generators_restored(group.device):
            for c in mine or range(1):  # a worker with no chunk learns the names of the sums from the first one
                indices = np.arange(c * chunk, min((c + 1) * chunk, len(data)), dtype=np.int64)
                seed_host(random_key(0, 0, c))
                fetched = data.fetch(indices, None)
                weight, batch = objective.weight(fetched, len(indices)), to_device(fetched, group.device)
                seed_forward(group.device, random_key(0, 0, c))
                done = forward(objective, model, batch, precision, group.device)
                rows[c] = _sums(done, len(indices), weight, metrics or {})
        names = next(iter(rows.values()))[0]
        if any(found != names for found, _ in rows.values()):
            raise ValueError("step_fn returned other figures for some batches of heldout: must be the same")
        sums = torch.zeros(chunks, 2 + len(names), 2, dtype=torch.float64, device=group.device)
        for c in mine:
            sums[c] = rows[c][1]
        group.all_reduce(sums, "evaluation").wait()
    finally:  # also where a worker is lost meanwhile
        for module in training:
            module.training = True
    (loss, weight), (hits, targets), *others = [(sum(v), sum(w)) for v, w in sums.permute(1, 2, 0).tolist()]
    means = {name: total / of for name, (total, of) in zip(names, others, strict=True)}
    return Evaluation(loss / weight, hits / targets if targets else None, means)


def _sums(done: Outcome, samples: int, weight: float, metrics: Mapping[str, Metric]) -> tuple[list[str], Tensor]:
    """The names of a chunk's metrics or figures, and its sums: float64 [2 + names, 2], of values and their weights.

    The first two rows are of the loss and the accuracy.
    """
    rows = [_row("the loss", done.loss.reshape(()), samples, weight), torch.zeros(2, dtype=torch.float64)]
    if _are_classes(done.output, done.target):
        hits = (done.output.argmax(-1) == done.target).sum().double()
        rows[1] = torch.stack([hits, torch.full_like(hits, done.target.numel())])
    values = {name: metric(done.output, done.target) for name, metric in metrics.items()}
    values |= dict(sorted(done.figures.items()))
    rows += [_row(f"heldout's {name!r}", value, samples, weight) for name, value in values.items()]
    return [*values], torch.stack([row.to(done.loss.device) for row in rows])


def _row(source: str, value: Any, samples: int, weight: float) -> Tensor:
    """float64 [2]: the sum of a value for each sample, or `weight` times their mean; and the weight of that.

    Raises TypeError or ValueError, naming `source`.
    """
    try:
        values = torch.as_tensor(value).double()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{source} is a {type(value).__name__}: must be a tensor [B] or a scalar") from None
    if values.ndim and values.shape != (samples,):
        raise ValueError(
            f"{source} is of shape {list(values.shape)} for {samples} samples: must be [B], a value for each sample, "
            "or their mean, a scalar"
        )
    total, of = (values.sum(), float(samples)) if values.ndim else (values * weight, weight)
    return torch.stack([total, torch.full_like(total, of)])


def _are_classes(output: object, target: object) -> bool:
    """Whether `output` has a score for each of several classes, in its last dimension, for each integer target."""
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and output.ndim == target.ndim + 1
        and output.shape[:-1] == target.shape
        and output.shape[-1] > 1
    )


def params_sha256(model: nn.Module) -> str:
    """SHA-256 over the parameters' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for _, p in sorted(model.named_parameters()):
        if (gather := getattr(p.detach(), "full_tensor", None)) is not None:  # sharded: all ranks call this function
            p = gather()
        digest.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
