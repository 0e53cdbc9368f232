"""torchft's per-step fault tolerance, as in its own DDP example: a replica group of one process each.

The lighthouse has short timeouts, and a dead replica is started again at once. Each replica group keeps its place in
its own share of the data after each step, as the example advises; a batch whose step was not committed is drawn again.
The first replicas wait for each other before the first step.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F

from elastic_systems import BATCH, EPOCH_STEPS, LR, WORKERS, Log, System, Task, batches, problem


class Torchft(System):
    package = "torchft"

    def start(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # read as it is loaded; its replicas inherit it
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10, heartbeat_timeout_ms=300
        )
        self.env |= {"TORCHFT_LIGHTHOUSE": self._lighthouse.address(), "RUST_LOG": os.environ["RUST_LOG"]}
        self.env["NUM_REPLICA_GROUPS"] = str(WORKERS)
        for group in range(WORKERS):
            self._replica(group)

    def _replica(self, group: int) -> None:
        self.env["REPLICA_GROUP_ID"] = str(group)
        self.run(*self.worker)

    def tend(self) -> str | None:
        for group, process in enumerate(self.processes):
            if process.poll() is not None:
                self._replica(group)
                self.processes[group] = self.processes.pop()
        return None

    def stop(self) -> None:
        super().stop()
        self._lighthouse.shutdown()

    @classmethod
    def work(cls, task: Task) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

        group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
        model, x, y = problem()
        opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), "opt": opt.state_dict()}

        def load(values: dict[str, Any]) -> None:
            model.load_state_dict(values["model"])
            opt.load_state_dict(values["opt"])

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        wait = timedelta(seconds=10)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=wait),
            load_state_dict=load,
            state_dict=state,
            min_replica_size=1,
            init_sync=False,  # all begin with the same weights
            timeout=wait,
            quorum_timeout=wait,
            connect_timeout=wait,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
            replica_id=f"group_{group}",
            hostname="127.0.0.1",
        )
        (task.directory / f"up-{group}").touch()
        while len(list(task.directory.glob("up-*"))) < groups:  # none goes ahead alone at the job's start
            time.sleep(0.01)
        ddp, managed, log = DistributedDataParallel(manager, model), Optimizer(manager, opt), Log(task)
        sampler = DistributedSampler(x, group, groups, group_rank=0, num_replicas=1, seed=0)
        place = task.directory / f"place-{group}"
        drawn = int(place.read_text()) if place.exists() else 0
        while manager.current_step() < task.steps:
            epoch = drawn // EPOCH_STEPS
            sampler.set_epoch(epoch)
            for part in batches(sampler, BATCH // groups, drawn % EPOCH_STEPS):
                while True:
                    step = manager.current_step() + 1
                    log.begin(step, epoch, part)
                    managed.zero_grad()
                    F.cross_entropy(ddp(x[part]), y[part]).backward()
                    managed.step()
                    if manager.is_participating() and manager.current_step() >= step:
                        break
                drawn += 1
                place.with_suffix(".part").write_text(str(drawn))
                os.replace(place.with_suffix(".part"), place)
                log.done(manager.current_step(), manager.num_participants(), manager.participating_rank() or 0)
                if manager.current_step() == task.steps:
                    break
        task.save_final(model)


SYSTEMS = {"torchft": Torchft}
