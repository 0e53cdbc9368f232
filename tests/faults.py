"""Draws faults by a seed, puts each into a copy of a checkout, and counts how many of them the tests find.

    python tests/faults.py draw --seed 1 --each 5 > faults.json           # five in each room, of this checkout
    python tests/faults.py draw --seed 1 --each 5 --also OTHER > ...      # only those that OTHER's source can have too
    python tests/faults.py run faults.json --root CHECKOUT                # a line of JSON a fault, and the count

A fault is a sign (+ for -), a bound (< for <=), a wait that is left out, or two ranks swapped. The tests of the fault's
own room run first; all quick tests run only for a fault that these have not found.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

SOURCES = {
    "kernels": ["kernels"],
    "comm": ["comm"],
    "optim": ["kfuse/optim"],
    "train": ["kfuse/train"],
    "elastic": ["kfuse/elastic"],
    "statistics": ["kfuse/statistics"],
}
LEFT_OUT = {"aot.py", "__init__.py"}

# The first words of the names of each room's test files, after `test_`.
TESTS = {
    "kernels": ["kernels", "launches"],
    "comm": [
        *("engine", "buckets", "transports", "sum_tree", "topology", "cost", "schedule", "bf16_wire"),
        *("sync", "pair", "gradients", "accumulate", "reproducible"),
        *("nccl", "streams", "host_waits", "symmetric", "transfer"),
    ],
    "optim": ["optim", "sharded", "consistency", "state_dict", "bf16", "redundancy"],
    "train": [
        *("fit", "lr", "learning_rate", "loop", "losses", "loss", "step_fn", "state_transfer", "audit"),
        *("scripts", "growing", "load_balance", "loader", "weight_fn"),
    ],
    "elastic": ["elastic", "supervisor", "client", "records", "launchers", "security", "kfuse_run", "chaos"],
    "statistics": ["statistics", "noise", "cbs", "any_batch"],
}

KINDS = ("sign", "bound", "wait", "ranks")
WAITS = {
    "wait",
    "wait_all",
    "wait_stream",
    "wait_event",
    "synchronize",
    "record_stream",
    "join",
    "barrier",
    "await_over",
}


class Fault(NamedTuple):
    room: str
    kind: str
    file: str
    line: str
    """The line's text, without indentation: it says where the fault is, also in another version of the source."""
    mutated: str


def sites(root: Path, room: str) -> Iterator[Fault]:
    """Yields every fault that the room's source can have."""
    for folder in SOURCES[room]:
        for path in sorted((root / folder).rglob("*.py")):
            if path.name not in LEFT_OUT:
                text = path.read_text()
                lines = text.splitlines()
                for kind, number, start, end, put in _places(ast.parse(text)):
                    raw = lines[number - 1].encode()
                    new = raw[:start] + put(raw[start:end].decode()).encode() + raw[end:]
                    line, mutated = raw.decode().strip(), new.decode().strip()
                    if mutated != line:
                        yield Fault(room, kind, str(path.relative_to(root)), line, mutated)


Place = tuple[str, int, int, int, Callable[[str], str]]
"""The fault's kind, its line's number, the first byte and the one after the last, and what to put in their place."""


def _places(tree: ast.AST) -> Iterator[Place]:
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left, ast.Add() | ast.Sub(), right) if not _is_text(left) and not _is_text(right):
                yield from _between("sign", left, right, {"+": "-", "-": "+"})
            case ast.Compare(left, [ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()], [right]):
                yield from _between("bound", left, right, {"<=": "<", ">=": ">", "<": "<=", ">": ">="})
            case ast.Expr(ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))) if name in WAITS:
                yield from _within("wait", node, lambda text: "pass")
            case ast.Call(args=args):
                for arg in filter(_is_rank, args):
                    yield from _within("ranks", arg, lambda text: f"({text} ^ 1)")
            case ast.Subscript(slice=index) | ast.BinOp(left=index) if _is_rank(index):
                yield from _within("ranks", index, lambda text: f"({text} ^ 1)")


def _between(kind: str, left: ast.expr, right: ast.expr, other: Mapping[str, str]) -> Iterator[Place]:
    """Yields the place of the operator between two operands, if all stand on one line."""
    if left.end_lineno == right.lineno and left.end_col_offset is not None:

        def put(text: str) -> str:
            found = next(operator for operator in other if operator in text)
            return text.replace(found, other[found], 1)

        yield kind, right.lineno, left.end_col_offset, right.col_offset, put


