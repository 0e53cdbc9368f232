"""Trains what a Hugging Face Trainer (transformers 5.23) was given with kfuse's own loop, `kf.fit`: elastic workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer
from transformers.integrations.liger import apply_liger_kernel
from transformers.integrations.neftune import activate_neftune
from transformers.trainer_utils import align_special_tokens

from kfuse import session
from kfuse.comm import devices
from kfuse.comm.devices import generators_restored
from kfuse.data import MapData
from kfuse.data.fetching import fetch
from kfuse.elastic.protocol import ENV_CONTROL
from kfuse.integrations.attached import TOKENS, figures
from kfuse.integrations.transformers_callbacks import Callbacks
from kfuse.integrations.transformers_refuse import refuse
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer, Optimizer
from kfuse.policies import BasePolicy
from kfuse.policies.compose import ComposePolicy
from kfuse.settings.declared import CommSettings
from kfuse.settings.tree import TrainSettings
from kfuse.train import fit as loop

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput

_NO_TOKENS = 1e-9  # the weight of a micro-batch of which no token counts: its gradient is zero, a weight must not be


def init(**settings: Unpack[CommSettings]) -> Session:
    """Joins the other workers, as `kf.init`. A script for kfuse-run calls it before it makes TrainingArguments.

    Accelerate takes LOCAL_RANK, by which kfuse-run gives a worker its GPU, for torchrun's, and fails without RANK;
    Trainer takes the first GPU that it sees. So LOCAL_RANK is removed, and the process sees its own GPU alone. Raises
    RuntimeError where it is too late for that, and what kf.init does.
    """
    given = os.environ.pop("LOCAL_RANK", None) if ENV_CONTROL in os.environ else None
    if given is not None:  # no look at the GPUs before: CUDA reads the variable once
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = None if seen is None else seen.split(",") if seen else []
        if names and int(given) >= len(names):
            raise devices.DeviceError(f"LOCAL_RANK={given}: must be below {len(names)}: CUDA_VISIBLE_DEVICES={seen}")
        os.environ["CUDA_VISIBLE_DEVICES"] = given if names is None else names[int(given)] if names else ""
    made = session.init(**settings)
    if given is not None and devices.count() > 1:
        raise RuntimeError("init: this process has looked at its GPUs already, and sees all: must be called before")
    return made


def fit(
    trainer: Trainer, policy: BasePolicy | None = None, *, tokens: bool | None = None, **settings: Unpack[TrainSettings]
) -> TrainOutput | None:
    """Trains as `trainer.train()` would on one process, on whatever workers there are; returns what that returns.

    None on a worker that left before the end. The trainer's model, data, collator, loss, optimizer, scheduler,
    callbacks and arguments count. A step has gradient_accumulation_steps micro-batches of per_device_train_batch_size
    samples, over all workers together, in Trainer's order. docs/frameworks.md has the rest.

    policy, settings: as kf.fit's, but for those settings that TrainingArguments have. tokens: as `attach`'s: whether
    the loss is divided by the tokens that the trainer counts; needed where it counts them.

    Raises ValueError or TypeError, before training, for what it does not train as Trainer does.
    """
    if policy is not None and not isinstance(policy, BasePolicy):
        raise TypeError(f"fit takes a kf.BasePolicy, not {type(policy).__name__}")
    refuse(trainer, settings)
    args, micro = trainer.args, trainer._train_batch_size
    trainer.is_in_train = True
    trainer._memory_tracker.start()
    _prepare_model(trainer)
    trainer.accelerator.free_memory()
    loader = trainer.get_train_dataloader()
    data = _Samples(loader)
    epochs, steps_an_epoch, _, samples, _, _, steps = trainer.set_initial_training_values(args, loader)
    by_epochs = args.max_steps <= 0 and args.num_train_epochs == epochs
    own: TrainSettings = {
        **settings,
        "seed": args.seed,
        "batch_size": micro * args.gradient_accumulation_steps,
        "micro_batch": micro,
        "epochs": epochs if by_epochs else None,
        "steps": None if by_epochs else steps,
        "clip_norm": args.max_grad_norm if args.max_grad_norm > 0 else None,
        "num_workers": args.dataloader_num_workers,
        "data_prefetch": args.dataloader_prefetch_factor or 2,
    }
    model = trainer.accelerator.prepare_model(trainer.model)
    opt, scheduler = _optimizer(trainer, steps)
    handler = trainer.callback_handler
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, scheduler
    trainer.model_wrapped, handler.train_dataloader = model, loader
    trainer._init_training_state(steps, steps_an_epoch, epochs, None, None)
    callbacks = Callbacks(trainer, opt, micro, samples)
    with _instead_of_trainers(trainer, opt, callbacks) as losses:
        loop.fit(
            model,
            data,
            opt,
            callbacks if policy is None else ComposePolicy(callbacks, policy),
            step_fn=_step(trainer, opt, callbacks, losses),
            weight_fn=_weight(trainer, data, micro, tokens, adapts=policy is not None),
            scheduler=scheduler,
            **own,
        )
    return callbacks.output


def _prepare_model(trainer: Trainer) -> None:
    """Does to the model what `trainer.train()` does to it before it is prepared."""
    args, model = trainer.args, trainer.model
    if args.use_liger_kernel:
        apply_liger_kernel(model, args.liger_kernel_config)
    if args.activation_checkpointing:
        given = dict(args.activation_checkpointing_kwargs or {})
        own = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=given or None, **own)
    if isinstance(trainer.processing_class, PreTrainedTokenizerBase | ProcessorMixin) and hasattr(model, "config"):
        align_special_tokens(model, trainer.processing_class)
    if trainer.neftune_noise_alpha is not None:
        trainer.neftune_hook_handle = activate_neftune(model, trainer.neftune_noise_alpha, trainer.accelerator)


class _Samples(MapData):
    """The samples of Trainer's loader, in its order."""

    def __init__(self, loader: Any) -> None:
        """Raises ValueError for an order that is not a function of the epoch."""
        super().__init__(loader.dataset, loader.collate_fn)
        self._sampler: Any = get_sampler(loader)
        known = isinstance(self._sampler, SeedableRandomSampler) and not self._sampler.replacement
        if not (known or type(self._sampler) is SequentialSampler) or len(self._sampler) != len(self.dataset):
            raise ValueError(
                f"fit: the training data's sampler is a {type(self._sampler).__name__}: must be Trainer's for "
                "train_sampling_strategy='random' or 'sequential', with accelerator_config's use_seedable_sampler"
            )

    def order(self, epoch: int) -> np.ndarray:
        if isinstance(self._sampler, SeedableRandomSampler):
            self._sampler.set_epoch(epoch)
        return np.fromiter(self._sampler, np.int64, len(self._sampler))


