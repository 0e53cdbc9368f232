"""The processes that `kfuse doctor` and `kfuse schedule` start (`processes`): each tries one thing.

    python -m kfuse.tools.doctor.self_test devices|reduction|costs|kernels '{"argument": ...}'

Each prints lines of JSON: {"at": what it begins}, so that a process that hangs has said where, and at its end
{"found": ...} or {"problem": one line}. Of ranks the environment has rank and address of a store.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kfuse import session
from kfuse.checkpoint.format import one_line
from kfuse.comm.cost import choose_program, probe
from kfuse.comm.engine import Engine
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions
from kfuse.comm.step_state import MicroBatch, StepPlan
from kfuse.tools.doctor.kernel_checks import CHECKS, check

SAMPLES = (3, 5, 2, 4, 1)  # of each micro-batch of the reduction; rank 0 has the first three, rank 1 the others
SHAPES = ((1000, 7), (257,), (64, 300), (1,))  # of the parameters whose gradients are reduced
BUCKET_MB = 0.05  # makes several buckets of them
# Largest error of a mean gradient, relative to its largest element. bf16: each contribution has 8 significant bits.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
# How long measuring messages should take. More than in a job, whose workers wait for it: on a busy machine the job's
# time may be too short for messages from which one of a whole bucket can be predicted.
_BUDGET_S = 1.0


def main() -> int:
    """Runs one process's part, as the command line says. Exit status 0 where it printed what it found."""
    what, arguments = sys.argv[1], json.loads(sys.argv[2])
    if os.getcwd() not in sys.path:  # of a transport of the user's own
        sys.path.append(os.getcwd())
    parts: tuple[Callable[..., Any], ...] = (devices, reduction, costs, kernels)
    try:
        _say(found={part.__name__: part for part in parts}[what](**arguments))
    except Exception as error:
        _say(problem=one_line(error))
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
            problem = one_line(error)
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


def costs(settings: dict[str, Any], timeout_s: float, elements: int) -> dict[str, Any]:
    """One rank's part. Measures the group's messages: the fields of `kfuse.comm.cost.Costs`.

    elements: of the largest message. Raises CommError where another rank does not come, or is lost.
    """
    _say(at="connecting to the other processes")
    group = session.init(comm_timeout_s=timeout_s, **settings).group
    _say(at="measuring messages")
    return asdict(probe(group, elements, _BUDGET_S))


def reduction(settings: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One rank's part. Reduces known gradients twice by the configured transport, all-reduce and the reproducible sum.

    settings: of `kf.init`, by name. Returns {"backend", "digests": {transport: of the means}, "wrong": {transport:
    what}, "choice": the fields of `kfuse.comm.cost.Choice`, for one bucket of the configured size}.
    Raises CommError where the other rank does not come, or is lost.
    """
    configured = CommOptions.of(settings)
    _say(at="connecting to the other process")
    group = session.init(comm_timeout_s=timeout_s, **settings).group
    digests: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for options in (configured, CommOptions(), CommOptions(reproducible=True)):
        transport = options.transport()
        name = f"{transport} in {options.dtype}{' (reproducible)' * options.reproducible}"
        if name not in digests:
            _say(at=f"reducing by {name}")
            digests[name], problem = _case(replace(options, schedule=transport, bucket_mb=BUCKET_MB), group)
            if problem is not None:
                wrong[name] = problem
    _say(at="measuring messages")
    elements = configured.bucket_elements
    choice = choose_program(probe(group, elements, _BUDGET_S), group.size, [elements])
    backend = "NCCL" if group.device.type == "cuda" else "gloo"
    return {"backend": backend, "digests": digests, "wrong": wrong, "choice": asdict(choice)}


def _case(options: CommOptions, group: Group) -> tuple[str, str | None]:
    """Returns a digest of the mean gradients' bits, and what is wrong with them."""
    once, twice = (_reduce_once(options, group) for _ in range(2))
    problem = _compare(once, TOLERANCE[options.dtype])
    if options.reproducible and problem is None and _digest(once) != _digest(twice):
        problem = "other bits the second time"
    if options.reproducible and problem is None and group.rank == 0:
        alone = _reduce_once(options, Group(device=group.device))
        problem = None if _digest(alone) == _digest(once) else "other bits than one worker alone"
    return _digest(once), problem


def _gradients(micro_batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(micro_batch)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _reduce_once(options: CommOptions, group: Group) -> list[Tensor]:
    """The mean gradient over all micro-batches, on the CPU, a tensor for each of SHAPES. Raises CommError."""
    params = [torch.nn.Parameter(torch.zeros(shape, device=group.device)) for shape in SHAPES]
    engine = Engine([params], group, options)
    cut = len(SAMPLES) if group.size == 1 else 3
    ranges = (range(cut),) if group.size == 1 else (range(cut), range(cut, len(SAMPLES)))
    engine.begin(StepPlan(sum(SAMPLES), ranges))
    mine = ranges[group.rank]
    for j in mine:
        gradients = [gradient.to(group.device) for gradient in _gradients(j)]
        with MicroBatch(engine, float(SAMPLES[j]), last=j == mine[-1]):
            loss = torch.stack([(p * g).sum() for p, g in zip(params, gradients, strict=True)]).sum()
            loss.backward()  # type: ignore[no-untyped-call]  # the gradient of p is g
    engine.finish()
    means: dict[int, Tensor] = {}
    for bucket in engine.gradient_buckets:
        means |= zip(bucket.layout.params, (view.cpu() for view in bucket.view(bucket.mean)), strict=True)
    engine.close()
    return [means[index] for index in range(len(SHAPES))]


def _compare(means: Sequence[Tensor], tolerance: float) -> str | None:
    """Against the sum in float64; what is wrong, or None."""
    every = [_gradients(j) for j in range(len(SAMPLES))]
    for index, mean in enumerate(means):
        terms = [samples * gradients[index].double() for samples, gradients in zip(SAMPLES, every, strict=True)]
        exact = sum(terms[1:], terms[0]) / sum(SAMPLES)
        error = float((mean.double() - exact).abs().max() / exact.abs().max())
        if not error <= tolerance:
            return f"a mean gradient differs from the sum in float64 by {error:.1e}, more than {tolerance:g}"
    return None


def _digest(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


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
            found[name] = f"{type(error).__name__}: {one_line(error)}"
    return found


if __name__ == "__main__":
    sys.exit(main())
