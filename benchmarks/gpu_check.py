"""Are the kernels, and steps of all kinds, right on this device? Needs torch and kfuse alone.

    python benchmarks/gpu_check.py --device cuda --json check.json
    python benchmarks/gpu_check.py --device cuda --small       small buffers, for compute-sanitizer
    python benchmarks/gpu_check.py --device cuda --large       buffers of more than 2^31 elements, in bf16

Each kernel gets the same random arguments on the device, twice, and in its PyTorch implementation on the CPU: the
device's bits must be the same each time, and near the CPU's. The tests hold the CPU's to float64. An index that is kept
in 32 bits anywhere reads or writes large buffers at the wrong place; windows of them are compared with small buffers of
the same content. Steps must give parameters that are known.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

import gpu_kinds
import torch
from gpu_workers import ABSENT
from report import parser_of, write
from torch import Tensor

import kfuse as kf
import kfuse.kernels as k
from kfuse.kernels import BLOCK, CHUNK, num_blocks
from kfuse.kernels.normalisation import norm_forward
from kfuse.tools.doctor import kernel_checks as checks
from kfuse.tools.doctor.kernel_checks import ADAM, Call, check, empty, table_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGE = 2**31 + 5 * BLOCK + 37
"""Elements."""


def calls(small: bool) -> Iterator[tuple[str, Call]]:
    """Every kernel, with each type of its inputs. small: on buffers of some blocks, since compute-sanitizer is slow."""
    numel = 3 * BLOCK + 37 if small else 2**22 + 37
    ragged = [1, 0, CHUNK, 37, 2 * CHUNK + 5, 16, 7 if small else 3_000_001]
    for name, dtype in DTYPES.items():
        yield f"pack {name}", partial(checks.pack, numels=ragged, dtype=dtype)
        yield f"block_sumsq {name}", partial(checks.block_sumsq, numel=numel, dtype=dtype)
        for count in (2, 3, 4, 7, 8, 33):
            yield f"reduce{count} {name}", partial(checks.reduce, count=count, numel=numel, dtype=dtype)
        for update in (checks.adamw, checks.sgd):
            yield f"{update.__name__} {name}", partial(update, numel=numel, dtype=dtype)
        for width in (48, 1024, *(() if small else (5000, 12288))):
            yield f"norm, width {width} {name}", partial(checks.norm, width=width, dtype=dtype)
        if dtype != torch.float16:
            for shape in ((150, 300), *(() if small else ((512, 1100), (1100, 130)))):
                call = partial(checks.orthogonalise, count=3, shape=shape, dtype=dtype)
                yield f"orthogonalise, {shape[0]} x {shape[1]} {name}", call
    yield "reduce by address", partial(checks.reduce_by_address, count=3, numel=numel)
    yield "lamb", partial(checks.lamb, numels=[n for n in ragged if n])


# -- buffers of more than 2^31 elements --------------------------------------------------------------------------------


def block_sumsq(x: Tensor) -> list[Tensor]:
    k.block_sumsq(x[0], out := empty(num_blocks(x.shape[1]), x.device))
    return [out]


def pack(x: Tensor) -> list[Tensor]:
    """Raises ValueError where a small tensor that lies behind the large one is wrong."""
    table, grads = table_of([x.shape[1], 100], x.device), [x[0], x[0, :100].clone()]
    flat, sumsq = empty(table.end, x.device, x.dtype), empty(table.num_chunks, x.device)
    k.pack(grads, flat, table, scale=1.0, accumulate=False, sumsq=sumsq)
    if not torch.equal(flat[table.offsets[1] :], grads[1]):
        raise ValueError("the tensor behind is wrong")
    return [flat[: x.shape[1]]]


def reduce(x: Tensor) -> list[Tensor]:
    k.reduce(x, ((0, 1),), out := empty(x.shape[1], x.device, x.dtype))
    return [out]


def adamw(x: Tensor) -> list[Tensor]:
    x[3].abs_()
    k.adamw(*x, ADAM, step=torch.tensor(3.0, device=x.device))  # type: ignore[misc]
    return [x[0], x[2], x[3]]


def norm(x: Tensor) -> list[Tensor]:
    rows = x[0, : x.shape[1] // WIDTH * WIDTH].view(-1, WIDTH)
    weight = torch.ones(WIDTH, device=x.device)
    return [norm_forward(rows, weight, weight, eps=1e-5, centred=True)[0].view(-1)]


WIDTH = 1024
LARGE_CHECKS: dict[str, tuple[int, int, Callable[[Tensor], list[Tensor]]]] = {
    "block_sumsq": (1, 0, block_sumsq),
    "pack": (1, 1, pack),
    "reduce": (2, 1, reduce),
    "adamw": (4, 0, adamw),
    "norm_forward": (1, 1, norm),
}
"""How many buffers each one takes, how many it makes, and what it does with them, [buffers, elements]."""


def windows(numel: int) -> list[slice]:
    """The buffer's start, what lies around element 2^31 (the middle of a smaller buffer), and its end."""
    middle = (2**31 if numel > 2**31 else numel // 2) // BLOCK * BLOCK
    return [slice(0, 2 * BLOCK), slice(middle - 2 * BLOCK, middle + 2 * BLOCK), slice(middle + 2 * BLOCK, numel)]


def check_large(name: str, device: torch.device, numel: int) -> str | None:
    """What is wrong. bf16, so that large buffers fit one GPU.

    Windows suffice: an element's bits, and a block's sum, depend neither on where it lies nor on the buffer's length.
    """
    count, _, act = LARGE_CHECKS[name]
    x = torch.empty(count, numel, dtype=torch.bfloat16, device=device).normal_()
    small = [x[:, part].clone() for part in windows(numel)]
    whole = act(x)
    unit = BLOCK if name == "block_sumsq" else 1
    for part, window in zip(windows(numel), small, strict=True):
        for found, right in zip(whole, act(window), strict=True):
            if not torch.equal(found[part.start // unit :][: len(right)], right):
                return f"other bits in {part}"
    return None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def run_large(device: torch.device, numel: int) -> dict[str, str]:
    """Each check's result: ok, absent with the reason, or what is wrong."""
    results: dict[str, str] = {}
    for name, (given, made, _) in LARGE_CHECKS.items():
        needed, free = 2 * (given + made) * numel, _free_bytes(device)
        too_large = f"absent: needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        results[f"large {name}"] = (
            too_large if needed > 0.9 * free else result_of(partial(check_large, name, device, numel))
        )
    return results


def result_of(act: Callable[[], str | None]) -> str:
    """Runs a check: "ok", or what is wrong."""
    try:
        return act() or "ok"
    except Exception as error:  # a launch that fails is a wrong kernel; the others still run
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def main() -> int:
    """Runs all checks. Exit status 1 where one found something wrong, ABSENT where no large buffer fits."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--small", action="store_true", help="small buffers, for compute-sanitizer")
    parser.add_argument("--large", type=int, nargs="?", const=LARGE, metavar="ELEMENTS", help="large buffers instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.large:
        results = run_large(device, options.large)
    else:
        kf.init(comm_bucket_mb=gpu_kinds.BUCKET_MB)
        acts = {name: partial(check, call, device) for name, call in calls(options.small)}
        acts |= {f"steps, {kind}": partial(gpu_kinds.check, kind, device) for kind in gpu_kinds.KINDS}
        results = {name: result_of(act) for name, act in acts.items()}
    for name, result in results.items():
        if result != "ok":
            print(f"{name}: {result}")
    write(options.json, ("torch", "triton"), checks=results)
    run = [result for result in results.values() if not result.startswith("absent")]
    if not run:
        return ABSENT  # the last line says why
    wrong = sum(result != "ok" for result in run)
    print(f"{len(run) - wrong} of {len(results)} checks passed on {device.type}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
