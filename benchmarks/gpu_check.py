"""Are the kernels right on this device? Beside the PyTorch implementations on the CPU. Needs torch and kfuse alone.

    python benchmarks/gpu_check.py --device cuda --json check.json
    python benchmarks/gpu_check.py --device cuda --small       small buffers, for compute-sanitizer
    python benchmarks/gpu_check.py --device cuda --large       buffers of more than 2^31 elements, in bf16

Each kernel gets the same random arguments on the device, twice, and on the CPU: the device's bits must be the same each
time, and near the CPU's. The tests hold the CPU's to float64. An index that is kept in 32 bits anywhere reads or writes
large buffers at the wrong place; windows of them are compared with small buffers of the same content.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_workers import ABSENT
from machine import parser_of, write
from torch import Tensor

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
        for count in (2, 3, 4, 7, 8):
            yield f"reduce{count} {name}", partial(checks.reduce, count=count, numel=numel, dtype=dtype)
        for update in (checks.adamw, checks.sgd):
            yield f"{update.__name__} {name}", partial(update, numel=numel, dtype=dtype)
        for width in (48, 1024, *(() if small else (5000, 12288))):
            yield f"norm, width {width} {name}", partial(checks.norm, width=width, dtype=dtype)
    yield "pull", partial(checks.pull, count=3, numel=numel)
    yield "lamb", partial(checks.lamb, numels=[n for n in ragged if n])


# -- buffers of more than 2^31 elements --------------------------------------------------------------------------------


def large_checks(device: torch.device, numel: int) -> Iterator[tuple[str, int, Callable[[], str | None]]]:
    """(name, bytes needed, check). bf16, so that they fit one GPU.

    Windows suffice: an element's bits depend neither on where it lies nor on the buffer's length.
    """
    size = 2 * numel
    yield "large block_sumsq", size + numel // 512, lambda: large_block_sumsq(device, numel)
    yield "large pack", 2 * size, lambda: large_pack(device, numel)
    yield "large reduce", 3 * size, lambda: large_reduce(device, numel)
    yield "large adamw", 4 * size, lambda: large_adamw(device, numel)
    yield "large norm_forward", 2 * size, lambda: large_norm(device, numel)


def windows(numel: int) -> list[slice]:
    """The buffer's start, what lies around element 2^31 (the middle of a smaller buffer), and its end."""
    middle = (2**31 if numel > 2**31 else numel // 2) // BLOCK * BLOCK
    return [slice(0, 2 * BLOCK), slice(middle - 2 * BLOCK, middle + 2 * BLOCK), slice(middle + 2 * BLOCK, numel)]


def large_block_sumsq(device: torch.device, numel: int) -> str | None:
    flat, partials = _noise(numel, device), empty(num_blocks(numel), device)
    k.block_sumsq(flat, partials)
    for part in windows(numel):
        own = empty(num_blocks(part.stop - part.start), device)
        k.block_sumsq(flat[part].clone(), own)
        if not torch.equal(own, partials[part.start // BLOCK : part.start // BLOCK + len(own)]):
            return f"other bits at element {part.start}"
    return None


def large_pack(device: torch.device, numel: int) -> str | None:
    """The windows, and a small tensor that lies behind the large one."""
    table = table_of([numel, 100], device)
    grads = [_noise(each, device) for each in (numel, 100)]
    flat, sumsq = torch.zeros(table.end, dtype=torch.bfloat16, device=device), empty(table.num_chunks, device)
    k.pack(grads, flat, table, scale=1.0, accumulate=False, sumsq=sumsq)
    if not torch.equal(flat[table.offsets[1] :], grads[1]):
        return "the tensor behind is wrong"
    return _first_wrong(numel, [(flat[part], grads[0][part]) for part in windows(numel)])


def large_reduce(device: torch.device, numel: int) -> str | None:
    rows = torch.empty(2, numel, dtype=torch.bfloat16, device=device)
    for row in rows:
        row.normal_()
    expected = [(rows[0, part].float() + rows[1, part].float()).to(torch.bfloat16) for part in windows(numel)]
    k.reduce(rows, ((0, 1),), out := torch.empty(numel, dtype=torch.bfloat16, device=device))
    return _first_wrong(numel, [(out[part], right) for part, right in zip(windows(numel), expected, strict=True)])


def large_adamw(device: torch.device, numel: int) -> str | None:
    state, step = [_noise(numel, device) for _ in range(4)], torch.tensor(3.0, device=device)
    state[3].abs_()
    before = [[each[part].clone() for each in state] for part in windows(numel)]
    k.adamw(*state, ADAM, step=step)  # type: ignore[misc]
    for own in before:
        k.adamw(*own, ADAM, step=step)  # type: ignore[misc]
    found = list(zip(windows(numel), before, strict=True))
    return _first_wrong(numel, [(state[i][part], own[i]) for i in (0, 2, 3) for part, own in found])


def large_norm(device: torch.device, numel: int) -> str | None:
    """Rows of 1024 elements."""
    width = 1024
    x, weight = _noise(numel // width * width, device).view(-1, width), torch.ones(width, device=device)
    y, _, _ = norm_forward(x, weight, weight, eps=1e-5, centred=True)
    rows = [slice(part.start // width, min(part.stop // width, len(x))) for part in windows(numel)]
    small = [norm_forward(x[part].clone(), weight, weight, eps=1e-5, centred=True)[0] for part in rows]
    return _first_wrong(numel, [(y[part], own) for part, own in zip(rows, small, strict=True)])


def _first_wrong(numel: int, pairs: list[tuple[Tensor, Tensor]]) -> str | None:
    wrong = [number for number, (found, right) in enumerate(pairs) if not torch.equal(found, right)]
    return f"other bits in {windows(numel)[wrong[0] % 3]}" if wrong else None


def _noise(numel: int, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=torch.bfloat16, device=device).normal_()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def run_large(device: torch.device, numel: int) -> dict[str, str]:
    """Each check's result: ok, absent with the reason, or what is wrong."""
    results: dict[str, str] = {}
    for name, needed, act in large_checks(device, numel):
        free = _free_bytes(device)
        too_large = f"absent: needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        results[name] = too_large if needed > 0.9 * free else result_of(act)
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
        results = {name: result_of(lambda call=call: check(call, device)) for name, call in calls(options.small)}  # type: ignore[misc]
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
