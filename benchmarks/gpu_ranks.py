"""The engine between two workers that share one device: NCCL on a GPU, gloo on a CPU.

    python benchmarks/gpu_ranks.py --device cuda transports     every transport against one worker alone
    python benchmarks/gpu_ranks.py --device cuda elastic        growth from 1 to 2, and a worker killed

NCCL refuses two ranks on one device unless told otherwise: up to 2.29 each rank must claim another host, from 2.30 on
there is a switch.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from machine import machine, versions
from torch import nn
from torch.multiprocessing import get_context

import kfuse as kf
from kfuse.comm import transports
from kfuse.comm.plan import StepPlan
from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.supervisor import Elasticity, JobFailed, Supervisor

STEPS, MICRO_BATCHES, SAMPLES = 8, 8, 16
LIMIT_S = 40.0
JOB_LIMIT_S = 60.0  # NCCL and three starts of Python with torch, twice over
GROW_AT, KILL_AT = 5, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("what", choices=("transports", "elastic", "work"), help="`work` is what elastic starts")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    if options.what == "work":
        _work(options.device, *options.arguments)
        return 0
    checked = _transports if options.what == "transports" else _elastic
    results = checked(options.device)
    for name, result in results.items():
        print(f"{name:<40} {result['verdict']}")
    if options.json is not None:
        found = versions(("torch", "triton")) | {"nccl": ".".join(map(str, _nccl())) if _nccl() else "none"}
        record = {"device": options.device, "machine": machine(), "versions": found, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(result["verdict"] != "ok" for result in results.values()))


def _nccl() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]


def _share_the_device(device: str, rank: int) -> None:
    """Called before anything touches CUDA."""
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif _nccl() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"kfuse-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(32, 700), nn.Tanh(), nn.Linear(700, 300), nn.Tanh(), nn.Linear(300, 10))
    return model.to(device)


def _data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 32, generator=generator)
    return x, (x[:, :10] + x[:, 10:20]).argmax(1)


# -- every transport -------------------------------------------------------------------------------------------------


def _transports(device: str) -> dict[str, dict[str, Any]]:
    """Two workers' losses, statistics and parameters against one's; the reproducible ones bit by bit."""
    cases = [(name, False) for name in transports.NAMES] + [("auto", True)]
    results: dict[str, dict[str, Any]] = {}
    for schedule, reproducible in cases:
        name = f"{schedule}, reproducible" if reproducible else schedule
        try:
            [alone] = _spawn(1, device, schedule, reproducible)
            first, second = _spawn(2, device, schedule, reproducible)
        except RuntimeError as error:
            results[name] = {"verdict": f"failed: {error}"}
            continue
        results[name] = {"verdict": _compare(alone, first, second, reproducible), "alone": alone, "two": first}
    return results


def _compare(alone: dict[str, Any], first: dict[str, Any], second: dict[str, Any], reproducible: bool) -> str:
    if first != second:
        return "the two workers disagree"
    if reproducible:
        return "ok" if first == alone else "other bits than one worker's"
    worst = max(
        abs(a - b) / max(abs(a), abs(b))
        for one, two in zip(alone["steps"], first["steps"], strict=True)
        for a, b in zip(one, two, strict=True)
    )
    return "ok" if worst <= 1e-3 else f"losses or statistics differ from one worker's by {worst:.1e}"


def _spawn(count: int, device: str, schedule: str, reproducible: bool) -> list[dict[str, Any]]:
    """What each rank found. Raises RuntimeError when one fails, or after LIMIT_S."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_S), wait_for_workers=False)
    context = get_context("spawn")
    answers: Any = context.Queue()
    arguments = (count, store.port, device, schedule, reproducible, answers)
    processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(found) < count:
            try:
                rank, answer = answers.get(timeout=0.2)
            except queue.Empty:
                dead = [p.exitcode for r, p in enumerate(processes) if r not in found and p.exitcode is not None]
                if dead:
                    raise RuntimeError(f"a worker of {count} ended with exit code {dead[0]}") from None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{count} workers took more than {LIMIT_S:.0f} s") from None
                continue
            if "error" in answer:
                raise RuntimeError(f"rank {rank} of {count}: {answer['error']}")
            found[rank] = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(count)]


def _rank(rank: int, count: int, port: int, device: str, schedule: str, reproducible: bool, answers: Any) -> None:
    _share_the_device(device, rank)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent hosts the store, as torchrun's agent would
    )
    try:
        options = kf.CommOptions(schedule=schedule, reproducible=reproducible, bucket_mb=0.25)
        answers.put((rank, _train(kf.init(options, timeout_s=LIMIT_S / 2))))
    except Exception as error:
        answers.put((rank, {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}))


