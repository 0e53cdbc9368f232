"""The kernels beside their peers and the hardware's limit: the time a copy takes for the same bytes.

    python benchmarks/kernels.py                     two sizes on a CPU, in a few minutes; all of them on a GPU
    python benchmarks/kernels.py --sizes 1,8,64,256,gpt2 --json out.json
    python benchmarks/kernels.py --graphs            on a GPU, without the host's time, and no peer but a copy

Every contestant's result is checked against float64 first. Then they take turns in blocks, in an order shuffled anew
each round, with a plain copy among them; ratios are formed within a round, and reported are their medians. A block runs
through several sets of buffers, together far larger than a last-level cache. See README.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from kernels_cases import CASES, Buffers, Case, ends
from kernels_orthogonal import ITERATED_IN_BF16, orthogonalise_case
from kernels_shapes import MODELS, Layout, flat
from report import median_interval, parser_of, row, show_rows, table, warn_if_busy, write

Result = dict[str, Any]
KERNELS: dict[str, Callable[..., Case]] = {
    **CASES,
    "orthogonalise": orthogonalise_case(torch.bfloat16),
    "orthogonalise_fp32": orthogonalise_case(torch.float32),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = ("eager", "compile", "torch")
SIZES = {"cpu": "1,64", "cuda": "1,16,64,256,1024,4096,gpt2"}
"""On a CPU two: a case takes seconds, and a model's tensors take torch.compile a minute."""
PACKAGES = ("torch", "triton", "numpy")
OF_COPY = {"pack": 0.91, "layer_norm": 0.85}
"""The least share of a copy's speed that is accepted, from 64 MB on; of the others 0.95."""
CACHE_BYTES = 2**28
"""The sets of buffers that take turns are at least this large together: four times a large last-level cache."""
MOST_IN_A_GRAPH = 200
COPY_BYTES = 2**31
"""A copy moves at most this much; longer times are extrapolated."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
KFUSE_SUM, PEERS_SUM = 1e-5, 2e-2
"""Allowed errors of sums of squares. Peers may use a single fp32 accumulator: their errors are in the JSON file."""
ITERATED = 0.05
"""Allowed error of an iteration whose fifteen products are rounded to bf16, at its largest element."""
PEERS_LEAST = 1e-3
"""Peers may differ by this anyway: what they clip with is such a sum."""


def main() -> None:
    options = _arguments()
    warn_if_busy()
    device = torch.device(options.device)
    torch.manual_seed(0)
    results: list[Result] = []
    left_out: list[str] = []
    cases = [(k, s, d) for s in options.sizes for d in options.dtypes for k in options.kernels]
    started = time.monotonic()
    for number, (kernel, layout, dtype) in enumerate(cases, 1):
        name = f"{kernel} {dtype} {layout.name}"
        begun = time.monotonic()
        if options.limit_s is not None and begun - started > options.limit_s:
            left_out.append(f"{name}: not begun within {options.limit_s:.0f} s (--limit-s)")
            continue
        try:
            case = KERNELS[kernel](layout, DTYPES[dtype], device)
            measured = _measure(case, DTYPES[dtype], device, options)
        except (RuntimeError, MemoryError) as error:  # no memory, not implemented, not to be captured
            left_out.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        finally:
            torch.compiler.reset()  # else its limit on recompiling one function would be met
            gc.collect()
        results.append({"kernel": kernel, "dtype": dtype, "size": layout.name, **measured})
        print(f"[{number}/{len(cases)}] {name} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    results.sort(key=lambda result: (options.kernels.index(result["kernel"]), options.dtypes.index(result["dtype"])))
    for result in results:
        result["summary"] = summary(result)
    show(results, left_out, options)
    settings = {"device": options.device, "threads": torch.get_num_threads()}
    settings |= {"rounds": options.rounds, "block_ms": options.block_ms}
    about = {"settings": settings, "left_out": left_out, "results": [_rounded(result) for result in results]}
    if options.graphs:
        found = map(_beside_copy, [result for result in results if not result["wrong"]])
        about["rows"] = {name: row(ratio, bar, options.device) for name, ratio, bar in found}
        about["rows"] |= {line: row(1.0, 0.0, options.device) for line in left_out}
        show_rows(about["rows"])
    write(options.json, PACKAGES, benchmark="kernels", **about)
    sys.exit(any(result["wrong"] for result in results))


def _measure(case: Case, dtype: torch.dtype, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Checks and times one case; returns seconds a round of each contestant and of the copy."""
    chosen = {name: run for name, run in case.runs.items() if name == "kfuse" or name in options.peers}
    absent = {name: why for name, why in case.absent.items() if name in options.peers}
    wrong: dict[str, str] = {}
    errors: dict[str, dict[str, float]] = {}
    before = case.make()
    size = sum(value.nbytes for value in before.values() if isinstance(value, torch.Tensor))
    count = 1 if case.arithmetic else max(1, min(512, -(-CACHE_BYTES // size)))
    _require_memory((count + 1) * size + 2 * min(case.floor_bytes, COPY_BYTES), device)
    expected = case.expected(before)
    for name in list(chosen):
        buffers = _clone(before)
        try:
            chosen[name](buffers)
        except (RuntimeError, TypeError) as failure:  # torch.compile without a compiler, another library's own check
            (wrong if name == "kfuse" else absent)[name] = str(failure).splitlines()[0][:200]
            del chosen[name]
            continue
        errors[name] = _errors(buffers, expected)
        for buffer, error in errors[name].items():
            if not error <= _allowed(name, buffer, dtype):
                wrong[name] = f"{buffer} differs from float64 by {error:.1e}"
                chosen.pop(name, None)
        del buffers
    del before, expected
    seconds = _time(case, chosen, count, device, options)
    found = {"absent": absent, "wrong": wrong, "errors": errors, "seconds": seconds}
    return {"bytes": case.floor_bytes, "arithmetic": case.arithmetic, "sets": count, **found}


def _allowed(name: str, buffer: str, dtype: torch.dtype) -> float:
    if buffer == "total":
        return KFUSE_SUM if name == "kfuse" else PEERS_SUM
    if buffer == ITERATED_IN_BF16:
        return ITERATED
    if buffer in ("param", "exp_avg", "exp_avg_sq", "momentum_buffer"):  # fp32, whatever the gradient is
        dtype = torch.float32
    return TOLERANCE[dtype] if name == "kfuse" else max(PEERS_LEAST, TOLERANCE[dtype])


def _clone(buffers: Buffers) -> Buffers:
    """A copy in which views lie where they lay; keys that hold lists of views are cut from the copied flat buffers."""
    copies: dict[int, torch.Tensor] = {}
    out: Buffers = {}
    for key, value in buffers.items():
        if isinstance(value, torch.Tensor):
            out[key] = copies[value.untyped_storage().data_ptr()] = value.clone()
    for key, value in buffers.items():
        if isinstance(value, list):
            source = copies[value[0].untyped_storage().data_ptr()]
            out[key] = [source.as_strided(v.shape, v.stride(), v.storage_offset()) for v in value]
        else:
            out.setdefault(key, value)
    return out


def _errors(buffers: Buffers, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of each buffer, relative to its largest expected value."""
    return {
        name: float((ends(buffers[name]) - value).abs().max() / value.abs().max()) for name, value in expected.items()
    }


def _require_memory(needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > 0.8 * free:
        raise MemoryError(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")


def _time(
    case: Case, runs: dict[str, Callable[[Buffers], Any]], count: int, device: torch.device, o: argparse.Namespace
) -> dict[str, list[float]]:
    sets = [case.make() for _ in range(count)]
    copied = min(case.floor_bytes, COPY_BYTES) // 2
    pairs = max(1, min(512, CACHE_BYTES // (2 * copied)))
    copies = [[torch.zeros(copied, dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(pairs)]
    longer = case.floor_bytes / (2 * copied)
    contestants: dict[str, Callable[[int], Any]] = {"copy": lambda k: copies[k % pairs][0].copy_(copies[k % pairs][1])}
    for name, run in runs.items():
        contestants[name] = partial(_turn, run, sets)
    clock = _cuda_seconds if device.type == "cuda" else _seconds
    repeats = {}
    for name, turn in contestants.items():
        clock(turn, 0, count)  # every set once: memory is touched, peers' optimizers are made
        repeats[name] = max(1, round(o.block_ms / 1e3 / max(1e-7, clock(turn, 0, 3) / 3)))
    calls = repeats
    if o.graphs:
        repeats = {name: max(count, min(MOST_IN_A_GRAPH, number)) for name, number in repeats.items()}
        contestants = {name: _replayed(turn, repeats[name], device) for name, turn in contestants.items()}
        calls = dict.fromkeys(contestants, 1)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)
    at = dict.fromkeys(contestants, 0)
    for _ in range(o.rounds):
        names = list(contestants)
        order.shuffle(names)
        for name in names:
            elapsed = clock(contestants[name], at[name], calls[name]) / repeats[name]
            seconds[name].append(elapsed * (longer if name == "copy" else 1.0))
            at[name] += repeats[name]
    return seconds


def _turn(run: Callable[[Buffers], Any], sets: list[Buffers], k: int) -> None:
    run(sets[k % len(sets)])


def _replayed(turn: Callable[[int], Any], count: int, device: torch.device) -> Callable[[int], Any]:
    """A CUDA graph of so many runs. On a CPU they are made each time."""

    def every(_: int = 0) -> None:
        for k in range(count):
            turn(k)

    if device.type == "cpu":
        return every
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        every()  # what is made at a first use on this stream, as tables of addresses, is no part of the graph
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        every()
    return lambda _: graph.replay()


def _seconds(run: Callable[[int], Any], first: int, count: int) -> float:
    started = time.perf_counter()
    for k in range(first, first + count):
        run(k)
    return time.perf_counter() - started


def _cuda_seconds(run: Callable[[int], Any], first: int, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for k in range(first, first + count):
        run(k)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# -- report -----------------------------------------------------------------------------------------------------------


def _beside_copy(result: Result) -> tuple[str, dict[str, float], float | None]:
    """A row: the kernel's time over a copy's of as many bytes."""
    seconds, kernel, size = result["seconds"], result["kernel"], result["size"]
    ratio = median_interval([time / copy for time, copy in zip(seconds["kfuse"], seconds["copy"], strict=True)])
    bar = round(1 / OF_COPY.get(kernel, 0.95), 3)
    return f"{kernel} {size} / a copy", ratio, bar if size in MODELS or int(size.split()[0]) >= 64 else None


def summary(result: Result) -> dict[str, dict[str, float]]:
    """For each contestant the median time, GB/s, and within rounds its share of the copy's speed and ours to it."""
    seconds, moved = result["seconds"], result["bytes"]
    ours = seconds.get("kfuse")
    found = {}
    for name, times in seconds.items():
        found[name] = {
            "us": 1e6 * median(times),
            "gb_per_s": moved / median(times) / 1e9,
            "tflop_per_s": result["arithmetic"] / median(times) / 1e12,
            "of_copy": median(copy / time for copy, time in zip(seconds["copy"], times, strict=True)),
        }
        if ours is not None:
            found[name]["kfuse_to_it"] = median(a / b for a, b in zip(ours, times, strict=True))
    return found


def _rounded(result: Result) -> Result:
    rounded = {name: {key: round(v, 4) for key, v in of.items()} for name, of in result["summary"].items()}
    seconds = {name: [round(1e6 * s, 2) for s in times] for name, times in result["seconds"].items()}
    kept = {key: value for key, value in result.items() if key not in ("seconds", "summary")}
    return kept | {"summary": rounded, "us_by_round": seconds}


def show(results: list[Result], left_out: list[str], options: argparse.Namespace) -> None:
    """Prints the table, and what is wrong or absent."""
    peers = [name for name in options.peers if any(name in result["seconds"] for result in results)]
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    print(f"kfuse's kernels on {options.device}{threads}: medians of {options.rounds} rounds")
    if options.device == "cuda":
        print(f"{torch.cuda.get_device_name()}: copy GB/s is what a copy reaches")
    rows = []
    for result in results:
        of, row = result["summary"], [result["kernel"], result["dtype"], result["size"]]
        if ours := of.get("kfuse"):
            row += [f"{ours['gb_per_s']:.1f}", f"{of['copy']['gb_per_s']:.1f}", f"{ours['of_copy']:.2f}"]
            row.append(f"{ours['tflop_per_s']:.3g}" if result["arithmetic"] else "-")
            row += [f"{of[peer]['kfuse_to_it']:.2f}" if peer in of else "-" for peer in peers]
        else:
            row += ["WRONG"] + [""] * (3 + len(peers))
        rows.append(row)
    title = "of copy: speed as a share of a plain copy's of as many bytes; last columns: kfuse's time to the peer's"
    table(title, ["kernel", "dtype", "size", "GB/s", "copy GB/s", "of copy", "TFLOP/s", *peers], rows, left=3)
    notes, wrong = set[str](), list[str]()
    for result in results:
        named = f"{result['kernel']} {result['dtype']}"
        notes |= {f"{peer} is absent from {named}: {why}" for peer, why in result["absent"].items()}
        wrong += [f"WRONG: {peer} in {named} {result['size']} {why}" for peer, why in result["wrong"].items()]
    print(*wrong, *(f"left out: {line}" for line in left_out), *sorted(notes), sep="\n")


# -- command line -----------------------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--sizes", help=f"MB of fp32 parameters, or {', '.join(MODELS)}; comma-separated")
    parser.add_argument("--dtypes", type=_among(DTYPES), default=("fp32",), help="of gradients: fp32,bf16,fp16")
    parser.add_argument("--kernels", type=_among(KERNELS), default=tuple(KERNELS), help=", ".join(KERNELS))
    parser.add_argument("--peers", type=_among(PEERS), default=PEERS, help=", ".join(PEERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block-ms", type=float, default=10.0, help="a contestant's turn lasts about this long")
    parser.add_argument(
        "--graphs", action="store_true", help="replay CUDA graphs: the kernels' time without the host's"
    )
    parser.add_argument("--limit-s", type=float, help="begin no further case after this many seconds")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; allowed here is cpu")
    if options.graphs:
        options.peers, options.kernels = (), tuple(name for name in options.kernels if name in CASES)
        options.sizes = options.sizes or "64,512,8,1"
    try:
        options.sizes = [_layout(size) for size in (options.sizes or SIZES[options.device]).split(",")]
    except ValueError as error:
        parser.error(f"argument --sizes: {error}")
    if options.rounds < 3 or not options.block_ms > 0:
        parser.error("--rounds must be 3 or more, --block-ms above 0")
    return options


def _layout(text: str) -> Layout:
    if text in MODELS:
        return MODELS[text]()
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is neither a number of MB nor one of {', '.join(MODELS)}")
    return flat(int(text))


def _among(allowed: Any) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return chosen

    return names


if __name__ == "__main__":
    main()
