"""What `p.grad` is with sharded state: a tensor without memory, since no worker has a parameter's whole mean gradient.

It says that some worker gave the parameter a gradient, has its shape, dtype and device, and answers GradScaler.
Everything else raises an error: code that reads or changes gradients would work with numbers that are not there.

One change has no effect instead: that of a backward which reaches the parameter while the last step's gradients are
still there, as a GAN's generator loss reaches the discriminator. As with whole gradients `zero_grad` drops what it
adds, and the engine refuses a step with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kfuse.comm.buckets import Bucket

_REFUSED = (
    "{op} of a p.grad: with comm.state=sharded each worker has the mean gradient of its shard only, and p.grad has no "
    "values. To clip use clip_norm=..., for its norm opt.stats.grad_norm, to drop it opt.zero_grad(); all else needs "
    "comm.state=replicated"
)

_TENSOR: Any = Tensor
_PAST_DISPATCH = "data_ptr untyped_storage numpy tolist share_memory_ __array__ __dlpack__ __bool__ __reduce_ex__"
# Python's calls that reach memory without an operation of `__torch_dispatch__`.
_REFUSED_CALLS = {getattr(_TENSOR, name) for name in _PAST_DISPATCH.split()}
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_ADDING = torch.ops.aten.add_.Tensor
_UNSCALING = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

# (buckets' numbers, found_inf, inv_scale): sets found_inf to 1 where a gradient of any worker is not finite, and
# multiplies this worker's shards of the buckets' gradients by inv_scale.
Unscale = Callable[[Sequence[int], Tensor, Tensor], None]


class ShardedGradient(Tensor):
    """A parameter's gradient of which this worker has a shard, or nothing. Any operation on it raises RuntimeError."""

    _bucket: weakref.ref[Bucket]  # not a strong reference, since the bucket has one to this
    _k: int  # which of the bucket's views it is

    @staticmethod
    def __new__(cls, bucket: Bucket, k: int, like: Tensor) -> ShardedGradient:
        """The bucket's k-th. like: on any device, with the shape, strides and dtype that it is to have."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: ShardedGradient = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=bucket.device)
        made._bucket, made._k = weakref.ref(bucket), k
        return made

    def __init__(self, bucket: Bucket, k: int, like: Tensor) -> None:
        """See `__new__`."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sets_data = func == _TENSOR.data.__set__ and args[0] is not args[1]  # the same: by nn.Module.to
        if sets_data or func in _REFUSED_CALLS:
            raise RuntimeError(_REFUSED.format(op="data" if sets_data else func.__name__))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _ADDING and isinstance(args[0], ShardedGradient) and args[0]._is_accumulated_into():
            return args[0]
        if func is not _UNSCALING:
            raise RuntimeError(_REFUSED.format(op=func.overloadpacket.__name__))
        gradients, found_inf, inv_scale = args
        own = [gradient._bucket() if isinstance(gradient, ShardedGradient) else None for gradient in gradients]
        buckets = [bucket for bucket in own if bucket is not None]
        if len(buckets) < len(own) or (unscale := buckets[0].unscale) is None:
            raise RuntimeError(_REFUSED.format(op="GradScaler's unscaling"))
        unscale(sorted({bucket.index for bucket in buckets}), found_inf, inv_scale)
        return None

    def _is_accumulated_into(self) -> bool:
        """Whether autograd adds to it, as to any gradient that is still there; its bucket is told.

        The engine's hook, which autograd calls next, raises an error unless `zero_grad` can still drop what was added.
        It knows the bucket's present gradients only: of another one, such as a closed engine's, this is False.
        """
        bucket, node = self._bucket(), torch._C._current_autograd_node()
        if bucket is None or bucket.views[self._k] is not self or node is None or node.name() != _ACCUMULATES:
            return False
        bucket.added_to = True
        return True
