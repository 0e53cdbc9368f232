"""The noise scale of a script that keeps FSDP2: torchrun --nproc-per-node 2 examples/fsdp_monitor.py

Three lines are added to the script; every figure is printed here. docs/frameworks.md has the details.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kfuse as kf

BATCH, ACC, STEPS = 16, 2, 60

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)], nn.Linear(32, 4))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
monitor = kf.fsdp_monitor(model, samples=BATCH, accumulate=ACC)
kf.log_to(lambda figures: figures["step"] % 20 == 19 and print(figures))

torch.manual_seed(1 + dist.get_rank())
for _ in range(STEPS):
    for _ in range(ACC):
        x = torch.randn(BATCH, 32)
        (F.cross_entropy(model(x), x[:, :4].argmax(1)) / ACC).backward()
    opt.step()
    opt.zero_grad()
monitor.close()  # sends the last step's figures
dist.destroy_process_group()
