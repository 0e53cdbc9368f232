"""kfuse-run with its own loop. One micro-batch a worker, as in DDP; the notice's grace below the 5 s that it has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F

from elastic_systems import BATCH, LR, WORKERS, Log, System, Task, problem


class Kfuse(System):
    package = "kfuse"
    resizes = True
    reproducible: ClassVar[bool] = False

    def start(self) -> None:
        run = ["--workers", str(WORKERS), "--max-workers", str(WORKERS), "--run-dir", str(self.task.directory / "run")]
        options = ["--observe-progress=false", "--elastic-grace-s=4"]
        self.run("-m", "kfuse.cli.kfuse_run", *run, *options, *self.worker)

    @classmethod
    def work(cls, task: Task) -> None:
        import torch

        import kfuse as kf

        kf.init(comm_reproducible=cls.reproducible, comm_timeout_s=30)
        model, x, y = problem()
        opt = kf.FusedAdamW(model.parameters(), lr=LR)
        log, wish = Log(task), _wish(task)

        class Told(kf.BasePolicy):
            def after_step(self) -> None:
                log.done(opt.engine.step, kf.size(), kf.rank())
                if kf.rank() == 0 and wish.exists():
                    kf.resize(int(wish.read_text()))

        loader = kf.DataLoader(
            model,
            {"x": x, "y": y, "number": torch.arange(len(y))},
            opt,
            policy=Told(),
            epochs=task.epochs,
            batch_size=BATCH,
            micro_batch=BATCH // WORKERS,
        )
        for step in loader:
            used: list[int] = []
            log.begin(step.number + 1, step.epoch, used)  # a slow worker may get no micro-batch
            for batch in step:
                used += batch["number"].tolist()
                log.begin(step.number + 1, step.epoch, used)
                F.cross_entropy(model(batch["x"]), batch["y"]).backward()
            opt.step()
            opt.zero_grad()
        if kf.rank() >= 0:  # not one that has left
            task.save_final(model)

    def resize(self, workers: int) -> None:
        part = self.task.directory / "wish"
        part.write_text(str(workers))
        os.replace(part, _wish(self.task))  # it is read at every step

    def growths(self) -> list[dict[str, float]]:
        """The new worker's boot and wait for a step boundary; then all stand still to regroup and send it the state."""
        found, ready = [], {}
        for event in map(json.loads, (self.task.directory / "run" / "events.jsonl").read_text().splitlines()):
            if event["kind"] == "ready":
                ready[event["worker"]] = event
            elif event["kind"] == "view" and event["reason"] == "grow" and ready:
                newest = ready[max(ready)]
                join = event["time"] - newest["time"] - event["pause_s"]
                split = {"boot": newest["boot_s"], "join": max(0.0, join)}
                found.append(split | {part: event[f"{part}_s"] for part in ("regroup", "transfer")})
        return found


class KfuseReproducible(Kfuse):
    reproducible = True


def _wish(task: Task) -> Path:
    return task.directory / "workers"


SYSTEMS = {"kfuse": Kfuse, "kfuse-reproducible": KfuseReproducible}
