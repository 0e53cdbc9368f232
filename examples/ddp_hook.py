"""The noise scale of a script that keeps DDP and its optimizer: torchrun --nproc-per-node 2 examples/ddp_hook.py

The three lines with kf are all that is added to the script. docs/frameworks.md has the details.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import kfuse as kf
from kfuse.data import load_digits
from kfuse.models import MLP

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
x, y = digits.train.fetch(torch.arange(len(digits.train)).numpy())
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
model = DistributedDataParallel(MLP(digits.spec["input_shape"], digits.spec["num_classes"]))
monitor = kf.ddp_hook(model, samples=32)
kf.log_to("runs/ddp_hook")
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=32, sampler=sampler, drop_last=True):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, noise scale {monitor.stats.noise_scale} samples")
dist.destroy_process_group()
