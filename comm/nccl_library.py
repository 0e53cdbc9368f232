"""Makes torch's ProcessGroupNCCL, and aborts it. See `nccl` for what is done with it in between.

1) Only TORCH_NCCL_BLOCKING_WAIT, read as a process group is constructed, keeps torch from starting a watchdog and a
   heartbeat monitor, which end the process (ProcessGroupNCCL's constructor, workEnqueue). All timeouts are kfuse's.
2) A communicator that is made without blocking can be aborted while it waits for other ranks. The first message then
   waits for it, at most TORCH_NCCL_NONBLOCKING_TIMEOUT, 30 minutes by default (NCCLComm::waitReady).
"""

from __future__ import annotations

import logging
import math
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from kfuse.comm.collective_options import all_reduce_by
from kfuse.comm.devices import Device
from kfuse.comm.group import first_line
from kfuse.comm.options import CTA_POLICIES, CommOptions

_LOG = logging.getLogger("kfuse")

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_READY_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_CONFIG = ("min_ctas", "max_ctas", "cga_cluster_size", "cta_policy")
_CONSTRUCTING = threading.Lock()


def options_of(comm: CommOptions, timeout_s: float) -> Any:
    """Returns torch's options. Raises ValueError for a setting that this torch's NCCL does not have."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.is_high_priority_stream = comm.nccl_high_priority
    options.config.blocking = False
    for name in _CONFIG:
        value = getattr(comm, f"nccl_{name}")
        if value is None:
            continue
        if not hasattr(options.config, name):
            raise ValueError(f"comm.nccl_{name}={value}: must be null with this torch, whose NCCL has no such option")
        setattr(options.config, name, CTA_POLICIES.index(value) if name == "cta_policy" else value)
    return options


def connected(store: Store, rank: int, size: int, device: Device, options: Any, timeout_s: float) -> tuple[Any, Any]:
    """Returns a process group, connected, and its first work, which may be under way.

    The group is for kfuse alone, and not registered in torch.distributed.
    """
    device.make_current()
    os.environ.setdefault(_READY_TIMEOUT, str(math.ceil(timeout_s)))
    with _CONSTRUCTING:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            os.environ.pop(_BLOCKING_WAIT)
            if before is not None:
                os.environ[_BLOCKING_WAIT] = before
    try:
        group.eager_connect_single_device(device.name)  # returns at once, with a communicator that can be aborted
        first = group.allreduce([torch.zeros(1, device=device.name)], all_reduce_by("sum"))  # waits: 2) above
    except BaseException:
        abort(group)
        raise
    return group, first


def abort(group: Any) -> None:
    """Ends all messages on this rank. An error of NCCL is logged."""
    try:
        group.abort()
    except RuntimeError as error:
        _LOG.warning("NCCL's abort: %s", first_line(error))
