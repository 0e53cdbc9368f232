"""`kf.ddp_hook`: gradient statistics of training with torch's DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfuse.comm.gradients import at_the_end_of_backward
from kfuse.integrations.backward import BackwardWatch, OfOneModel
from kfuse.integrations.measure import Monitor, Options, block_norms, drop_before_exit, one_device, total_square
from kfuse.kernels import BLOCK
from kfuse.kernels.private_names import need


def ddp_hook(
    model: DistributedDataParallel,
    *,
    samples: float | None = None,
    accumulate: float = 1,
    scaler: torch.amp.GradScaler | None = None,
    name: str = "train",
) -> Monitor:
    """Measures the gradient statistics of a DDP model in its communication hook; parameters keep plain DDP's bits.

    With `gradient_as_bucket_view=True` and a number of workers that is no power of two they may differ in the last bit.

    Call it on every rank, after the model was wrapped and before its first backward. A step is a backward that DDP
    reduces, with the backwards under `no_sync()` before it; each backward is a micro-batch. One message of 48 bytes a
    step is added: it travels while the optimizer and the next forward run.

    samples, accumulate, scaler, name: as of `kf.monitor`.

    Raises TypeError for another model; ValueError for a value out of range, and for parameters on several devices;
    torch's RuntimeError for a model that has a communication hook. `join()` and sparse gradients raise it in training.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"kf.ddp_hook: the model is a {type(model).__name__}: must be a torch.nn.parallel.DistributedDataParallel "
            "(kf.monitor measures one process, kf.fsdp_monitor FSDP2)"
        )
    need("torch.nn.parallel.DistributedDataParallel._delay_all_reduce_params", of=model)
    need("torch.nn.parallel.DistributedDataParallel._join_config", of=model)
    if model._delay_all_reduce_params:
        raise RuntimeError("kf.ddp_hook: delay_all_reduce_named_params: their reduction never reaches a hook")
    return _Hook(model, Options(samples, accumulate, scaler, name)).monitor


class _Hook(BackwardWatch):
    """The hooks of one DDP model.

    It does not refer to the model: DDP's reducer, which is not Python's, keeps it, and would then never be freed.
    """

    def __init__(self, ddp: DistributedDataParallel, options: Options) -> None:
        self._group = ddp.process_group
        self._workers, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        named = ddp.module.named_parameters()
        params = [p for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore]
        device = one_device("kf.ddp_hook", params)
        self._means: list[Tensor] = []  # the buckets, which have the mean gradient when backward is over
        self._syncs = False  # DDP reduces in the backwards of the newest forward
        self._watches = False  # the parameters have hooks
        self._of_buckets = False  # this backward's gradient is measured in the buckets, before their reduction
        self._reduced = False  # all of this backward's buckets are on their way
        ddp.register_comm_hook(None, OfOneModel(self._reduce))
        super().__init__(ddp, params, Monitor(device, options, workers=self._workers, rank=self._rank))
        ddp.register_forward_hook(OfOneModel(self._after_forward))
        self.monitor.handles.clear()  # they stay as long as the communication hook, which torch cannot remove

    def before_forward(self, module: nn.Module, arguments: object) -> None:
        super().before_forward(module, arguments)
        assert isinstance(module, DistributedDataParallel)
        self._syncs = module.require_backward_grad_sync  # as DDP, which looks at it in forward
        if module._join_config.enable:
            raise RuntimeError(
                "kf.ddp_hook: with join() workers take different numbers of steps, so their statistics would be wrong: "
                "give every worker as many micro-batches"
            )

    def _after_forward(self, module: nn.Module, arguments: object, output: object) -> None:
        """A backward begins at the model's outputs, if DDP finds them and they are tensors that lead to parameters."""
        if self._watches or not torch.is_grad_enabled():
            return
        found: list[Tensor] = torch.nn.parallel.distributed._find_tensors(output)  # type: ignore[no-untyped-call]
        # A parameter among the outputs would have another hook after each forward.
        outputs = [tensor for tensor in found if tensor.requires_grad and not tensor.is_leaf]
        if not self._syncs or not outputs:
            self._watch_parameters()
        for tensor in outputs:
            tensor.register_hook(lambda grad: self.reached())  # type: ignore[no-untyped-call]

    def _watch_parameters(self) -> None:
        """Hooks on the parameters, about 15 us of each a backward: only once they are needed."""
        if not self._watches:
            self._watches, kept = True, len(self.monitor.handles)
            for index, param in enumerate(self.params):
                self.watch(index, param)
            del self.monitor.handles[kept:]

    def begins(self) -> bool:
        """The gradient is measured parameter by parameter where the buckets will hold another one."""
        self._means, self._reduced = [], False
        self._of_buckets = self._syncs and not self.kept
        if not self._of_buckets:
            self._watch_parameters()
        return not self._of_buckets

    # torch checks the annotations of a communication hook, and refuses strings: so these have none.
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        """Averages a bucket over the workers as DDP does without a hook, and measures it on the way."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError("kf.ddp_hook: a gradient is sparse: statistics need dense ones (sparse=False)")
        if not self._began:
            self.reached()
            self.before = []  # some gradients are there by now
            self.unknown = True  # the backward did not come from the model's outputs
            self._watch_parameters()  # from now on it may
        if buffer.dtype in (torch.bfloat16, torch.float16):
            self.monitor.low_precision()
        if self._of_buckets:
            self.norms += block_norms(buffer)
        buffer.mul_(1.0 / self._workers)  # as DDP does where it copies a gradient into its bucket
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._means.append(buffer)
        if bucket.is_last():  # and all gradients are there
            self._reduced = True
            self.monitor.micro_batch(self.square())
        return work.get_future().then(drop_before_exit(lambda future: future.value()[0]))

    def _end(self) -> None:
        if self._syncs and not self._reduced:  # static_graph: DDP has queued its first reduction behind this call
            at_the_end_of_backward(super()._end)
        else:
            super()._end()

    def ended(self) -> None:
        if self._reduced:  # DDP has queued its wait for the last buckets behind this call
            at_the_end_of_backward(self.finish_step)
        else:
            self.monitor.micro_batch(self.square())

    def end_step(self) -> None:
        """Sums all workers' figures, with those of each one's share of the mean gradient, which is reduced by now."""
        message = self.monitor.message(total_square(map(self._share, self._means)))
        self._means = []
        self.monitor.step(message, dist.all_reduce(message, group=self._group, async_op=True))

    def _share(self, mean: Tensor) -> Tensor:
        first, end = (mean.numel() * rank // self._workers // BLOCK * BLOCK for rank in (self._rank, self._rank + 1))
        return mean[first:] if self._rank == self._workers - 1 else mean[first:end]
