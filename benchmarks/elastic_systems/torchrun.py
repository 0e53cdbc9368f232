"""DistributedDataParallel with a snapshot every few steps: restarted by torchrun's agent, or by a loop around the job.

The snapshot holds the step, so the place in the epoch. A worker that gets SIGTERM saves one after the step under way.
"""

from __future__ import annotations

import os
import signal
import socket

import torch
import torch.nn.functional as F

from elastic_systems import BATCH, EPOCH_STEPS, LR, SNAPSHOT_EVERY, WORKERS, Log, System, Task, batches, problem, save


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
        from torch.utils.data import DistributedSampler

        notices: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: notices.append(number))
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        model, x, y = problem()
        ddp, sampler = DistributedDataParallel(model), DistributedSampler(x, size, rank, seed=0)
        opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        log, snapshot, step = Log(task), task.directory / "snapshot.pt", 0
        if snapshot.exists():
            state = torch.load(snapshot)
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            step = state["step"]
        while step < task.steps:
            epoch = step // EPOCH_STEPS
            sampler.set_epoch(epoch)
            for part in batches(sampler, BATCH // size, step % EPOCH_STEPS):
                log.begin(step + 1, epoch, part)
                opt.zero_grad()
                F.cross_entropy(ddp(x[part]), y[part]).backward()
                opt.step()
                step += 1
                log.done(step, size, rank)
                if notices or (rank == 0 and step % SNAPSHOT_EVERY == 0):
                    save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, snapshot)
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
