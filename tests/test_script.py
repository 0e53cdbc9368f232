"""kfuse-run and kf.DataLoader: a script of the user's own, with a worker lost in the middle of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kfuse import script

SCRIPT = """
import os, pathlib, signal, sys
import torch, torch.nn.functional as F
import kfuse as kf
from kfuse.data import load_digits
from kfuse.models import MLP

torch.set_num_threads(1)
kf.init(kf.CommOptions(reproducible=True), timeout_s=20)
torch.manual_seed(0)
digits = load_digits()
model = MLP(digits.spec["input_shape"], digits.spec["num_classes"], dropout=0.1)
opt = kf.FusedAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
marker = pathlib.Path(sys.argv[1])
steps = 0
for step in kf.DataLoader(digits.train, model, opt, batch_size=48, micro_batch=8, epochs=2, seed=3):
    steps += 1
    for x, y in step:
        step.loss = F.cross_entropy(model(x), y)
        if steps == 20 and kf.rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
"""


def test_a_loop_of_ones_own_survives_a_death_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    hashes = []
    for workers in (1, 2):
        run_dir = tmp_path / str(workers)
        command = [sys.executable, "-m", "kfuse.script", "--workers", str(workers), "--no-replace", "--quiet"]
        command += ["--run-dir", str(run_dir), str(path), str(tmp_path / "marker")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env={**os.environ})
        assert done.returncode == 0, done.stdout + done.stderr
        hashes.append(json.loads((run_dir / "summary.json").read_text())["params_sha256"])
        steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(60))
    events = [json.loads(line)["kind"] for line in (tmp_path / "2" / "events.jsonl").read_text().splitlines()]
    assert [kind for kind in events if kind != "straggler"] == ["view", "failure", "view"]  # on a busy machine one is
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0", "x.py"], "--workers 0"),
        (["--workers", "3", "--max-workers", "2", "x.py"], "--max-workers 2"),
        (["absent.py"], "absent.py: no such file"),
        (["--workers", "two", "x.py"], "two"),
    ],
)
def test_wrong_arguments_end_in_status_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    with pytest.raises(SystemExit) as stopped:
        script.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
