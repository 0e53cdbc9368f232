"""Makes the trainer of a training: checks that its arguments go together, and makes the parts from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from kfuse.data import Dataset, EpochSampler, Stream, StreamSampler
from kfuse.data.fetching import Fetcher, Loading
from kfuse.data.sources import IterableStream, check_loaders
from kfuse.membership import Session
from kfuse.optim import carried_states, refuse_parameters_outside, refuse_partial_state
from kfuse.optim.refuse import uncompiled
from kfuse.policies.signals import Bounds
from kfuse.session import current
from kfuse.settings import rules
from kfuse.settings.tree import BATCH_MAX, by_key
from kfuse.train.arguments import TrainArguments
from kfuse.train.decisions import Decisions, PolicyCalls
from kfuse.train.evaluation import Evaluations
from kfuse.train.learning_rate import LearningRate, LRSchedule, has_scheduler
from kfuse.train.loss import Forward
from kfuse.train.progress import Progress
from kfuse.train.recovery import Recovery
from kfuse.train.reporter import Reporter
from kfuse.train.state import Stateful, Trainable, TrainingState
from kfuse.train.step import Sampler, Sampling
from kfuse.train.synchronisation import Synchronisation
from kfuse.train.trainer import Trainer


def assemble(given: TrainArguments) -> Trainer:
    """Returns the trainer of these arguments. Raises ConfigError, TypeError or ValueError where they do not go together
    with each other or with the job.
    """
    session, opts, opt, seed = current(), given.opts, given.opt, given.settings["seed"]
    for name, metric in given.metrics.items():
        if not callable(metric):
            raise TypeError(f"metrics[{name!r}]={metric!r}: must be a function(output, target)")
    if given.heldout is not None and not len(given.heldout):
        raise ValueError("heldout has no samples: must have at least 1, or be left out")
    data = given.data
    sampler = StreamSampler(seed) if isinstance(data, Stream) else EpochSampler(len(data), seed, data.order)
    length = sampler.length
    if given.scheduler is not None and "epoch" in given.scheduler.intervals and length is None:
        raise ValueError("scheduler_interval=epoch: must be step with data=stream (a stream has no epochs)")
    if (streams := _streams(given)) is not None:  # the batch stays as it is
        size = given.settings["batch_size"]
        given = replace(given, settings={**given.settings, "batch_min": size, "batch_max": size})
    settings, schedule = given.settings, LRSchedule.of(given.settings, length)
    _refuse_modules(given, session)
    inner = ", ".join(type(each).__name__ for one in opts for each in one.inners or (one,))
    facts = _facts(given, session, schedule, inner) | {"streams": streams}
    rules.check(facts)

    began_with = {"batch_size": settings["batch_size"], "optimizer": inner.removeprefix("Fused"), "seed": seed}
    progress = Progress(settings["batch_size"], session.comm.sync, began_with=began_with | {"dataset size": length})
    progress.updates = [0] * len(opts) if len(opts) > 1 else []
    reporter = Reporter(session, settings, length, given.report)
    rate = LearningRate(opts, settings, schedule, progress)
    decisions = Decisions(session, opts, rate, facts, progress, reporter)
    workers = session.link.workers_bounds or [session.group.size] * 2
    bounds = Bounds(settings["batch_min"] or 1, settings["batch_max"] or BATCH_MAX, *workers)
    calls = PolicyCalls(given.policy, settings, bounds, session, decisions, progress, reporter)
    trainer: Trainer  # it comes last, but its parts call methods of it
    forward = Forward(given.model, given.objective, opt, settings["train_precision"])
    synchronisation = Synchronisation(session, opt, progress, decisions, seed, lambda: trainer.agree())
    for each in opts:
        each.sync_buffers(given.model)
    # The parts of the training state, in the order in which they are loaded.
    parts: dict[str, Stateful] = {"model": uncompiled(given.model)}
    if session.replica is not None:
        from kfuse.optim.shards import ShardedModel  # few jobs need it

        parts["model"] = ShardedModel(uncompiled(given.model), session.replica)
    for k, each in enumerate(opts):
        number = f" {k}" if k else ""
        parts |= {f"trainable{number}": Trainable(each), f"optimizer{number}": each}
    parts |= {"statistics": opt.statistics, "policy": calls, "progress": progress, "synchronisation": synchronisation}
    parts |= {"decisions": decisions, "records": reporter}
    state = TrainingState(parts | ({} if given.scheduler is None else given.scheduler.parts()))
    about = given, session, decisions, calls, state, progress, reporter
    recovery = Recovery(*about, lambda: trainer.record_finished_update())
    passes, audit, curvature = None, None, None
    if len(opts) > 1:
        from kfuse.train.passes import Passes  # only where there are several optimizers

        passes = Passes(opts, progress, lambda: trainer.keep_context())
    if session.comm.audit_every is not None:
        from kfuse.train.audit import Audit  # only where it is used

        save_last = partial(recovery.save_last, fails=True)
        audit = Audit(given, session, forward, progress, reporter, save_last)
    if (every := settings.get("statistics_curvature_every")) is not None:
        from kfuse.train.curvature import Curvature  # only where it is used

        curvature = Curvature(given, session, progress, every)
    sampling = Sampling(session, settings, progress, sampler, opt.engine.options.reproducible)
    fetcher = _fetcher(given, session, sampler, progress, reporter)
    evaluations = Evaluations(given, session, progress, reporter, synchronisation)
    running = forward, decisions, calls, synchronisation, recovery, evaluations, passes, audit, curvature
    trainer = Trainer(given, session, progress, reporter, sampling, fetcher, *running)
    return trainer


def _facts(given: TrainArguments, session: Session, schedule: LRSchedule, inner: str) -> dict[str, Any]:
    """Returns what `kfuse.settings.rules` are asked of, but for the model's streams. inner: the optimizers' names."""
    settings, scheduler = given.settings, given.scheduler
    of_loop = "stepped in the loop's body" if any(map(has_scheduler, given.opts)) else None
    return (
        by_key(given.followed)
        | rules.run_facts(schedule.total, settings["lr_decay"], settings["lr_decay_fraction"])
        | by_key(session.comm.named())
        | {"job": "elastic" if session.elastic else "fixed"}
        | {"job.ranks": session.part[1]}
        | rules.policy_facts(given.policy)
        | rules.optimizer_facts(type(given.opt), inner)
        | {"optimizers": len(given.opts)}
        | {"scheduler": of_loop if scheduler is None else scheduler.name}
        | {"data": _kind_of(given.data)}
        | {"heldout": given.heldout is not None, "step_fn": given.objective.step_fn is not None}
        | {"weight_fn": given.objective.weight_fn is not None, "metrics": ", ".join(given.metrics) or None}
    )


def _kind_of(data: Dataset | Stream) -> str:
    if isinstance(data, IterableStream):
        return rules.NO_SEEK
    return "stream" if isinstance(data, Stream) else "data set"


def _fetcher(
    given: TrainArguments, session: Session, sampler: Sampler, progress: Progress, reporter: Reporter
) -> Fetcher:
    """Returns what fetches in the step's own thread, or in loader processes. Raises DataError where these cannot."""
    settings = given.settings
    loading = Loading(settings["num_workers"], settings["data_prefetch"], given.worker_init_fn)
    check_loaders(given.data, loading.workers)
    if not loading.workers:
        return Fetcher(given.data, sampler, *session.part)
    from kfuse.data.feeder import Feeder

    def report(pid: int, how: str) -> None:
        about = {"step": progress.step, "kind": "loader_lost", "worker": session.worker}
        reporter.report("event", {**about, "pid": pid, "how": how})

    return Feeder(given.data, sampler, loading, report, *session.part)


