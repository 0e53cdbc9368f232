"""Whether a step could draw from the global generators. If not, a training need not seed them for each micro-batch.

A look at types, once: whatever may be a user's code counts as drawing, and so does what may call some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from kfuse.data.dataset import TensorData

if TYPE_CHECKING:
    from kfuse.train.arguments import TrainArguments

_KINDS = (
    "activation batchnorm channelshuffle container conv distance flatten fold instancenorm linear loss normalization "
    "padding pixelshuffle pooling sparse upsampling"
)
_FILES = {f"torch.nn.modules.{kind}" for kind in _KINDS.split()}  # their layers do not draw, except:
_DRAWING = {nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention, nn.RReLU}
_OWN = {("kfuse.models", "ConvNet"), ("kfuse.models", "MLP"), ("kfuse.models", "ResidualBlock")}
_OWN |= {("kfuse.nn", "LayerNorm"), ("kfuse.nn", "RMSNorm")}


def may_draw(training: TrainArguments) -> bool:
    """Whether anything may draw in a step's fetch, forward, backward and update, or read the generators between steps.

    Evaluations and audits do not count: they seed for themselves, and restore the generators.
    """
    objective, opts = training.objective, (training.opt, *training.opt.inners)
    if training.user_loop or training.scheduler or objective.step_fn or objective.weight_fn:
        return True
    known: bool = (
        _is_known_loss(objective.loss_fn)
        and (type(training.data) is TensorData or _is_of(training.data, "kfuse.data.builtin"))
        and all(_is_of(policy, "kfuse.policies.") for policy in training.policy.with_parts())
        and all(_is_of(opt, "kfuse.optim.", "torch.optim.") and not _has_hooks(opt) for opt in opts)
        and all(_draws_nothing(module) for module in training.model.modules())
        and all(_is_plain(parameter) for parameter in training.model.parameters())
    )
    return not known or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def _is_of(thing: object, *modules: str) -> bool:
    return type(thing).__module__.startswith(modules)


def _is_known_loss(loss_fn: Any) -> bool:
    if isinstance(loss_fn, nn.Module):
        return _draws_nothing(loss_fn)
    return loss_fn is None or vars(F).get(getattr(loss_fn, "__name__", "")) is loss_fn


def _draws_nothing(module: nn.Module) -> bool:
    kind = type(module)
    known = (kind.__module__ in _FILES and kind not in _DRAWING) or (kind.__module__, kind.__qualname__) in _OWN
    return known and "forward" not in vars(module) and not _has_hooks(module)


def _has_hooks(thing: object) -> bool:
    """Whether it has a hook that is not kfuse's own."""
    every = (hook for name, hooks in vars(thing).items() if name.endswith("_hooks") for hook in (hooks or {}).values())
    return any(not getattr(hook, "__module__", "").startswith("kfuse.optim.") for hook in every)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether no hook of a user's runs with its gradient: the optimizer has one of its own."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return type(parameter) is nn.Parameter and not hooks[0] and len(hooks[1] or ()) <= 1
