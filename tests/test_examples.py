"""The examples run, and train as the scripts in plain PyTorch that they were ported from."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import io
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import KEPT, load, run_workers
from elastic_job import run_script
from limits import limits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import kfuse as kf
from kfuse.data import EpochSampler

EXAMPLES = Path(__file__).parent.parent / "examples"
PORTED, ELASTIC = ("llama", "resnet"), ("kungfu_batch_size", "noise_scale_policy")


class InKfuseOrder:
    """Stands in for torch's DataLoader in a plain script: this rank's part of each batch, in the order of kfuse."""

    def __init__(self, data: Any, batch_size: int, shuffle: bool, num_workers: int = 0) -> None:
        assert shuffle and len(data) % batch_size == 0
        self.data, self.batch_size, self.epoch = data, batch_size, 0

    def __iter__(self) -> Iterator[Any]:
        sampler, share = EpochSampler(len(self.data), 0), self.batch_size // dist.get_world_size()
        for begin in range(dist.get_rank() * share, len(self.data), self.batch_size):
            yield default_collate([self.data[int(i)] for i in sampler.indices(self.epoch, begin, share)])
        self.epoch += 1


def ported_losses(name: str, argument: str) -> list[float]:
    """Of the example with kfuse: the mean over the workers of each step's loss."""
    losses = load(str(EXAMPLES / f"{name}.py")).main(argument)
    return [kf.allreduce(loss, "avg") for loss in losses]


def plain_losses(name: str, argument: str) -> list[float]:
    """Of the plain script, its model wrapped in DistributedDataParallel."""
    script = load(str(EXAMPLES / "plain" / f"{name}.py"))
    script.DataLoader = InKfuseOrder
    dist.init_process_group("gloo")
    build = "Llama" if name == "llama" else "resnet"
    setattr(script, build, partial(wrapped, getattr(script, build)))
    losses = torch.tensor(script.main(argument), dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def wrapped(build: Callable[..., nn.Module], *args: Any) -> nn.Module:
    KEPT.append(DistributedDataParallel(build(*args)))
    return KEPT[-1]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script is given: a folder of images of two classes that can be told apart, and a text."""
    from PIL import Image

    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for label in range(2):
        (folder / "images" / f"class{label}").mkdir(parents=True)
        for number in range(64):
            pixels = draw.integers(0, 156, (40, 48, 3)) + np.array([100 * label, 50, 100 - 100 * label])
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"class{label}" / f"{number}.png")
    words = draw.choice(["one", "two", "three", "four"], 6000)
    (folder / "book.txt").write_text(" ".join(words)[: 16 * 64 * 12 + 1])
    return {"resnet": str(folder / "images"), "llama": str(folder / "book.txt")}


@pytest.mark.full
@pytest.mark.parametrize("name", PORTED)
def test_a_port_trains_as_the_plain_script(name: str, arguments: dict[str, str]) -> None:
    ours = run_workers(2, ported_losses, name, arguments[name])
    theirs = run_workers(2, plain_losses, name, arguments[name])
    assert len(ours[0]) == len(theirs[0]) >= 4
    np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-4)
    assert ours[0][-1] < 0.8 * ours[0][0]  # it learns


@pytest.mark.full
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in (*PORTED, *ELASTIC, "replicas"))
)
def test_an_example_runs(name: str, arguments: dict[str, str]) -> None:
    given = [arguments["llama"], str(EXAMPLES.parent / "README.md")] if name == "streaming_text" else []
    ranks = run_workers(2, run_example, str(EXAMPLES / f"{name}.py"), given)
    assert any(printed for printed, _ in ranks) and not any(warned for _, warned in ranks), ranks


@pytest.mark.full
def test_a_sharded_model_trains_on_workers_of_two_ranks(tmp_path: Path) -> None:
    elasticity = limits(2, 2, 2, script=True)
    job = run_script(tmp_path / "run", elasticity, str(EXAMPLES / "replicas.py"), ranks=2)
    assert job.error is None, job.told()
    assert len(job.metrics) == 128 and job.metrics[-1]["loss"] < 0.3 * job.metrics[0]["loss"]


def test_nanogpts_loop_takes_three_lines_six_or_eight() -> None:
    plain, monitored, growing, elastic = (
        (EXAMPLES / name).read_text().splitlines()[1:]  # without the docstring
        for name in ("plain/nanogpt.py", "nanogpt_monitor.py", "nanogpt_growth.py", "nanogpt.py")
    )
    for script, added, removed in ((monitored, 3, 0), (growing, 6, 2), (elastic, 8, 15)):
        signs = [line[0] for line in difflib.ndiff(plain, script)]
        assert (signs.count("+"), signs.count("-")) == (added, removed)


@pytest.mark.full
def test_nanogpts_windows_are_the_same_on_any_workers(arguments: dict[str, str], tmp_path: Path) -> None:
    norms = []
    for count in (1, 2):
        elasticity = limits(count, count, count, script=True)
        job = run_script(tmp_path / str(count), elasticity, str(EXAMPLES / "nanogpt.py"), arguments["llama"])
        assert job.error is None, job.told()
        norms.append([record["grad_norm"] for record in job.metrics])
    assert len(norms[0]) == 61
    np.testing.assert_allclose(norms[0][:5], norms[1][:5], rtol=1e-3)


def run_example(script: str, arguments: list[str]) -> tuple[str, list[str]]:
    """What it prints and warns of."""
    sys.argv = [script, *arguments]
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()) as printed:
        KEPT.append(runpy.run_path(script, run_name="__main__"))
        atexit._run_exitfuncs()  # as at a script's end, which a worker of tests does not reach
    return printed.getvalue(), [str(warning.message) for warning in warned]


SLOWLY = """
import runpy, sys, time
import torch
import kfuse as kf
from torch.nn.modules.module import register_module_forward_pre_hook

def wait(module, _):
    if type(module).__name__ in ("MLP", "ConvNet") and module.training and kf.size() < 3:
        time.sleep(0.01)

register_module_forward_pre_hook(wait)
fit = kf.fit
kf.fit = lambda *given, **named: fit(*given, **{**named, "epochs": 3, "seed": 3})
torch.manual_seed(3)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""An example that ends early, and whose steps are slow until all workers have come; with a seed, since the noise scale
of so few steps is not known in every training."""


@pytest.mark.full
@pytest.mark.parametrize("name", ELASTIC)
def test_kungfus_policies_add_workers(name: str, tmp_path: Path) -> None:
    """To the end of training; the second one's batch grows with them."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    elasticity = limits(1, 1, 3, script=True)
    job = run_script(tmp_path / "run", elasticity, str(tmp_path / "slowly.py"), str(EXAMPLES / f"{name}.py"))
    assert job.error is None, job.told()
    workers, batches = ([record[key] for record in job.metrics] for key in ("workers", "batch_size"))
    assert max(workers) > workers[0] == 1
    if name == "kungfu_batch_size":
        assert {32 * count for count in workers[-10:]} == {max(batches)}
