"""Programs: what is valid, what the transformations make of them, and that they have the same bits.

`simulate` runs a program on several workers as its operations are described. What a worker does not have is NaN, and a
message brings nothing before its wait: so a program that reads too early, or forgets something, has a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kfuse as kf
from kfuse.comm import transports
from kfuse.comm.schedule import (
    ALL,
    FACTOR,
    GRADIENT,
    KINDS,
    PARAMETER,
    SHARD,
    Op,
    Program,
    all_reduce,
    fuse,
    measure_shards,
    mirror,
    orthogonalise,
    reorder,
    split,
    validate,
)
from kfuse.comm.settings import TRANSPORT_NAMES, CommOptions
from kfuse.comm.transports import make_programs
from kfuse.settings import rules

PLAIN = all_reduce("allreduce")
SPLIT = {reduces: split(all_reduce("x"), "x", reduces) for reduces in (False, True)}
PROGRAMS = {
    "all-reduce": PLAIN,
    "reduce-scatter, all-gather": SPLIT[False],
    "contributions, all-gather": SPLIT[True],
    "sharded": reorder(SPLIT[False]),
    "sharded, reduced here": reorder(SPLIT[True]),
    "fused": fuse(reorder(SPLIT[True])),
    "mirrored": mirror(reorder(SPLIT[False])),
    "fused, mirrored": mirror(fuse(reorder(SPLIT[True]))),
    "matrices": orthogonalise(PLAIN),
    "matrices, contributions": orthogonalise(SPLIT[True]),
    "matrices, sharded": orthogonalise(reorder(SPLIT[False])),
    "matrices, sharded, mirrored": mirror(orthogonalise(fuse(reorder(SPLIT[True])))),
}

LENGTHS = (11, 3)
"""Elements of the two buckets: with four workers the second one has an empty shard."""
CLIP = 0.5
Array = Any


class Worker:
    """What a worker has of a bucket. NaN: nothing yet."""

    def __init__(self, rank: int, size: int, numel: int) -> None:
        rng = np.random.default_rng([rank, numel])
        cut = -(-numel // size)
        self.shard = slice(min(rank * cut, numel), min((rank + 1) * cut, numel))
        self.gradient = rng.integers(-8, 8, numel).astype(float)  # whole numbers: sums have no rounding
        self.parameter = np.arange(numel, dtype=float)
        self.factor = np.full(numel, np.nan)
        self.mean = np.full(numel, np.nan)
        self.flat = np.full(numel, np.nan)
        self.message: tuple[str, Array] | None = None
        self.contributions: Array = np.full((size, numel), np.nan)
        self.measured = np.nan
        self.mirror: Array = np.zeros(0)

    def at(self, place: str) -> slice:
        return self.shard if place == SHARD else slice(None)


def simulate(program: Program, size: int) -> list[list[Array]]:
    """Each worker's parameters of both buckets after a step of the program, clipped by the norm of all gradients."""
    buckets = [[Worker(rank, size, numel) for rank in range(size)] for numel in LENGTHS]
    at = next((i for i, op in enumerate(program.ops) if op.kind == "barrier"), len(program.ops))
    for workers in buckets:
        for op in program.ops[:at]:
            for kind in op.kinds:
                _do(kind, op, workers, buckets, program)
    for op in program.ops[at:]:
        for workers in buckets:
            for kind in op.kinds:
                _do(kind, op, workers, buckets, program)
    return [[workers[rank].parameter for workers in buckets] for rank in range(size)]


def _do(kind: str, op: Op, workers: list[Worker], buckets: list[list[Worker]], program: Program) -> None:
    everyone = np.stack([w.flat for w in workers])
    means = np.stack([w.mean for w in workers])
    sources = {
        GRADIENT: ("mean", means),
        PARAMETER: ("parameter", np.stack([w.parameter for w in workers])),
        FACTOR: ("factor", np.stack([w.factor for w in workers])),
    }
    sums = [_norm(b, op.place, program) for b in buckets] if kind == "update" else []
    for w, before in zip(workers, [workers[-1], *workers[:-1]], strict=True):
        if kind == "pack":
            w.flat = w.gradient / len(workers)
        elif kind == "exchange":
            w.message = ("parts", everyone) if op.place == SHARD else ("mean", everyone.sum(0))
        elif kind == "mirror":
            w.message = ("mirror", before.mean[before.shard])
        elif kind == "share":
            name, source = sources.get(op.what, ("nothing", means))
            w.message = (name, np.concatenate([source[r, other.shard] for r, other in enumerate(workers)]))
        elif kind == "wait" and w.message is not None:
            name, value = w.message
            if name == "parts" and not program.has("reduce"):
                w.mean[w.shard] = value.sum(0)[w.shard]
            elif name == "parts":
                w.contributions = value
            else:
                setattr(w, name, value.copy())
            w.message = None
        elif kind == "reduce":
            w.mean[w.shard] = w.contributions.sum(0)[w.shard]
        elif kind == "measure":
            w.measured = (0.0 if np.isnan(w.measured) else w.measured) + (w.mean[w.at(op.place)] ** 2).sum()
        elif kind == "orthogonalise":
            w.factor[w.shard] = 2 * w.mean[w.shard]
        elif kind == "update":
            norm = np.sqrt(sum(sums))
            if program.has("mirror"):  # the update can be repeated: the gradient is there, before anybody updates
                assert np.array_equal(w.mirror, before.mean[before.shard])
            direction = w.factor if program.has("orthogonalise") else w.mean
            w.parameter[w.at(op.place)] -= direction[w.at(op.place)] * min(1.0, CLIP / norm)