def _train(session: kf.Session) -> dict[str, Any]:
    """Loss, |gbar|, S and G2 of each step, and a digest of the final parameters."""
    group = session.group
    model = _model(group.device)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
    share = MICRO_BATCHES // group.size
    mine = range(group.rank * share, (group.rank + 1) * share)
    ranges = tuple(range(r * share, (r + 1) * share) for r in range(group.size))
    steps = []
    for step in range(STEPS):
        opt.begin(StepPlan(MICRO_BATCHES * SAMPLES, ranges))
        for j in mine:
            x, y = (t.to(group.device) for t in _data(SAMPLES, seed=step * MICRO_BATCHES + j))
            with opt.micro_batch(samples=SAMPLES, last=j == mine[-1]) as micro_batch:
                loss = F.cross_entropy(model(x), y)
                micro_batch.loss = loss.detach()
                loss.backward()
        opt.step()
        opt.zero_grad()
        stats = opt.stats
        assert stats is not None
        steps.append([stats.loss, stats.grad_norm, stats.grad_variance, stats.mean_grad_sq])
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return {"steps": steps, "parameters": digest.hexdigest()}


# -- growth and death ------------------------------------------------------------------------------------------------


def _elastic(device: str) -> dict[str, dict[str, Any]]:
    """A job on one worker, one that grows to two, and one that loses its second: the same parameters in the end."""
    expected: str | None = None
    results: dict[str, dict[str, Any]] = {}
    jobs: list[tuple[str, str, Elasticity, Callable[[list[str]], bool]]] = [
        ("one worker", "plain", Elasticity(1, 1, 1, script=True), lambda kinds: kinds == ["view"]),
        ("growth from 1 to 2", "grow", Elasticity(1, 1, 2, script=True), lambda kinds: kinds.count("view") == 2),
        (
            "SIGKILL of one of 2",
            "kill",
            Elasticity(2, 1, 2, replace=False, script=True),
            lambda kinds: "failure" in kinds,
        ),
    ]
    for name, what, elasticity, happened in jobs:
        recorder = _Recorder()
        started = time.monotonic()
        try:
            asyncio.run(_supervise(device, what, elasticity, recorder))
        except (JobFailed, TimeoutError) as error:
            why = str(error) or f"not over after {JOB_LIMIT_S:.0f} s"
            results[name] = {"verdict": f"failed: {why}", "events": recorder.events, "output": recorder.lines[-20:]}
            print("\n".join(recorder.lines[-20:]))
            continue
        kinds = [event["kind"] for event in recorder.events]
        digest = (recorder.summary or {}).get("params_sha256")
        expected = expected or digest
        verdict = "ok"
        if not happened(kinds):
            verdict = f"what should have happened did not: {kinds}"
        elif digest is None or digest != expected:
            verdict = "other parameters than one worker's"
        seconds = round(time.monotonic() - started, 1)
        results[name] = {"verdict": verdict, "events": recorder.events, "seconds": seconds, "params_sha256": digest}
    return results


class _Recorder:
    """Keeps what the workers report."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.summary: dict[str, Any] | None = None

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        for kind, data in records:
            if kind == "event":
                self.events.append(data)
            elif kind == "summary":
                self.summary = data

    def line(self, text: str) -> None:
        self.lines.append(text)


async def _supervise(device: str, what: str, elasticity: Elasticity, recorder: _Recorder) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--device", device, "work", what, str(Path(folder, "killed"))]
        launcher = LocalLauncher([sys.executable, str(Path(__file__).absolute()), *arguments])
        supervisor = Supervisor(launcher, {"run_dir": folder}, recorder, elasticity)
        await asyncio.wait_for(supervisor.run(), JOB_LIMIT_S)


def _work(device: str, what: str, killed: str) -> None:
    """A worker's training script: 400 steps, in which it grows, or dies, or neither."""
    _share_the_device(device, int(os.environ["KFUSE_WORKER"]))
    session = kf.init(kf.CommOptions(reproducible=True), timeout_s=20)
    model = _model(session.group.device)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
    for index, step in enumerate(
        kf.DataLoader(_data(960, seed=1), model, opt, batch_size=48, micro_batch=8, epochs=20)
    ):
        if what == "grow" and kf.size() == 1 and index >= GROW_AT:
            kf.resize(2)
            time.sleep(0.05)  # leaves the new worker time to start before the run is over
        for x, y in step:
            step.loss = F.cross_entropy(model(x), y)
            if what == "kill" and index == KILL_AT and kf.rank() == 1 and not Path(killed).exists():
                Path(killed).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step.loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    sys.exit(main())
