"""Hooks that move each gradient into its bucket as soon as backward has computed it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm.buckets import Bucket, dense_order
from kfuse.comm.step import REMEDY, EngineParts

STILL_THERE = "the last step's gradients are still there: call opt.zero_grad() after opt.step()"


class GradientHooks:
    """Post-accumulate hooks: each moves its parameter's new `.grad` into the bucket's `grads`, and sets it to None."""

    def __init__(self, engine: EngineParts) -> None:
        self._engine, self._params, self._names = engine, engine.params, engine.names
        self._buckets = engine.gradient_buckets
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        try:
            for bucket in self._buckets:
                for k, index in enumerate(bucket.layout.params):
                    self._handles.append(self._register(self._params[index], bucket, k))
        except BaseException:  # by Ctrl-C: nobody has these hooks to remove them
            self.close(drop=False)
            raise

    def _register(self, param: Parameter, bucket: Bucket, k: int) -> torch.utils.hooks.RemovableHandle:
        """Registers one closure, which calls nothing where all is as usual: it runs for every gradient.

        Hooks that the user registers later would run after it, and find no gradient. Where it meets a new one it moves
        itself to the end, and leaves this gradient to them: it is taken as the micro-batch ends.
        """
        engine, order, dtype, strided = self._engine, bucket.orders[k], bucket.layout.dtype, torch.strided
        large, numel = k in bucket.call_of, bucket.shapes[k].numel()

        def on_gradient(param: Tensor) -> None:
            if not (engine.now.collects or engine.wants_gradient()):
                return  # it stays with its parameter
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd reads it as a dict: `move_to_end` would do nothing
                return
            grad = param.grad
            if grad is None:
                return  # a hook of the user's has dropped it
            if bucket.packed or bucket.grads[k] is not None or type(grad) is not Tensor or grad is bucket.views[k]:
                self._refuse_another(grad, bucket, k)
            if grad.layout is not strided or param.dtype is not dtype or grad.numel() != numel:
                self._refuse(grad, bucket, k)
            bucket.grads[k], param.grad = grad if order is None else grad.permute(order), None
            del grad  # once it is packed nothing holds it
            bucket.missing -= 1
            if large and engine.now.collects:
                engine.now.pack_large(bucket, k)
            if not bucket.missing:
                engine.now.pack(bucket)

        handle: torch.utils.hooks.RemovableHandle
        handle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        hooks: Any = handle.hooks_dict_ref()
        return handle

    def _refuse_another(self, grad: Tensor, bucket: Bucket, k: int) -> None:
        """Raises RuntimeError for the last step's gradient, and for a second one in a micro-batch."""
        if grad is bucket.views[k]:
            raise RuntimeError(STILL_THERE)
        if bucket.packed or bucket.grads[k] is not None:
            raise RuntimeError(f"{self._names[bucket.layout.params[k]]} received a second gradient: {REMEDY}")

    def _refuse(self, grad: Tensor, bucket: Bucket, k: int) -> None:
        """Raises RuntimeError for a gradient that cannot be packed."""
        index = bucket.layout.params[k]
        param = self._params[index]
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._names[index]} of shape {tuple(param.shape)} has a sparse gradient: kfuse reduces dense ones "
                "only; make its layer with sparse=False"
            )
        was = f"{bucket.layout.dtype} {list(bucket.shapes[k])}"
        if param.dtype != bucket.layout.dtype or grad.numel() != bucket.shapes[k].numel():
            raise RuntimeError(
                f"{self._names[index]} was {was} and is {param.dtype} {list(param.shape)} now: change the model first, "
                "then make its optimizer"
            )

    def collect_set_by_hand(self, bucket: Bucket) -> None:
        """Takes gradients that backward did not bring. Raises RuntimeError for the last step's, and for one that was
        set after a backward whose gradient has been taken.
        """
        for k, index in enumerate(bucket.layout.params):
            if (grad := self._params[index].grad) is not None:
                if grad is bucket.views[k]:
                    raise RuntimeError(STILL_THERE)
                if bucket.packed or bucket.grads[k] is not None:
                    raise RuntimeError(
                        f"the gradient of {self._names[index]} was set by hand in a micro-batch after its backward, "
                        "whose gradient has been taken: change it by register_post_accumulate_grad_hook, compute the "
                        "micro-batch's gradients by torch.autograd.grad, or change their mean before opt.step()"
                    )
                self._refuse(grad, bucket, k)
                bucket.grads[k], self._params[index].grad = bucket.laid_out(k, grad), None
                bucket.missing -= 1

    def still_there(self) -> bool:
        return any(
            view is not None and self._params[index].grad is view
            for bucket in self._buckets
            for index, view in zip(bucket.layout.params, bucket.views, strict=True)
        )

    def close(self, drop: bool) -> None:
        """Removes the hooks: from now on gradients stay where autograd leaves them. drop: those of the last step go."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for bucket in self._buckets if drop else ():
            for index, view in zip(bucket.layout.params, bucket.views, strict=True):
                if self._params[index].grad is view:
                    self._params[index].grad = None


_OWNERS: dict[int, weakref.ref[EngineParts]] = {}  # by the parameter's id, which no other has while the engine lives


def owner(parameter: Parameter) -> EngineParts | None:
    reference = _OWNERS.get(id(parameter))
    return None if reference is None else reference()


def take_over(params: Sequence[Parameter], engine: EngineParts) -> None:
    """Makes `engine` the parameters' only owner. With two, the first hook would take the gradient from the second."""
    for key in [key for key, reference in _OWNERS.items() if reference() is None]:
        del _OWNERS[key]
    for param in params:
        other = owner(param)
        if other is not None and other is not engine:
            other.close()
            other.superseded = True
        _OWNERS[id(param)] = weakref.ref(engine)