def _within(kind: str, node: ast.expr | ast.stmt, put: Callable[[str], str]) -> Iterator[Place]:
    if node.lineno == node.end_lineno and node.end_col_offset is not None:
        yield kind, node.lineno, node.col_offset, node.end_col_offset, put


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_rank(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "rank") or (
        isinstance(node, ast.Attribute) and node.attr == "rank"
    )


def draw(root: Path, seed: int, each: int, also: Path | None) -> list[Fault]:
    """Returns `each` faults of every room, one kind as likely as another, in the order in which they were drawn."""
    drawn = []
    for room in SOURCES:
        generator = random.Random(f"{seed} {room}")
        found = sorted(set(sites(root, room)))
        by_kind = {kind: [fault for fault in found if fault.kind == kind] for kind in KINDS}
        count = 0
        while count < each and any(by_kind.values()):
            fitting = by_kind[generator.choice([kind for kind in KINDS if by_kind[kind]])]
            fault = fitting.pop(generator.randrange(len(fitting)))
            if all(place(tree, fault) is not None for tree in (root, also) if tree is not None):
                drawn.append(fault)
                count += 1
    return drawn


def place(root: Path, fault: Fault) -> tuple[Path, int] | None:
    """Returns the file and the line number at which a checkout has the fault's line; None: it has none, or several."""
    found = [
        (path, number)
        for folder in SOURCES[fault.room]
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines())
        if line.strip() == fault.line
    ]
    in_file = [(path, number) for path, number in found if path == root / fault.file]
    return (in_file or found)[0] if len(in_file) == 1 or len(found) == 1 else None


def run(root: Path, fault: Fault, timeout_s: float) -> tuple[str, str]:
    """Returns which tests found it, `room`, `all` (the others) or `none`, and the first test that did.

    `absent`: the source has no such line.
    """
    at = place(root, fault)
    if at is None:
        return "absent", ""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", "runs"))
        path = copy / at[0].relative_to(root)
        lines = path.read_text().splitlines(keepends=True)
        lines[at[1]] = lines[at[1]].replace(fault.line, fault.mutated)
        path.write_text("".join(lines))
        every = sorted(str(test.relative_to(copy)) for test in (copy / "tests").rglob("test_*.py"))
        own = [test for test in every if any(Path(test).stem.startswith(f"test_{word}") for word in TESTS[fault.room])]
        for found_by, tests in (("room", own), ("all", [test for test in every if test not in own])):
            left = list(tests)
            while found := _first_failure(copy, left, timeout_s):
                if not _fails_anyway(root, found, timeout_s):
                    return found_by, found
                left += [f"--deselect={found}"]  # not because of the fault
    return "none", ""


def _first_failure(copy: Path, tests: list[str], timeout_s: float) -> str:
    """Runs the tests in the copy up to the first that fails, and returns its name; empty: all pass.

    tests: files, names, and further arguments of pytest.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", "--timeout", "120"]
    command += ["-m", "not full and not long", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            if process.wait(timeout_s) == 0:
                return ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no end within {timeout_s} s"
        output.seek(0)
        lines = output.read().splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else lines[-1] if lines else "no output"


def _fails_anyway(root: Path, test: str, timeout_s: float) -> bool:
    """Whether the test fails without the fault too, as it may where the machine is busy."""
    return "::" in test and bool(_first_failure(root, [test], timeout_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = parser.add_subparsers(dest="word", required=True)
    drawing = words.add_parser("draw")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--each", type=int, default=5, help="faults in each room")
    drawing.add_argument("--also", type=Path, help="another checkout, whose source must have the line too")
    running = words.add_parser("run")
    running.add_argument("faults", type=Path)
    running.add_argument("--root", type=Path, default=ROOT, help="the checkout whose source and tests are used")
    running.add_argument("--timeout-s", type=float, default=1800.0, help="for one run of tests")
    given = parser.parse_args()
    if given.word == "draw":
        print(json.dumps([fault._asdict() for fault in draw(ROOT, given.seed, given.each, given.also)], indent=1))
        return
    results = []
    for entry in json.loads(given.faults.read_text()):
        found_by, test = run(given.root.resolve(), Fault(**entry), given.timeout_s)
        results.append(found_by)
        print(json.dumps({**entry, "found_by": found_by, "test": test}), flush=True)
    print(json.dumps({word: results.count(word) for word in ("room", "all", "none", "absent")}))


if __name__ == "__main__":
    main()
