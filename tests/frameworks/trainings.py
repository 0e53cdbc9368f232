"""The same small trainings by Trainer, Accelerate and Lightning, with and without kfuse's monitor.

A Llama of random weights on random tokens. Of each sequence the first labels count, as many as an exponential
distribution says: their numbers have a coefficient of variation near 1.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import kfuse as kf
from kfuse.integrations.growth import Growth
from kfuse.statistics.step_stats import StepStats

WORDS, LENGTH, SEQUENCES = 50, 33, 90
UNITS = ["LlamaDecoderLayer"]  # FSDP2 gathers each of them by itself

Row = dict[str, Tensor]


def sequences(count: int = SEQUENCES) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        ids = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        known = 2 + int(torch.empty(1).exponential_(1 / 7, generator=generator).clamp(max=LENGTH - 3))
        labels = torch.where(torch.arange(LENGTH) < known, ids, -100)
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def collate(rows: list[Row]) -> Row:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class Case:
    """accumulate: micro-batches of a step, of 2 sequences each on each process. lr 0: the model stays as it is.

    launched: by torchrun, one process too. fsdp: FSDP2 on several processes, not by Lightning. By Trainer alone:
    evaluated: with evaluations, in which the model generates, and checkpoints in between. compiled: by torch.compile.
    interrupted: within the second step, and then trained again.
    """

    accumulate: int = 2
    epochs: int = 2
    lr: float = 1e-3
    clip: float = 0.0
    bf16: bool = False
    launched: bool = False
    fsdp: bool = False
    evaluated: bool = False
    compiled: bool = False
    interrupted: bool = False
    asked: dict[int, int] | None = None
    """At which steps a policy asks for how many times the first batch. Then the rate falls in a line to zero."""
    planned: bool = False
    """By a schedule: `asked` has from which sample on a step has how many times the first batch."""
    directory: str = "unused"
    """Of checkpoints."""
    save: int | None = None
    """At this step a checkpoint is written; Lightning writes one at each epoch's end, and this is an epoch's number."""
    resume: bool = False
    """From that checkpoint."""

    @property
    def updates(self) -> int:
        """Of the first batch size."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        micro_batches = math.ceil(SEQUENCES / 2 / processes)
        return self.epochs * math.ceil(micro_batches / self.accumulate)

    def growth(self) -> Growth | None:
        if self.asked is None or not self.planned:
            return None if self.asked is None else Growth(AtSteps(self.asked), 1024)
        first = 2 * self.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
        return Growth(kf.SchedulePolicy(" ".join(f"{begin}:{times * first}" for begin, times in self.asked.items())))


class AtSteps(kf.BasePolicy):
    def __init__(self, asked: dict[int, int]) -> None:
        self.asked = asked

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        times = self.asked.get(signals.step)
        return None if times is None else kf.Decision(batch_size=times * (signals.base_batch_size or 0))


@dataclass(frozen=True)
class Seen:
    """What a training left behind: its parameters, what was logged, and each step's figures, where it was monitored."""

    parameters: list[Tensor]
    logged: list[dict[str, Any]]
    stats: list[StepStats]
    batches: list[Row]
    """Each micro-batch of this process."""


Training = Callable[[Case, bool], Seen]


def by_trainer(case: Case, monitored: bool) -> Seen:
    model, stats = llama(), list[StepStats]()
    batches = recorded(model) if case.asked else []
    folder = case.directory if case.asked else tempfile.mkdtemp()
    between, saving = "steps" if case.evaluated else "no", "steps" if case.evaluated or case.save else "no"
    kind = "linear" if case.asked else "constant"
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=case.accumulate,
        num_train_epochs=case.epochs, learning_rate=case.lr, lr_scheduler_type=kind, max_grad_norm=case.clip,
        bf16=case.bf16, logging_steps=5, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        eval_strategy=between, save_strategy=saving, eval_steps=3, save_steps=case.save or 3,
        torch_compile=case.compiled, torch_compile_backend="eager" if case.compiled else None,
        fsdp=case.fsdp, fsdp_config={"transformer_layer_cls_to_wrap": UNITS} if case.fsdp else None,
    )  # fmt: skip
    if case.fsdp:
        let_accelerate_shard()
    trainer = Trainer(model, arguments, collate, sequences(), sequences(4))
    trainer.add_callback(Generate())
    if monitored:
        from kfuse.integrations.transformers import attach

        attached = attach(trainer, tokens=True, growth=case.growth())
        collect(trainer.add_callback, attached, stats)
    if case.interrupted:
        trainer.add_callback(Interrupt())
        with suppress(InterruptedError):
            trainer.train()
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{case.save}" if case.resume else None)
    if not case.asked:
        shutil.rmtree(folder)
    return Seen(parameters_of(model, case.fsdp), trainer.state.log_history, stats, batches)