def _streams(given: TrainArguments) -> int | None:
    """Returns the streams of the model's `CarriedState`, one sample of each in every step; None: it has none.

    Raises ValueError where they differ, and for data in kfuse's own order or with a shorter last step.
    """
    counts = {len(state) for state in carried_states(given.model)}
    if not counts:
        return None
    if len(counts) > 1:
        raise ValueError(f"CarriedState of {sorted(counts)} streams in one model: must be the same number")
    (streams,), data = counts, given.data
    if isinstance(data, Dataset) and (len(data) % streams or type(data).order is Dataset.order):
        raise ValueError(
            f"CarriedState of {streams} streams: data must have an order of their own, in which each {streams} "
            f"samples are one of each stream: an iterable, or a subclass of kfuse.data.Dataset or MapData with a "
            f"method order(epoch), of a multiple of {streams} samples (docs/data.md)"
        )
    return streams


def _refuse_modules(given: TrainArguments, session: Session) -> None:
    """Raises ValueError for a model whose state several workers or checkpoints would not keep whole."""
    several = session.elastic or session.group.size > 1
    if several or session.comm.reproducible:
        _refuse_uneven_embeddings(given.model)
    if several or given.checkpoints is not None:
        refuse_partial_state(given.model)
    if session.elastic or len(given.opts) > 1:
        for each in given.opts:
            refuse_parameters_outside(given.model, each)


def _refuse_uneven_embeddings(model: nn.Module) -> None:
    """Raises ValueError for an embedding that renormalises its weights in forward: each worker would change others."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"module {name or type(model).__name__}: {type(module).__name__}(max_norm={module.max_norm}) changes "
                "its weights in forward, each worker differently; use max_norm=None and clip weights after opt.step()"
            )
