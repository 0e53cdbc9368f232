"""`kfuse cbs` on real runs: exact branches, nothing of the run is touched, and a killed measurement goes on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_workers
from elastic_job import read_lines, wait_until

import kfuse as kf
from kfuse.checkpoint.format import Checkpointer, load

pytestmark = pytest.mark.full

SMALL = ["model.hidden=[16]", "train.epochs=null", "observe.progress=false", "observe.sinks=[]"]
SMALL += ["train.save_model=false", "workers.max=1", "workers.threads=1", "batch.size=16", "batch.micro=8"]
MEASURED = ["factors=[1,2]", "repetitions=2", "samples=256", "tolerance=0.5"]


def kfuse(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kfuse", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def trained(run: Path, *words: str, steps: int = 80, every: int = 40) -> Path:
    length = [f"train.steps={steps}", f"checkpoint.every_steps={every}", "checkpoint.keep=9"]
    done = kfuse(f"hydra.run.dir={run}", *SMALL, *length, *words)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "plain", "policy=none", "lr.scaling=none")


@pytest.fixture(scope="module")
def measured(run: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A measurement at step 40, and its result. The run's own files stay as they were."""
    before = files(run)
    done = kfuse("cbs", f"run={run}", "steps=[40]", *MEASURED)
    assert done.returncode == 0, done.stderr
    assert files(run) == before, "the run's own files are read only"
    return done, json.loads((run / "cbs" / "cbs.json").read_text())


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


def files(run: Path) -> dict[str, str]:
    """The run's own files, each with its SHA-256."""
    found = [path for path in run.rglob("*") if path.is_file() and "cbs" not in path.relative_to(run).parts]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def branch(run: Path, batch: int, seed: int, step: int = 40) -> Path:
    return run / "cbs" / f"step-{step:08d}" / f"batch-{batch}-seed-{seed}.json"


def trained_branch(path: Path) -> tuple[dict[str, Any], list[int], list[float]]:
    """What it was asked for; its batch size in each step, and its loss."""
    found = json.loads(path.read_text())
    samples = [0, *(row[0] for row in found["steps"])]
    return found["branch"], [b - a for a, b in pairwise(samples)], [row[1] for row in found["steps"]]


def copied(run: Path, to: Path, *names: str) -> Path:
    """A directory with these parts of the run."""
    to.mkdir()
    for name in names:
        (to / name).symlink_to(run / name)
    return to


def test_the_first_branch_of_the_reference_is_the_run_itself(run: Path, measured: Any) -> None:
    done, result = measured
    own = rows(run)[40:56]
    asked, sizes, losses = trained_branch(branch(run, 16, 0))
    assert (asked["lr"], losses, set(sizes)) == (own[0]["lr"], [row["loss"] for row in own], {16})
    assert trained_branch(branch(run, 16, 1))[2] != losses, "another order of the data"
    larger, its_sizes, _ = trained_branch(branch(run, 32, 0))
    assert set(its_sizes) == {32} and larger["lr"] == pytest.approx(own[0]["lr"] * 2**0.5)
    assert sum(its_sizes) == sum(sizes), "all branches train on the same number of samples"
    assert not list((run / "cbs").rglob("*.pt")), "no copies of checkpoints"
    assert result["lr_scaling"] == "sqrt" and [point["step"] for point in result["checkpoints"]] == [40]
    assert result["checkpoints"][0]["losses"][0][0] == pytest.approx(sum(losses[12:]) / 4)
    assert "B* is above" in done.stdout


def test_a_killed_measurement_goes_on_where_it_was(tmp_path: Path, run: Path, measured: Any) -> None:
    copy = copied(run, tmp_path / "copy", ".hydra", "checkpoints", "metrics.jsonl")
    command = [sys.executable, "-m", "kfuse", "cbs", f"run={copy}", "steps=[40]", *MEASURED]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    first = branch(copy, 16, 0)
    try:
        wait_until("a branch", first.exists)
        written = first.stat().st_mtime_ns
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert not (copy / "cbs" / "cbs.json").exists()
    done = kfuse("cbs", f"run={copy}", "steps=[40]", *MEASURED)
    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == written, "a finished branch is not trained again"
    assert json.loads((copy / "cbs" / "cbs.json").read_text())["checkpoints"] == measured[1]["checkpoints"]


