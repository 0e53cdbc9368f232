"""Ray Train's TorchTrainer on a Ray cluster of this machine: DDP, and a checkpoint every few steps as its guide has it.

max_failures=-1, and its controller looks after the workers ten times a second (by default every two seconds).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from elastic_systems import LR, SNAPSHOT_EVERY, WORKERS, System, Task, ddp_steps, problem, restore, state_of


class RayTrain(System):
    package = "ray"

    def start(self) -> None:
        self.env |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_TRAIN_V2_ENABLED": "1"}
        self.env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        self.run(*self.worker)

    @classmethod
    def work(cls, task: Task) -> None:
        """The driver: `_train` is what its workers run."""
        import ray
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        # Room for a new worker before the dead one's has been given back.
        ray.init(num_cpus=2 * WORKERS, include_dashboard=False, _temp_dir=str(task.directory / "ray"))
        TorchTrainer(
            _train,
            train_loop_config={"task": task},
            scaling_config=ScalingConfig(num_workers=WORKERS),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(
                name="job",
                storage_path=str(task.directory / "results"),
                failure_config=FailureConfig(max_failures=-1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        ).fit()


def _train(config: dict[str, Any]) -> None:
    from ray import train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    task: Task = config["task"]
    rank, size = train.get_context().get_world_rank(), train.get_context().get_world_size()
    model, x, y = problem()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    step = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step = restore(torch.load(Path(folder, "state.pt")), model, opt)
    for done in ddp_steps(task, prepare_model(model), opt, x, y, rank, size, step):
        if done % SNAPSHOT_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    torch.save(state_of(model, opt, done), os.path.join(folder, "state.pt"))
                train.report({"step": done}, train.Checkpoint.from_directory(folder) if rank == 0 else None)
    task.save_final(model)


SYSTEMS = {"ray-train": RayTrain}
