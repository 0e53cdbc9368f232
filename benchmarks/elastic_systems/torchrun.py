"""DistributedDataParallel with a snapshot every few steps: restarted by torchrun's agent, or by a loop around the job.

The snapshot holds the step, so the place in the epoch. A worker that gets SIGTERM saves one after the step under way.
"""

from __future__ import annotations

import os
import signal
import socket

import torch

from elastic_systems import LR, SNAPSHOT_EVERY, WORKERS, System, Task, ddp_steps, problem, restore, save, state_of


class Torchrun(System):
    """The agent looks after its workers ten times a second: its shortest interval in common use.

    Its workers get a new store at each restart. By default torch 2.13 gives them the old one, where gloo finds the
    addresses of the dead: every other restart then failed again, or hung (pytorch issue 135712).
    """

    package = "torch"

    def start(self) -> None:
        self.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        self.run(*agent, "--max-restarts", "1000", "--monitor-interval", "0.1", *self.worker)

    @classmethod
    def work(cls, task: Task) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        notices: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: notices.append(number))
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        model, x, y = problem()
        ddp = DistributedDataParallel(model)
        opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        snapshot = task.directory / "snapshot.pt"
        step = restore(torch.load(snapshot), model, opt) if snapshot.exists() else 0
        for done in ddp_steps(task, ddp, opt, x, y, rank, size, step):
            if notices or (rank == 0 and done % SNAPSHOT_EVERY == 0):
                save(state_of(model, opt, done), snapshot)
            if notices:
                os._exit(128 + notices[0])  # without destructors: those of gloo have been seen to hang
        task.save_final(model)


class Loop(Torchrun):
    """What a shell's loop does: when one worker has ended, end the others and start all anew."""

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS)}
        self.processes = []
        for rank in range(WORKERS):
            self.env["RANK"] = str(rank)
            self.run(*self.worker)

    def tend(self) -> str | None:
        if any(process.poll() is not None for process in self.processes):
            for process in self.processes:
                process.kill()
                process.wait()
            self.start()
        return None


SYSTEMS = {"torchrun": Torchrun, "loop": Loop}
