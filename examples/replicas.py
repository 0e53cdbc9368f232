"""A model that FSDP2 shards over the processes of a worker, on workers that come and go:

kfuse-run --workers 2 --ranks 2 examples/replicas.py

These are two workers of two processes ("ranks") each, and half of the model is on each rank. If one of the four
processes is killed, its worker ends, the other one goes on, and a new one joins. docs/replicas.md has the details.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import kfuse as kf

SAMPLES, WIDTH, CLASSES, EPOCHS = 2048, 32, 4, 4

dist.init_process_group("gloo")  # the ranks of this worker; before anything of kfuse
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)], nn.Linear(WIDTH, CLASSES))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = kf.Optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), clip_norm=1.0)

inputs = torch.randn(SAMPLES + 512, WIDTH)  # on each rank the same
labels = inputs[:, :CLASSES].argmax(1)
data, heldout = TensorDataset(inputs[:SAMPLES], labels[:SAMPLES]), slice(SAMPLES, None)

for step in kf.DataLoader(model, data, opt, batch_size=64, micro_batch=32, epochs=EPOCHS):
    for x, y in step:  # this rank's part of each micro-batch of this worker
        step.loss = F.cross_entropy(model(x), y)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
    if step.ends_epoch:
        with torch.no_grad():  # on every rank, since a forward gathers the parameters from all
            right = (model(inputs[heldout]).argmax(1) == labels[heldout]).float().mean()
        kf.log(heldout_accuracy=right)
        if kf.rank() == dist.get_rank() == 0:
            print(f"step {step.number + 1}: held-out accuracy {right:.3f}, loss {opt.stats.loss:.3f}")