def _optimizer(trainer: Trainer, steps: int) -> tuple[DistributedOptimizer, LRScheduler]:
    """Returns the trainer's optimizer as one of kfuse, and its scheduler. steps: planned ones."""
    if trainer._created_lr_scheduler:  # of a training before
        trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
    optimizer = trainer.create_optimizer()
    opt = optimizer if isinstance(optimizer, DistributedOptimizer) else Optimizer(optimizer)
    scheduler = trainer.create_scheduler(steps)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(f"fit: lr_scheduler_type: {type(scheduler).__name__}: must be one that is stepped each step")
    return opt, scheduler


# -- a micro-batch's loss ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _instead_of_trainers(trainer: Trainer, opt: DistributedOptimizer, callbacks: Callbacks) -> Iterator[list[Tensor]]:
    """Context of training. Yields a list to which `training_step` adds the loss that it is to go backward from."""
    losses: list[Tensor] = []
    backward, log = trainer.accelerator.backward, trainer.log
    trainer.accelerator.backward = lambda loss, **_: losses.append(loss)
    # A step's random numbers are keyed by (seed, step, micro-batch): the generators' states tell nothing.
    trainer._save_rng_state = lambda folder: None
    trainer._save_checkpoint, trainer._load_best_model = callbacks.save, callbacks.load_best

    def log_noise_scale(logs: dict[str, float], *given: Any, **named: Any) -> None:
        log({**logs, **figures(opt)} if "loss" in logs else logs, *given, **named)

    trainer.log = log_noise_scale
    trainer.current_gradient_accumulation_steps = 1  # kfuse itself takes the mean over the step's micro-batches
    hooks = [
        opt.register_step_pre_hook(lambda *_: callbacks.before_update()),
        opt.register_step_post_hook(lambda *_: callbacks.call("on_optimizer_step")),
    ]
    try:
        yield losses
    finally:
        del trainer._save_rng_state, trainer._save_checkpoint, trainer._load_best_model
        trainer.accelerator.backward, trainer.log = backward, log
        for hook in hooks:
            hook.remove()


