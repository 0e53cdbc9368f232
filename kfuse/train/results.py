"""What a training results in: evaluations on the held-out data, and the content of summary.json."""

from __future__ import annotations

from typing import Any

from kfuse.train.context import TrainContext
from kfuse.train.evaluation import evaluate, params_sha256
from kfuse.train.synchronisation import Synchronisation


def evaluation_is_due(training: TrainContext, epoch_is_over: bool) -> bool:
    """Whether the model is evaluated after the step under way."""
    every = training.settings.train_eval_every
    return (training.progress.step + 1) % every == 0 if every else epoch_is_over


def evaluate_once(training: TrainContext, synchronisation: Synchronisation, steps: int) -> None:
    """Evaluates on the held-out data after `steps` steps, unless that has been done.

    Raises ValueError where training is to end at an accuracy, and the model has none.
    """
    at, settings = training.progress, training.settings
    if training.heldout is None or at.evaluated == steps:
        return
    with synchronisation.shown():
        result = evaluate(
            training.model,
            training.heldout,
            training.objective,
            training.session.group,
            settings.train_precision,
            training.metrics,
        )
        is_best = at.take_evaluation(result.accuracy, result.loss, result.metrics, steps)
        if training.scheduler is not None:
            training.scheduler.after_evaluation(result.loss)
        if is_best and training.saved_model is not None:
            training.saved_model.save_best(training.model)
    target = settings.train_target_accuracy
    if target is not None and result.accuracy is None:
        raise ValueError(
            f"target_accuracy={target}: the accuracy is unknown, since the output has no score for each class of "
            "an integer target"
        )
    figures = {"accuracy": result.accuracy, "loss": result.loss, "metrics": result.metrics}
    training.reporter.event(at.step, "evaluation", **figures)


def summary(training: TrainContext, lr: float, wall_s: float) -> dict[str, Any]:
    """Writes the model, if one is to be saved, and returns the content of summary.json. lr: the last step's."""
    at, saved = training.progress, training.saved_model
    return {
        "steps": at.step,
        "epochs": at.epoch,
        "samples": at.samples,
        "wall_s": wall_s,
        "loss": at.loss,
        "eval_loss": at.eval_loss,
        "eval_accuracy": at.accuracy,
        "eval_metrics": at.eval_metrics,
        **training.facts,
        "batch_size": at.batch_size,
        "lr": lr,
        "workers": training.session.group.size,
        "params_sha256": params_sha256(training.model),
        "exit_reason": at.exit_reason(training.settings),
        **({} if saved is None else saved.save_last(training.model, at.best is not None)),
    }
