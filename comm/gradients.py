"""`p.grad`: taken from backward and from the user, given as the mean over all workers, taken back and dropped.

After the last micro-batch's backward each `p.grad` is the mean gradient over the global batch (a view of its bucket),
as with DistributedDataParallel; of a bf16 parameter rounded to bf16, as torch wants it, while the bucket has it in
fp32.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm.buckets import Bucket
from kfuse.comm.step import REMEDY, Step

T = TypeVar("T", bound=Callable[..., Any])
STILL_THERE = "the last step's gradients are still there: call opt.zero_grad() after opt.step()"


# -- taken ------------------------------------------------------------------------------------------------------------


def take(bucket: Bucket, k: int, name: str, by_hand: bool = False) -> bool:
    """Moves the k-th parameter's new `.grad` into the bucket's `grads`. Returns False where there is none.

    by_hand: it was set after the micro-batch's backward, perhaps. Raises RuntimeError for the last step's gradient, for
    a second one in a micro-batch, and for one that cannot be packed.
    """
    param = bucket.tensors[k]
    if (grad := param.grad) is None:
        return False
    if grad is bucket.views[k]:
        raise RuntimeError(STILL_THERE)
    if not bucket.grads or bucket.grads[k] is not None:
        if not by_hand:
            raise RuntimeError(f"{name} received a second gradient: {REMEDY}")
        raise RuntimeError(
            f"the gradient of {name} was set by hand in a micro-batch after its backward, whose gradient has been "
            "taken, or another backward brought it: change it by register_post_accumulate_grad_hook, compute the "
            f"micro-batch's gradients by torch.autograd.grad, or change their mean before opt.step(); {REMEDY}"
        )
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{name} of shape {tuple(param.shape)} has a sparse gradient: kfuse reduces dense ones only; make its "
            "layer with sparse=False"
        )
    if param.dtype != bucket.layout.dtype or grad.numel() != bucket.shapes[k].numel():
        raise RuntimeError(
            f"{name} was {bucket.layout.dtype} {list(bucket.shapes[k])} and is {param.dtype} {list(param.shape)} now: "
            "change the model first, then make its optimizer"
        )
    bucket.grads[k], param.grad = bucket.laid_out(k, grad), None
    bucket.missing -= 1
    return True


# -- given, taken back and dropped ------------------------------------------------------------------------------------


def show(buckets: Sequence[Bucket], unused: Collection[int] = ()) -> None:
    """Sets each `p.grad` to what its bucket has, but for those that are `unused`. With sharded state none has."""
    for bucket in buckets:
        if not bucket.are_views():  # the model's memory format has changed since, and gradients with it
            bucket.renew_views()
        for index, param, view in zip(bucket.layout.params, bucket.tensors, bucket.views, strict=True):
            if view is not None and index not in unused:
                param.grad = view


def take_back(buckets: Sequence[Bucket], names: Sequence[str], step: Step) -> None:
    """Where the user replaced a `p.grad` (it may also be changed in place), buckets get the values.

    Raises RuntimeError where its `.data` was replaced, and where `p.grad` was set for a parameter that no worker gave
    a gradient: each worker may have set another one.
    """
    no_backward = step.done > 0 and len(step.in_doubt) == len(names)
    replaced: list[tuple[Bucket, int, Tensor]] = []
    for bucket in buckets:
        if not bucket.are_views():
            raise RuntimeError("p.grad.data = ... after backward: set p.grad = ..., or change p.grad in place")
        if all(map(operator.is_, [p.grad for p in bucket.tensors], bucket.views)):
            continue
        for k, (index, view) in enumerate(zip(bucket.layout.params, bucket.views, strict=True)):
            grad = bucket.tensors[k].grad
            if grad is None or grad is view:
                continue
            if (no_backward or index in step.left_out) and grad.any():  # zeros for None are the same everywhere
                raise RuntimeError(
                    f"the gradient of {names[index]} was set by hand (p.grad = ...) after the step's gradients were "
                    "reduced over the workers: set it before the step's last micro-batch ends, in the loop over `step` "
                    "or in `with opt.micro_batch(...)`; it is that micro-batch's mean gradient"
                )
            replaced.append((bucket, k, grad.clone()))  # gradients may lie in each other's places
    for bucket, k, gradient in replaced:
        index = bucket.layout.params[k]
        bucket.tensors[k].grad = bucket.views[k]
        bucket.view(bucket.visible)[k].copy_(gradient)
        step.in_doubt.discard(index)
        step.left_out.discard(index)


def shown(buckets: Sequence[Bucket]) -> list[Parameter]:
    """Returns the parameters that have the gradients with which the last step was made."""
    pairs = ((param, view) for bucket in buckets for param, view in zip(bucket.tensors, bucket.views, strict=True))
    return [param for param, view in pairs if view is not None and param.grad is view]


# -- the end of a backward --------------------------------------------------------------------------------------------


def without_grad(act: T) -> T:
    """Decorator: as torch.no_grad(), at a fraction of its cost."""

    @wraps(act)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return act(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return cast(T, run)


def at_the_end_of_backward(act: Callable[[], None]) -> None:
    """Runs `act` when the backward under way is over, after the callbacks that were queued before.

    Where that is an inner backward of another one, as in reentrant activation checkpointing, the inner one counts.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def at_the_end_of_outer_backward(act: Callable[[], None]) -> None:
    """Runs `act` when the outermost backward under way is over.

    Reentrant activation checkpointing runs a backward for each segment inside a node of the outer backward. At the end
    of the inner one that node is the current one, and `act` is queued again as the node is over.
    Raises RuntimeError under compiled autograd, which has no such callbacks.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # where it is not imported, it is not in use
    if torch.compiler.is_compiling() or getattr(compiled, "in_compiled_autograd_region", False):
        raise RuntimeError(
            "a bare backward under compiled autograd has no end that kfuse could notice: wrap it in `with "
            "opt.micro_batch(samples=len(x))`, or use kf.fit or kf.DataLoader"
        )

    def at_end() -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            act()
            return

        def queue(*_: object) -> None:
            handle.remove()  # the graph may be retained for another backward
            at_the_end_of_backward(at_end)

        # Autograd calls the hooks that a node has when it is over, also those that came while it ran (torch 2.13,
        # torch/csrc/autograd/engine.cpp: call_post_hooks).
        handle = node.register_hook(queue)

    at_the_end_of_backward(at_end)
