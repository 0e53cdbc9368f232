"""Workers are lost at each moment of a loop's body: the others' bodies go on to their end, and the step comes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from distributed import run_workers
from elastic_job import script_job
from test_kfuse_run import run_script

from kfuse.train.evaluation import params_sha256

pytestmark = [pytest.mark.full, pytest.mark.jobs]

LOOP = """
import json, os, signal, sys, time, torch, torch.nn.functional as F, kfuse as kf
from kfuse.comm.executor import Executor

number = int(os.environ.get("KFUSE_WORKER", -1))
options, strikes = json.loads(sys.argv[1]), json.loads(sys.argv[2])
launch, died = Executor.launch, os.path.join(sys.argv[3], "died-")

def lost(step):  # a worker is lost in it: the others' backward then takes longer than until they notice
    return any(strike[1] == step for strike in strikes)

def dies(step, bucket, moment):
    if [number, step, bucket, moment] in strikes:
        open(f"{died}{number}", "w")
        os.kill(os.getpid(), signal.SIGKILL)

def patched(self, complete, step, local):
    for bucket in complete:
        dies(step, bucket.index, "before")
    launch(self, complete, step, local)
    for bucket in complete:
        dies(step, bucket.index, "during")
        if [number, step, bucket.index, "after"] in strikes:
            time.sleep(0.2)  # its exchange comes through
            dies(step, bucket.index, "after")
    if lost(step):
        time.sleep(0.1)

Executor.launch = patched
kf.init(comm_bucket_mb=0.06, comm_timeout_s=60, **{f"comm_{name}": value for name, value in options.items()})
torch.manual_seed(0)
x, y = torch.randn(240, 64), torch.randint(0, 3, (240,))
linear = torch.nn.Linear
model = torch.nn.Sequential(linear(64, 200), torch.nn.Tanh(), linear(200, 80), torch.nn.Tanh(), linear(80, 3))
opt = kf.FusedAdamW(model.parameters(), lr=0.01, clip_norm=0.5)
for step in kf.DataLoader(model, (x, y), opt, batch_size=24, micro_batch=4, epochs=2):
    for a, b in step:
        step.loss = F.cross_entropy(model(a), b)
        step.loss.backward()
    if not opt.engine.options.sharded:
        norms = [p.grad.norm() for p in model.parameters()]
    opt.synchronize()
    opt.step()
    opt.zero_grad()
"""


def alone(options: str) -> str:
    names: dict[str, Any] = {}
    with patch("sys.argv", ["train.py", options, "[]", "."]):
        exec(LOOP, names)
    return params_sha256(names["model"])


@pytest.mark.parametrize(
    ("options", "strikes"),
    [
        ({"schedule": "allreduce"}, [(2, 4, 0, "during"), (1, 9, 1, "before")]),
        ({"schedule": "tree"}, [(2, 4, 0, "during"), (1, 9, 1, "during")]),
        ({"schedule": "all_to_all"}, [(2, 4, 0, "after"), (1, 9, 1, "before")]),
        ({"reproducible": True}, [(2, 4, 1, "before"), (1, 9, 0, "during")]),
        ({"reproducible": True, "state": "sharded"}, [(2, 4, 2, "after"), (1, 9, 1, "before")]),
    ],
)
def test_a_body_goes_on_where_a_worker_is_lost_during_its_backward(
    options: dict[str, Any], strikes: list[tuple[int, int, int, str]], tmp_path: Path
) -> None:
    """Of three workers, then of two. The others have messages to start, and to wait for, in the same backward."""
    given = json.dumps(options)
    job = script_job(tmp_path, LOOP, 3, given, json.dumps(strikes), str(tmp_path))
    assert {path.name for path in tmp_path.glob("died-*")} == {"died-1", "died-2"}
    assert [event["worker"] for event in job.of_kind("failure")] == [2, 1], job.told()
    assert [record["step"] for record in job.metrics] == list(range(20)) and not job.of_kind("went_back")
    if "reproducible" in options:
        assert run_workers(1, alone, given) == [job.summary["params_sha256"]]


LAST = """
import json, os, signal, sys, time, torch, torch.nn.functional as F, kfuse as kf

