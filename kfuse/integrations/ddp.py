"""`kf.ddp_hook`: gradient statistics of training with torch's DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from kfuse.comm.gradients import at_the_end_of_backward
from kfuse.integrations.backward import BackwardWatch, total_square
from kfuse.integrations.measure import Monitor, Options, one_device


def ddp_hook(
    model: DistributedDataParallel,
    *,
    samples: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    name: str = "train",
) -> Monitor:
    """Measures the gradient statistics of a DDP model in its communication hook; parameters keep plain DDP's bits.

    Call it on every rank, after the model was wrapped and before its first backward. A step is a backward that DDP
    reduces, with the backwards under `no_sync()` before it; each backward is a micro-batch. One message of 32 bytes a
    step is added: it is sent behind the last bucket's.

    samples: of each micro-batch; without it a micro-batch takes the sample's place. See `Monitor.samples`.
    accumulate: what each micro-batch's mean loss is divided by. With the usual `(loss / ACC).backward()` it is ACC.
    scaler: the loop's GradScaler, if there is one.
    name: names these figures where `kf.log_to` sends them.

    Raises TypeError for another model; ValueError for a value out of range, and for parameters on several devices;
    RuntimeError for a model that has a communication hook. `join()` and sparse gradients raise it in training.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"kf.ddp_hook: the model is a {type(model).__name__}: must be a torch.nn.parallel.DistributedDataParallel "
            "(kf.monitor measures one process, kf.fsdp_monitor FSDP2)"
        )
    if model._delay_all_reduce_params:
        raise RuntimeError("kf.ddp_hook: delay_all_reduce_named_params: their reduction never reaches a hook")
    if model._comm_hooks:
        raise RuntimeError("kf.ddp_hook: the model has a communication hook already, and DDP takes one")
    return _Hook(model, Options(samples, accumulate, scaler, name)).monitor


class _Hook:
    """What the hooks of one DDP model share. A backward passes its methods in their order here."""

    def __init__(self, ddp: DistributedDataParallel, options: Options) -> None:
        self._ddp, self._group = ddp, ddp.process_group
        self._workers = dist.get_world_size(self._group)
        named = ddp.module.named_parameters()
        self._params = [p for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore]
        device = one_device("kf.ddp_hook", self._params)
        self.monitor = Monitor(device, options, workers=self._workers, rank=dist.get_rank(self._group))
        # DDP without a hook multiplies by 1 / n as it copies a gradient into its bucket, and divides by n one that lies
        # there already. For n = 3 these differ in the last bit; for powers of two they do not.
        self._divides = ddp.gradient_as_bucket_view and self._workers & (self._workers - 1) != 0
        self._storages: dict[int, int] = {}  # by id of the parameter, where its gradient was before this backward
        self._of_buckets = False  # this backward's gradient is measured in the buckets
        self._squares: list[Tensor] = []
        self._means: list[Tensor] = []
        self._message: Tensor | None = None
        self._sent: dist.Work | None = None
        try:
            ddp.register_comm_hook(None, self._reduce)
        except RuntimeError as error:
            raise RuntimeError(f"kf.ddp_hook: DDP refuses a communication hook: {error}") from error
        self._watch = BackwardWatch(ddp, self._params, self.monitor, self._begins, self._ended)
        self.monitor.attach(ddp.register_forward_pre_hook(self._before_forward))
        self._syncs = True

    def _before_forward(self, module: object, arguments: object) -> None:
        self._syncs = self._ddp.require_backward_grad_sync  # as DDP, which looks at it in forward
        if self._ddp._join_config.enable:
            raise RuntimeError(
                "kf.ddp_hook: with join() workers take different numbers of steps, so their statistics would be wrong: "
                "give every worker as many micro-batches"
            )

    def _begins(self) -> bool:
        """A backward begins. Its gradient is measured parameter by parameter where buckets will hold another."""
        self._squares, self._means = [], []
        self._of_buckets = self._syncs and not self._watch.kept
        if self._divides:
            grads = ((id(param), param.grad) for param in self._params)
            self._storages = {key: grad.untyped_storage().data_ptr() for key, grad in grads if grad is not None}
        return not self._of_buckets

    # torch checks the annotations of a communication hook, and refuses strings: so these have none.
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        """Averages a bucket over the workers as DDP does without a hook, and measures it on the way."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError("kf.ddp_hook: a gradient is sparse: statistics need dense ones (sparse=False)")
        if buffer.dtype in (torch.bfloat16, torch.float16):
            self.monitor.low_precision()
        if self._of_buckets:
            self._squares.append(total_square([buffer]))
        self._divide(buffer, bucket)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._means.append(buffer)
        if bucket.is_last():
            self._send()
        return work.get_future().then(lambda future: future.value()[0])

    def _divide(self, buffer: Tensor, bucket: GradBucket) -> None:
        here = buffer.untyped_storage().data_ptr()
        if not self._divides or here not in self._storages.values():
            buffer.mul_(1.0 / self._workers)
            return
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._storages.get(id(param)) == here:
                view.div_(self._workers)
            else:
                view.mul_(1.0 / self._workers)

    def _send(self) -> None:
        """All gradients of this backward are there: sums the workers' figures of the step."""
        self.monitor.micro_batch(torch.stack(self._squares).sum() if self._of_buckets else self._watch.square())
        self._message = self.monitor.message()
        self._sent = dist.all_reduce(self._message, group=self._group, async_op=True)

    def _ended(self) -> None:
        """A backward is over, but for DDP's last buckets: DDP has queued its wait for them behind this call."""
        if self._message is None:
            self.monitor.micro_batch(self._watch.square())
        else:
            at_the_end_of_backward(self._finish)

    def _finish(self) -> None:
        assert self._message is not None and self._sent is not None
        self._sent.wait()
        message, means, self._message, self._means = self._message, self._means, None, []
        self._watch.step_ended()
        self.monitor.step(message, total_square(means))
