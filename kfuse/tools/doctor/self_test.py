"""The processes that `kfuse doctor` starts (`processes`): each tries one thing.

    python -m kfuse.tools.doctor.self_test devices|training|kernels '{"argument": ...}'

Each prints lines of JSON: {"at": what it begins}, so that a process that hangs has said where, and at its end
{"found": ...} or {"problem": one line}. Of ranks the environment has rank and address of a store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kfuse import session
from kfuse.comm.settings import CommOptions
from kfuse.observe import first_line
from kfuse.tools.doctor.kernel_checks import CHECKS, check

BUCKET_MB = 0.005  # makes several buckets of the model
# How far the loss after ten steps may be from that of one worker, as a part of it, where the sums have another order.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "int8": 2e-2}


def main() -> int:
    """Runs one process's part, as the command line says. Exit status 0 where it printed what it found."""
    what, arguments = sys.argv[1], json.loads(sys.argv[2])
    parts: tuple[Callable[..., Any], ...] = (devices, training, kernels)
    try:
        _say(found={part.__name__: part for part in parts}[what](**arguments))
    except Exception as error:
        _say(problem=first_line(error))
        return 1
    return 0


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


# -- what torch sees --------------------------------------------------------------------------------------------------


def devices() -> dict[str, Any]:
    """Returns the GPUs that torch sees, and whether NCCL starts on the first.

    {"gpus": [{"name", "capability" ("9.0"), "memory_gib", "free_gib"}], "nccl": version or None, "nccl_problem": one
    line or None}.
    """
    _say(at="asking the driver for GPUs")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        _say(at=f"asking for the properties and the free memory of GPU {index}")
        properties = torch.cuda.get_device_properties(index)
        free, total = (round(amount / 2**30, 1) for amount in torch.cuda.mem_get_info(index))
        capability = f"{properties.major}.{properties.minor}"
        gpus.append({"name": properties.name, "capability": capability, "memory_gib": total, "free_gib": free})
    nccl = problem = None
    if count:
        try:
            nccl = _start_nccl()
        except Exception as error:
            problem = first_line(error)
    return {"gpus": gpus, "nccl": nccl, "nccl_problem": problem}


def _start_nccl() -> str:
    """One rank's group on the first GPU, and a message in it. Returns NCCL's version. Raises what torch raises."""
    if not dist.is_nccl_available():
        raise RuntimeError("this build of torch has no ProcessGroupNCCL")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    _say(at="starting NCCL on GPU 0")
    wait = timedelta(seconds=20)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=wait, device_id=device)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize(device)
    dist.destroy_process_group()
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


# -- messages between ranks -------------------------------------------------------------------------------------------


def training(settings: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One rank's part. Trains digits by the configured transport, all-reduce and the reproducible sum, and alone.

    settings: of `kf.init`, by name. Returns {"backend", "trained": {transport: (digest of the parameters, loss, how far
    the loss may be from that of one worker; 0: the bits must be the same)}, "alone": (digest, loss) of one worker}.
    Raises CommError where the other rank does not come, or is lost.
    """
    _say(at="training digits with one worker")
    ranks = os.environ.pop("WORLD_SIZE")
    session.init(comm_reproducible=True)
    alone = _train()
    session.reset()
    os.environ["WORLD_SIZE"] = ranks
    configured, trained = CommOptions.of(settings), {}
    _say(at="connecting to the other process")
    joined = session.init(comm_timeout_s=timeout_s, **settings)
    for options in (configured, CommOptions(), CommOptions(reproducible=True)):
        transport = options.transport()
        name = f"{transport} in {options.dtype}{' (reproducible)' * options.reproducible}"
        if name not in trained:
            _say(at=f"training digits by {name}")
            joined.comm = replace(CommOptions(), schedule=transport, dtype=options.dtype, tree=options.tree)
            joined.comm = replace(joined.comm, reproducible=options.reproducible, bucket_mb=BUCKET_MB)
            trained[name] = (*_train(), 0.0 if options.reproducible else TOLERANCE[options.dtype])
    backend = "NCCL" if joined.group.device.type == "cuda" else "gloo"
    return {"backend": backend, "trained": trained, "alone": alone}


def _train() -> tuple[str, float]:
    """Trains digits for ten steps, with the session's workers. Returns a digest of the parameters, and the loss."""
    from kfuse.data.builtin import load_digits  # not in the processes that try something else
    from kfuse.models import MLP
    from kfuse.optim.fused import FusedSGD
    from kfuse.train.fit import fit

    torch.manual_seed(0)
    data, model = load_digits(), MLP((1, 8, 8), 10, hidden=(64,))
    model.to(session.current().group.device)
    opt = FusedSGD(model.parameters(), lr=0.2, momentum=0.9)
    summary = fit(model, data.train, opt, steps=10, batch_size=64, micro_batch=8, observe_progress=False)
    opt.close()
    assert summary is not None
    return summary["params_sha256"], summary["loss"]


# -- the kernels ------------------------------------------------------------------------------------------------------


def kernels(device: str) -> dict[str, str | None]:
    """Each kernel on `device` beside its PyTorch implementation on the CPU: what is wrong with it, or None.

    On "cpu" the process must have TRITON_INTERPRET=1 in its environment.
    """
    found: dict[str, str | None] = {}
    for name, call in CHECKS.items():
        _say(at=f"kernel {name}")
        try:
            found[name] = check(call, torch.device(device))
        except Exception as error:  # the others still run
            found[name] = f"{type(error).__name__}: {first_line(error)}"
    return found


if __name__ == "__main__":
    sys.exit(main())