class Generate(TrainerCallback):  # type: ignore[misc]
    def on_evaluate(self, *given: Any, model: Any, **named: Any) -> None:
        model.generate(torch.zeros(1, 4, dtype=torch.long), max_new_tokens=2)


class Interrupt(TrainerCallback):  # type: ignore[misc]
    seen = 0

    def on_substep_end(self, *given: Any, **named: Any) -> None:
        self.seen += 1
        if self.seen == 2:
            raise InterruptedError


def collect(add: Callable[[Any], object], attached: Any, stats: list[StepStats]) -> None:
    """Keeps each step's figures."""

    class Collect(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            stats.append(attached.monitor.stats)

    add(Collect())


def by_accelerate(case: Case, monitored: bool) -> Seen:
    accelerator, model, opt, loader, schedule, batches = prepared(case)
    logged, stats = list[dict[str, Any]](), list[StepStats]()
    accelerator.log = lambda values, step: logged.append(values)
    if monitored:
        from kfuse.integrations.accelerate import attach

        monitor = attach(accelerator, model, growth=case.growth())
    step = first = done = 0  # updates, epochs before, and micro-batches in the epoch
    at = Path(case.directory, "at")
    if case.resume:
        accelerator.load_state(case.directory)
        step, first, done = torch.load(at)
    for epoch in range(first, case.epochs):
        for index, batch in enumerate(accelerator.skip_first_batches(loader, done) if done else loader, done):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                opt.step()
                schedule.step()
                opt.zero_grad()
            if accelerator.sync_gradients and monitored:
                stats.append(monitor.stats)  # type: ignore[arg-type]
                accelerator.log({"loss": loss.item()}, step=step)
                step += 1
                if step == case.save and not case.resume:
                    accelerator.save_state(case.directory)
                    torch.save((step, epoch, index + 1), at)
        done = 0
    inner = accelerator.unwrap_model(model)
    return Seen(parameters_of(inner, case.fsdp), logged, stats, batches)


def by_tokens(case: Case, monitored: bool) -> Seen:
    """By Accelerate's guide to gradient accumulation with sequences of different lengths. Monitored."""
    from kfuse.integrations.accelerate import attach

    accelerator, model, opt, loader, *_ = prepared(case)
    monitor, stats = attach(accelerator, model, weighted=True), list[StepStats]()
    for _ in range(case.epochs):
        batches = list(loader)
        for window in (batches[k : k + case.accumulate] for k in range(0, len(batches), case.accumulate)):
            counts = [(batch["labels"][:, 1:] != -100).sum() for batch in window]
            everywhere = accelerator.reduce(torch.stack(counts).sum(), "sum")
            for batch, mine in zip(window, counts, strict=True):
                with nullcontext() if batch is window[-1] else accelerator.no_sync(model):
                    loss = model(**batch).loss * mine * accelerator.num_processes * case.accumulate / everywhere
                    monitor.samples, monitor.accumulate = mine, everywhere / (mine * accelerator.num_processes)
                    accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            stats.append(monitor.stats)  # type: ignore[arg-type]
    return Seen(parameters_of(accelerator.unwrap_model(model)), [], stats, [])


def prepared(case: Case) -> tuple[Any, Any, Any, Any, Any, list[Row]]:
    """Returns an accelerator; a model, an optimizer, a loader and a schedule that it has prepared; and the batches."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # of the case before
    sharding = None
    if case.fsdp:
        PartialState(cpu=True)
        let_accelerate_shard()
        units: Any = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": UNITS}
        sharding = FullyShardedDataParallelPlugin(fsdp_version=2, **units)
    accelerator = Accelerator(
        gradient_accumulation_steps=case.accumulate, cpu=True, mixed_precision="bf16" if case.bf16 else "no",
        fsdp_plugin=sharding,
    )  # fmt: skip
    model = llama()
    batches = recorded(model) if case.asked else []
    opt = torch.optim.AdamW(model.parameters(), case.lr)
    updates = case.updates * accelerator.num_processes  # the schedule is stepped once for each process
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda made: rate(case, made / updates))
    generator = torch.Generator().manual_seed(1)
    loader: Any = DataLoader(sequences(), 2, shuffle=not case.asked, collate_fn=collate, generator=generator)  # type: ignore[arg-type]
    return accelerator, *accelerator.prepare(model, opt, loader, schedule), batches


def by_own_loop(case: Case, monitored: bool) -> Seen:
    """A loop over DDP, over FSDP2, or in one process, with the rate by a scheduler of torch. Monitored, and grows."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and not dist.is_initialized():
        dist.init_process_group("gloo")
    inner = model = llama()
    batches = recorded(inner)
    if case.fsdp:
        for module in (*inner.model.layers, inner):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif several:
        model = DistributedDataParallel(inner)
    opt = torch.optim.AdamW(model.parameters(), case.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda made: rate(case, made / case.updates))
    watch = kf.fsdp_monitor if case.fsdp else kf.ddp_hook if several else kf.monitor
    monitor, stats = watch(model, samples=2, accumulate=case.accumulate), list[StepStats]()
    assert case.asked is not None
    growth = kf.growth(monitor, AtSteps(case.asked), opt, [schedule], batch_max=1024)
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rows = [collate(sequences()[at : at + 2]) for at in range(2 * rank, SEQUENCES, 2 * processes)]
    done, at = 0, Path(case.directory, f"own{rank}")  # micro-batches
    if case.resume:
        saved = torch.load(at, weights_only=False)
        for each, state in zip((inner, opt, schedule, growth), saved["states"], strict=True):
            each.load_state_dict(state)
        done = saved["done"]
    while done + growth.accumulate <= len(rows):
        for index in range(growth.accumulate):
            last = index == growth.accumulate - 1
            inner.set_requires_gradient_sync(last) if case.fsdp else setattr(model, "require_backward_grad_sync", last)
            (model(**rows[done + index]).loss / growth.accumulate).backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
        done += growth.accumulate
        growth.step()
        stats.append(monitor.stats)  # type: ignore[arg-type]
        if monitor.ended == case.save:
            states = [each.state_dict() for each in (inner, opt, schedule, growth)]
            torch.save({"states": states, "done": done}, at)
    return Seen(parameters_of(inner, case.fsdp), [], stats, batches)


def let_accelerate_shard() -> None:
    """On CPUs Accelerate takes DDP where FSDP2 was asked for, and says nothing: it shards for GPUs alone."""
    from accelerate import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def by_lightning(case: Case, monitored: bool) -> Seen:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    stats = list[StepStats]()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def training_step(self, batch: Row, _: int) -> Tensor:
            loss: Tensor = self.inner(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters(), case.lr)
            schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda made: rate(case, made / case.updates))
            return [opt], [{"scheduler": schedule, "interval": "step"}]

    class Collect(lightning.Callback):
        def on_before_zero_grad(self, *given: Any) -> None:
            if (found := noise.monitor.stats) is not None and (not stats or found.step != stats[-1].step):
                stats.append(found)

    module, callbacks = Module(), list[Any]()
    batches = recorded(module.inner) if case.asked else []
    if monitored:
        from kfuse.integrations.lightning import NoiseScale

        noise = NoiseScale(case.growth())
        callbacks = [noise, Collect()]
    if case.save is not None:
        callbacks.append(lightning.pytorch.callbacks.ModelCheckpoint(case.directory, "{epoch}", save_top_k=-1))
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2 if several else 1, strategy="ddp" if several else "auto", max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate, gradient_clip_val=case.clip or None, callbacks=callbacks,
        precision="bf16-mixed" if case.bf16 else None, logger=False, enable_progress_bar=False,
        enable_checkpointing=case.save is not None, enable_model_summary=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    loader: Any = DataLoader(sequences(), 2, shuffle=not case.asked, collate_fn=collate, generator=generator)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=f"{case.directory}/epoch={case.save}.ckpt" if case.resume else None)
    if monitored:
        stats.append(noise.monitor.stats)  # type: ignore[union-attr, arg-type]
    return Seen(parameters_of(module), [dict(trainer.callback_metrics)], stats, batches)