def _norm(workers: list[Worker], place: str, program: Program) -> float:
    """The bucket's sum of squares: one worker's, or the sum of all shards'."""
    whole = any(op.place == ALL for op in program.ops if "measure" in op.kinds)
    measured = [w.measured for w in workers]
    return float(measured[0] if whole else sum(measured))


def is_right(program: Program, size: int) -> bool:
    """Every worker has the parameters that one alone would have with the mean of all gradients, or its factor."""
    workers = [[Worker(rank, size, numel) for rank in range(size)] for numel in LENGTHS]
    means = [np.stack([w.gradient / size for w in each]).sum(0) for each in workers]
    factor = min(1.0, CLIP / np.sqrt(sum(float((mean**2).sum()) for mean in means)))
    factor *= 2 if program.has("orthogonalise") else 1
    wanted = [np.arange(len(mean)) - mean * factor for mean in means]
    return all(np.allclose(a, b) for found in simulate(program, size) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [1, 3])
def test_each_transformation_makes_an_equivalent_program(name: str, size: int) -> None:
    validate(PROGRAMS[name])
    assert is_right(PROGRAMS[name], size)


OPS = st.builds(
    Op,
    st.sampled_from([*KINDS, "reduce+measure"]),
    st.sampled_from([ALL, SHARD]),
    st.sampled_from(["", GRADIENT, PARAMETER, FACTOR, "x"]),
)


@st.composite
def altered(draw: st.DrawFn) -> Program:
    """A program with a few operations left out, put in, repeated or moved."""
    ops = list(draw(st.sampled_from(list(PROGRAMS.values()))).ops)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(ops) - 1))
        match draw(st.sampled_from(["leave out", "put in", "repeat", "move"])):
            case "leave out" if len(ops) > 1:
                del ops[at]
            case "put in":
                ops.insert(at, draw(OPS))
            case "repeat":
                ops.insert(draw(st.integers(0, len(ops))), ops[at])
            case _:
                ops.insert(draw(st.integers(0, len(ops) - 1)), ops.pop(at))
    return Program(tuple(ops))


def is_valid(program: Program) -> bool:
    try:
        validate(program)
    except ValueError:
        return False
    return True


@settings(max_examples=600, deadline=None)
@given(altered(), st.integers(1, 4))
def test_what_is_valid_is_right(program: Program, size: int) -> None:
    if is_valid(program):
        with np.errstate(invalid="ignore"):
            assert is_right(program, size), str(program)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_operation_can_be_left_out_or_repeated(name: str) -> None:
    """But for `reduce`, as a transport may add up itself, and for what an owner does before it updates its shard."""
    ops = PROGRAMS[name].ops
    for at, op in enumerate(ops):
        if op.kind != "reduce" and not (op.kind == "orthogonalise" and PROGRAMS[name].sharded):
            assert not is_valid(Program((*ops[:at], *ops[at + 1 :]))), f"without {op}"
        assert not is_valid(Program((*ops[: at + 1], *ops[at:]))), f"{op} twice"


def test_a_transformation_refuses_what_it_is_not_for() -> None:
    for transform, program in (
        (reorder, PLAIN),
        (reorder, reorder(SPLIT[True])),
        (fuse, PLAIN),
        (fuse, SPLIT[True]),
        (measure_shards, PLAIN),
        (mirror, SPLIT[False]),
        (orthogonalise, orthogonalise(PLAIN)),
    ):
        with pytest.raises(ValueError):
            validate(transform(program))
    with pytest.raises(ValueError):
        validate(split(SPLIT[True], "x", True))


def every_step() -> Iterator[tuple[CommOptions, str, bool, bool]]:
    """All that the programs of a step depend on."""
    for state, dtype, reproducible in product(("replicated", "sharded"), ("fp32", "bf16"), (False, True)):
        for name in (*TRANSPORT_NAMES, "my.Transport"):
            given = {"schedule": name, "state": state, "dtype": dtype, "reproducible": reproducible}
            if any(rules.broken({f"comm.{key}": value for key, value in given.items()})):
                continue
            for adds_up, mirrors in product((False, True), repeat=2):
                yield CommOptions(**given), name, adds_up, mirrors


def test_the_programs_of_a_step_are_right_with_all_options() -> None:
    found = {case: make_programs(*case) for case in every_step()}
    assert {program.transport for program, *_ in found.values()} == {*TRANSPORT_NAMES, "my.Transport"}
    for (options, name, adds_up, mirrors), (program, matrices, apart) in found.items():
        assert is_right(program, 3) and is_right(matrices, 3) and is_right(apart, 3)
        assert (program.sharded, matrices.sharded, apart.sharded) == (options.sharded, options.sharded, False)
        assert program.has("mirror") == (mirrors and options.sharded) and not apart.has("mirror")
        if name == "reduce_scatter":
            librarys = adds_up and options.dtype == "fp32"
            assert program.transport == ("reduce_scatter" if librarys else "all_to_all")
            assert librarys != (program.has("reduce"))


def test_an_engine_runs_valid_programs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    without_measure = Program(tuple(op for op in PLAIN.ops if op.kind != "measure"))
    monkeypatch.setattr(transports, "program", lambda *_: without_measure)
    with pytest.raises(ValueError, match="with the mean gradient measured"):
        kf.FusedSGD([nn.Parameter(torch.zeros(3))], lr=0.1)