number, workers, fails, newcomers, checkpoints = int(os.environ["KFUSE_WORKER"]), int(sys.argv[1]), *sys.argv[2:]

def events(kind):
    with open("run/events.jsonl") as file:
        return sum(f'"kind": "{kind}"' in line for line in file)

def until(reached):
    for _ in range(2000):
        if reached():
            return
        time.sleep(0.05)
    raise TimeoutError

def strikes(step):
    if step == 5 and 0 < number < workers:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 9 and number == 0:  # the last one
        until(lambda: events("failure") == workers - 1 and (newcomers == "boot" or events("ready") == 1))
        if fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("my own")

kf.init()
if (newcomers == "boot" and number == workers) or (newcomers == "wait" and number == workers + 1):
    until(lambda: events("failure") == workers)
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = torch.nn.Linear(8, 3)
opt = kf.FusedSGD(model.parameters(), lr=0.1)
kept = {"checkpoint_dir": "checkpoints", "checkpoint_every_steps": 3, "checkpoint_resume": "auto"}
settings = kept if checkpoints == "yes" else {}
for step in kf.DataLoader(model, (x, y), opt, batch_size=16, epochs=5, **settings):
    for a, b in step:
        strikes(step.number)
        step.loss = F.cross_entropy(model(a), b)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("workers", "fails", "newcomers", "checkpoints", "said"),
    [
        (2, "raise", "boot", "yes", "worker 0 ended with exit status 1: ValueError: my own"),
        (2, "raise", "join", "no", "worker 0 ended with exit status 1: ValueError: my own"),
        (3, "kill", "wait", "no", "no worker is left: the last one was ended by SIGKILL"),
        (3, "kill", "wait", "yes", None),
    ],
)
def test_the_last_worker_is_lost_while_another_is_to_join(
    workers: int, fails: str, newcomers: str, checkpoints: str, said: str | None, tmp_path: Path
) -> None:
    """That one boots, or is in a view that the last one has not come to, or waits for yet another one that boots.

    The job goes on from a checkpoint, or ends in one line.
    """
    given = [str(workers), fails, newcomers, checkpoints]
    status = int(said is not None)
    ended = run_script(tmp_path, LAST, "--observe-progress=false", workers=workers, after=given, status=status)
    assert len([event for event in ended.of_kind("failure") if "worker" in event]) == workers, ended.said
    if said is None:
        assert ended.of_kind("view")[-1]["reason"] == "restart" and 0 < ended.of_kind("resumed")[0]["step"] <= 9
        assert ended.summary["steps"] == 20
        return
    assert ended.said.splitlines()[-1].startswith(f"kfuse: error: {said}; the run directory is"), ended.said


COLLECTIVE = """
import os, signal, torch, torch.nn.functional as F, kfuse as kf

number = int(os.environ["KFUSE_WORKER"])
kf.init(comm_state="sharded", comm_bucket_mb=0.01)
torch.manual_seed(0)
x, y = torch.randn(64, 64), torch.randint(0, 3, (64,))
model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Tanh(), torch.nn.Linear(100, 3))
opt = kf.FusedAdamW(model.parameters(), lr=0.01)
lost = []
for step in kf.DataLoader(model, (x, y), opt, batch_size=16, epochs=3):
    for a, b in step:
        step.loss = F.cross_entropy(model(a), b)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
    try:
        if number == 1 and step.number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.state_dict()
    except kf.CommError as error:
        lost.append(error)
assert lost
"""


def test_a_collective_of_the_users_own_meets_a_lost_worker(tmp_path: Path) -> None:
    """The script has to catch the error, and goes on."""
    job = script_job(tmp_path, COLLECTIVE, 3)
    assert job.error is None and len(job.metrics) == 12 and len(job.of_kind("failure")) == 1, job.told()