def rate(case: Case, done: float) -> float:
    """The factor of the learning rate once this part of the training is done."""
    return max(0.0, 1.0 - done) if case.asked else 1.0


def recorded(model: nn.Module) -> list[Row]:
    """Returns a list in which each micro-batch's tensors will be."""
    batches = list[Row]()

    def record(module: nn.Module, arguments: Any, named: Any) -> None:
        batches.append({name: named[name].clone() for name in ("input_ids", "labels")})

    model.register_forward_pre_hook(record, with_kwargs=True)
    return batches


def parameters_of(model: nn.Module, sharded: bool = False) -> list[Tensor]:
    params: list[Any] = list(model.parameters())
    return [(param.full_tensor() if sharded else param.clone()).detach() for param in params]


TRAININGS: dict[str, Training] = {"trainer": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning}
TRAININGS["tokens"] = by_tokens
OWN = {"own": by_own_loop}


def gradients() -> Iterator[tuple[Tensor, int]]:
    """Of each sequence, in float64: the gradient of the sum of its tokens' losses, and their number."""
    model = llama(torch.float64)
    for row in sequences():
        tokens = int((row["labels"][1:] != -100).sum())
        loss = model(**collate([row])).loss * tokens
        found = torch.autograd.grad(loss, list(model.parameters()))
        yield torch.cat([each.flatten() for each in found]), tokens