def check_owner(engine: EngineParts) -> None:
    """Raises RuntimeError if a newer engine has taken parameters over: this one's would no longer be trained."""
    if engine.superseded:
        raise RuntimeError(
            "parameters of this optimizer belong to a newer kfuse optimizer, which was made over the same "
            "parameters: use that one (or call rebuild() on this one, which takes them back)"
        )


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


def close_together(engine: EngineParts) -> None:
    """Closes the engine's micro-batch, as backward is over. All engines that took part start their last messages.

    Then each waits for its own, in the same order on every rank: a reduction may have several phases, and an engine
    moves on to the next as it waits.
    """
    try:
        engine.close_micro_batch(then_wait=False)
    except BaseException:
        _CLOSED.clear()
        raise
    _CLOSED.append(engine)
    at_the_end_of_backward(_wait_for_closed)


def _wait_for_closed() -> None:
    engines = sorted(_CLOSED, key=lambda engine: engine.lane)
    _CLOSED.clear()
    for engine in engines:
        engine.on_last_micro_batch()


_CLOSED: list[EngineParts] = []


def check_parameters(params: Sequence[Parameter], names: Sequence[str]) -> None:
    """Raises ValueError for parameters that are not dense, fp32 or bf16 (on a CPU also float64), and on one device."""
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(f"parameters lie on {sorted(map(str, devices))}: a worker has one device")
    for name, p in zip(names, params, strict=True):
        if p.is_complex():
            raise ValueError(
                f"{name} is {p.dtype}: buckets hold real numbers: keep a real parameter of shape (..., 2), and call "
                "torch.view_as_complex in forward"
            )
        if p.dtype not in (torch.float32, torch.bfloat16) and (p.dtype, p.device.type) != (torch.float64, "cpu"):
            raise ValueError(
                f"{name} is {p.dtype}: parameters must be torch.float32 or torch.bfloat16, on a CPU also torch.float64 "
                "(fp16 compute comes from autocast)"
            )
        if dense_order(p) is None:
            raise ValueError(
                f"{name} is not dense in memory: its strides {p.stride()} for the shape {tuple(p.shape)} leave gaps or "
                "overlap"
            )
