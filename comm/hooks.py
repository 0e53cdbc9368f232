"""Hooks by which a bucket gets its gradients from backward: one for each parameter, then one that takes all.

A hook costs more than what it does for one gradient. So once a micro-batch has brought all of a bucket's gradients, the
hook of the one that came last takes all of them in the next one. Where it does not find them all, or finds something
unusual, they are taken one by one again, and the bucket learns anew.

A bare backward, in no context, is noticed by the first gradient that comes, whichever it is: there all hooks stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from kfuse.comm import gradients
from kfuse.comm.buckets import Bucket
from kfuse.comm.devices import StreamOrder

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")


class BucketHooks:
    """The hooks of one bucket's parameters. They are registered by `watch`."""

    last: int | None = None  # which gradient comes last, where its hook takes all; None: each has a hook
    nodes: Sequence[object] = ()  # of autograd, which accumulate the gradients
    _first = 0  # which one came first, when they were last taken one by one

    def __init__(
        self,
        bucket: Bucket,
        names: Sequence[str],
        streams: StreamOrder | None,
        wanted: Callable[[], bool],
        announced: Callable[[], bool],
        pack: Callable[[Bucket], None],
    ) -> None:
        """names: of all parameters. streams: of a GPU. wanted: whether to take a gradient that has just come.

        announced: whether the micro-batch under way is no bare backward. pack: is called when the bucket has all of a
        micro-batch's gradients.
        """
        self.bucket, self._streams = bucket, streams
        self._wanted, self._announced, self._pack = wanted, announced, pack
        self._names = [names[index] for index in bucket.layout.params]
        self._handles: dict[int, RemovableHandle] = {}

    def watch(self) -> None:
        """Registers a hook for each parameter that has none."""
        self.last, self.nodes = None, ()
        for k, param in enumerate(self.bucket.tensors):
            if k not in self._handles:
                self._handles[k] = param.register_post_accumulate_grad_hook(partial(self._on_gradient, k))

    def watch_last(self, k: int) -> None:
        """A micro-batch has given all of the bucket's gradients, the k-th at last: from now on its hook takes them all.
        The first one's stays too, since a bare backward may follow.

        On a GPU that hook reads the other gradients on its own stream. So all must go on to be accumulated on that one:
        autograd accumulates on the stream on which the accumulating node was made, and keeps a node that is held.
        """
        if self._streams is not None:
            if self._streams.several:
                return
            self.nodes = [get_gradient_edge(p).node for p in self.bucket.tensors]
        for other in self._handles.keys() - {self._first, k} if self._announced() else ():
            self._handles.pop(other).remove()
        self.last = k

    @property
    def are_few(self) -> bool:
        """Whether some parameters have none."""
        return len(self._handles) < len(self._names)

    def close(self) -> None:
        while self._handles:
            self._handles.popitem()[1].remove()

    def _on_gradient(self, k: int, _: Tensor) -> None:
        """The k-th gradient has come.

        Hooks that the user registers later would run after this one, and find no gradient. Where it meets a new one it
        moves itself to the end, and leaves this gradient to them: it is taken as the micro-batch ends.
        """
        if not self._wanted() or self.last not in (None, k):
            return  # not now, or a later hook takes it
        handle = self._handles[k]
        hooks: Any = handle.hooks_dict_ref()
        if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
            hooks[handle.id] = hooks.pop(handle.id)  # autograd reads it as a dict: `move_to_end` would do nothing
        elif self.last is None:
            self._take(k)
        elif not self._take_all():
            self.watch()
            for other in range(len(self._names)):
                self._take(other)

    def _take_all(self) -> bool:
        """Packs all gradients. Returns False, and does nothing, where one is not there, or unusual."""
        bucket = self.bucket
        grads = [p.grad for p in bucket.tensors]
        if (
            bucket.missing < len(grads)
            or NoneType in map(type, grads)
            or any(map(is_, grads, bucket.views))
            or tuple(map(Tensor.numel, grads)) != bucket.table.numels
            or {*map(_DTYPE, bucket.tensors)} != {bucket.layout.dtype}
            or {*map(_LAYOUT, grads)} != {torch.strided}
        ):
            return False
        for p in bucket.tensors:
            p.grad = None
        bucket.grads = [bucket.laid_out(k, grad) for k, grad in enumerate(grads)] if bucket.is_permuted else grads
        bucket.missing = 0
        del grads  # once they are packed nothing holds them
        self._pack(bucket)
        return True

    def _take(self, k: int) -> None:
        """Takes the k-th gradient, if it is there; packs the bucket, where none is missing now."""
        bucket = self.bucket
        if not gradients.take(bucket, k, self._names[k]):
            return  # a hook of the user's has dropped it, or it has not come yet
        if bucket.missing == len(self._names) - 1:
            self._first = k
        if not bucket.missing:
            self._pack(bucket)
            self.watch_last(k)

    def take_rest(self) -> None:
        """After backward: takes the gradients that no hook has taken, and packs the bucket, if that is still to do."""
        bucket = self.bucket
        if {*map(type, [p.grad for p in bucket.tensors])} != {NoneType}:
            for k, name in enumerate(self._names):
                gradients.take(bucket, k, name, by_hand=True)
        if bucket.grads:
            if self.last is not None and bucket.missing < len(bucket.grads):
                self.watch()  # not all came, or the last one came earlier
            self._pack(bucket)