def _step(
    trainer: Trainer, opt: DistributedOptimizer, callbacks: Callbacks, losses: list[Tensor]
) -> Callable[[nn.Module, Any], Tensor]:
    def step(model: nn.Module, batch: Any) -> Tensor:
        now = opt.engine.now
        if now.current is not None and now.done:
            callbacks.call("on_substep_end")  # of the micro-batch before
        items = _items(trainer, batch, trainer.args.device)
        losses.clear()
        trainer.training_step(model, batch, None if items is None else items.clamp(min=1))
        if len(losses) != 1:
            raise RuntimeError(f"fit: training_step has called accelerator.backward {len(losses)} times: must be once")
        return losses.pop()

    return step


def _items(trainer: Trainer, batch: Any, device: str | torch.device) -> Tensor | None:
    """Returns what Trainer counts in a micro-batch to divide its loss by, tokens for instance; None: nothing."""
    items = trainer._get_num_items_in_batch([batch], torch.device(device))
    return None if items is None else torch.as_tensor(items)


def _weight(
    trainer: Trainer, data: _Samples, micro: int, tokens: bool | None, adapts: bool
) -> Callable[[Any], float] | None:
    """Returns by what kfuse weighs a micro-batch's mean loss, so that the step's is Trainer's.

    Trainer gives each micro-batch the tokens N of the whole step, and adds up the losses sum_j / N; or it averages the
    micro-batches' losses. Here each gets its own tokens n_j, and kfuse's mean of sum_j / n_j by the weights n_j is the
    same number, which no worker has to know before. That needs a loss that is divided by the number given. Raises
    ValueError where `tokens` is needed, and for a loss of which Trainer's sum is no mean.
    """
    with generators_restored(trainer.args.device):
        batch = fetch(data, data.order(0)[:micro], trainer.args.seed, 0)
    items = _items(trainer, batch, "cpu")
    if items is not None and tokens is None:
        raise ValueError(TOKENS.format(call="fit"))
    divides = trainer.loss_is_scaled_for_ga
    if divides is None:
        divides = trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and items is not None)
    if items is not None and tokens:
        if not divides:
            raise ValueError(
                "fit: tokens=True says that the loss is divided by the number of tokens, and by "
                "trainer.loss_is_scaled_for_ga it is not: must be tokens=False, or None there"
            )
        return lambda batch: max(float(_items(trainer, batch, "cpu")), _NO_TOKENS)  # type: ignore[arg-type]
    if divides and (adapts or trainer.args.gradient_accumulation_steps > 1):
        raise ValueError(
            "fit: the loss is not a sum divided by num_items_in_batch, so that Trainer would add up the means of a "
            "step's micro-batches: set trainer.loss_is_scaled_for_ga = False to average them"
        )
    return None if len(data) % micro == 0 else lambda batch: 1.0  # Trainer weighs an epoch's short last one alike
