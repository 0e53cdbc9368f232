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


def refuse_another(grad: Tensor, bucket: Bucket, k: int, name: str) -> None:
    """Raises RuntimeError for the last step's gradient, and for a second one in a micro-batch."""
    if grad is bucket.views[k]:
        raise RuntimeError(STILL_THERE)
    if not bucket.grads or bucket.grads[k] is not None:
        raise RuntimeError(f"{name} received a second gradient: {REMEDY}")


def refuse_unfit(grad: Tensor, param: Tensor, bucket: Bucket, k: int, name: str) -> None:
    """Raises RuntimeError for a gradient that cannot be packed."""
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{name} of shape {tuple(param.shape)} has a sparse gradient: kfuse reduces dense ones only; make its "
            "layer with sparse=False"
        )
    was = f"{bucket.layout.dtype} {list(bucket.shapes[k])}"
    if param.dtype != bucket.layout.dtype or grad.numel() != bucket.shapes[k].numel():
        raise RuntimeError(
            f"{name} was {was} and is {param.dtype} {list(param.shape)} now: change the model first, then make its "
            "optimizer"
        )


def collect_set_by_hand(bucket: Bucket, params: Sequence[Parameter], names: Sequence[str]) -> None:
    """Takes gradients that backward did not bring. Raises RuntimeError for the last step's, and for one that was set
    after a backward whose gradient has been taken.
    """
    for k, index in enumerate(bucket.layout.params):
        if (grad := params[index].grad) is not None:
            if grad is bucket.views[k]:
                raise RuntimeError(STILL_THERE)
            if not bucket.grads or bucket.grads[k] is not None:
                raise RuntimeError(
                    f"the gradient of {names[index]} was set by hand in a micro-batch after its backward, whose "
                    "gradient has been taken: change it by register_post_accumulate_grad_hook, compute the "
                    "micro-batch's gradients by torch.autograd.grad, or change their mean before opt.step()"
                )
            refuse_unfit(grad, params[index], bucket, k, names[index])
            bucket.grads[k], params[index].grad = bucket.laid_out(k, grad), None
            bucket.missing -= 1


# -- given, taken back and dropped ------------------------------------------------------------------------------------


def show(buckets: Sequence[Bucket], params: Sequence[Parameter], unused: Collection[int] = ()) -> None:
    """Sets each `p.grad` to what its bucket has, but for those that are `unused`. With sharded state none has."""
    for bucket in buckets:
        if bucket.visible is not bucket.mean:
            bucket.visible.copy_(bucket.mean)
        if not bucket.are_views():  # the model's memory format has changed since, and gradients with it
            bucket.renew_views()
        for index, view in zip(bucket.layout.params, bucket.views, strict=True):
            if view is not None and index not in unused:
                params[index].grad = view


def take_back(buckets: Sequence[Bucket], params: Sequence[Parameter], names: Sequence[str], step: Step) -> None:
    """Where the user replaced a `p.grad` (it may also be changed in place), buckets get the values.

    Raises RuntimeError where its `.data` was replaced, and where `p.grad` was set for a parameter that no worker gave
    a gradient: each worker may have set another one.
    """
    no_backward = step.done > 0 and len(step.in_doubt) == len(params)
    replaced: list[tuple[Bucket, int, Tensor]] = []
    for bucket in buckets:
        if not bucket.are_views():
            raise RuntimeError("p.grad.data = ... after backward: set p.grad = ..., or change p.grad in place")
        if all(map(operator.is_, [p.grad for p in bucket.tensors], bucket.views)):
            continue
        for k, (index, view) in enumerate(zip(bucket.layout.params, bucket.views, strict=True)):
            grad = params[index].grad
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
        params[index].grad = bucket.views[k]
        bucket.view(bucket.visible)[k].copy_(gradient)
        step.in_doubt.discard(index)
        step.left_out.discard(index)


def still_there(buckets: Sequence[Bucket], params: Sequence[Parameter]) -> bool:
    """Whether some parameters have the gradients that the last step was made with."""
    return any(
        view is not None and params[index].grad is view
        for bucket in buckets
        for index, view in zip(bucket.layout.params, bucket.views, strict=True)
    )


def drop(buckets: Sequence[Bucket], params: Sequence[Parameter]) -> None:
    """Takes what `show` has given off the parameters."""
    for bucket in buckets:
        for index, view in zip(bucket.layout.params, bucket.views, strict=True):
            if view is not None and params[index].grad is view:
                params[index].grad = None


# -- the end of a backward --------------------------------------------------------------------------------------------


def without_grad(act: T) -> T:
    """Decorator: as torch.no_grad(), which takes as long as a small kernel."""

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