def test_ctrl_c_ends_the_branch_under_way(tmp_path: Path, run: Path) -> None:
    copy = copied(run, tmp_path / "copy", ".hydra", "checkpoints")
    command = [sys.executable, "-m", "kfuse", "cbs", f"run={copy}", "steps=[40]", "repetitions=20", "samples=4000"]
    attend: Any = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=attend)
    try:
        wait_until("a branch", branch(copy, 16, 0).exists)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130 and "finished branches are kept" in said
    assert not (copy / "cbs" / "cbs.json").exists(), "a part of a measurement is none"


def test_what_the_run_had_decided_does_not_reach_the_branches(tmp_path: Path) -> None:
    """A schedule doubles the batch at step 22: at the checkpoint of step 20 that is announced already.

    The rate is held where it was: in the middle of the warm-up, and in a decay after a change of the batch size. It
    follows the batch size as suits SGD. torchrun starts two workers.
    """
    phases = "policy.phases=[{step: 22, batch_size: 32, lr_scale: 0.5}]"
    words = ["policy=schedule", phases, "lr.scaling=adascale", "lr.warmup_steps=25", "lr.decay=cosine", "optimizer=sgd"]
    run = trained(tmp_path / "run", *words, steps=60, every=20)
    own = rows(run)
    assert own[22]["batch_size"] == 32
    # A checkpoint that is due while the one before is being written comes later. At the run's end the rate is 0.
    steps = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    last = max(step for step in steps if step < len(own))
    assert last > 22
    words = ["-m", "kfuse", "cbs", f"run={run}", f"steps=[20,{last}]", *MEASURED]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tolerated: ") == 2, "one worker tells"
    for step, batch in ((20, 16), (last, 32)):
        for size in (batch, 2 * batch):
            asked, sizes, _ = trained_branch(branch(run, size, 0, step))
            assert set(sizes) == {size} and asked["workers"] == 2
            assert asked["lr"] == pytest.approx(own[step]["lr"] * size / batch) and own[step]["lr"] > 0


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path, run: Path) -> None:
    copy = copied(run, tmp_path / "copy", ".hydra")
    saved = load(run / "checkpoints" / "step-00000040")
    saved["model"] = {name: value[..., :1] for name, value in saved["model"].items()}
    writer = Checkpointer(copy / "checkpoints", 1, lambda event: None)
    writer.save(40, saved)
    writer.wait()
    done = kfuse("cbs", f"run={copy}", *MEASURED)
    assert done.returncode == 1 and done.stdout.count("\n") == 1
    assert "step-00000040: " in done.stdout and "size mismatch" in done.stdout
    assert not (copy / "cbs").exists()


# -- kf.critical_batch with several workers ---------------------------------------------------------------------------


def measured_by_one_rank() -> tuple[Any, bool]:
    kf.init(comm_state="sharded")
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 2)
    opt = kf.FusedAdamW(net.parameters(), lr=0.01)
    x = torch.randn(256, 6)
    data, batch = (x, (x[:, 0] > 0).long()), {"batch_size": 8, "micro_batch": 2}
    kf.fit(net, data, opt, steps=5, seed=1, **batch)

    def state() -> list[torch.Tensor]:
        return [net.weight.detach().clone(), opt.state_dict()["state"][0]["exp_avg"].clone()]

    before = state()
    found = kf.critical_batch(net, data, opt, factors=(1, 2, 4), repetitions=2, samples=128, tolerance=0.5, **batch)
    return found.as_dict(), all(map(torch.equal, before, state()))


def test_all_ranks_of_a_fixed_group_get_the_same_result() -> None:
    (first, kept), (second, also_kept) = run_workers(2, measured_by_one_rank)
    assert first == second and kept and also_kept
    assert first["critical"] is not None or first["low"] > 0
