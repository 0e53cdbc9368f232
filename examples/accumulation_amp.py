"""Gradient accumulation and mixed precision: torchrun --nproc-per-node 2 examples/accumulation_amp.py

`opt.accumulate(ACC)` says that each loss is divided by ACC, as people write it. On a GPU the loss is scaled too.
"""

import torch
import torch.nn.functional as F

import kfuse as kf
from kfuse.data import load_digits
from kfuse.models import MLP

BATCH, ACC, STEPS = 16, 4, 100

kf.init()
torch.manual_seed(kf.rank())  # other samples on each worker; all models start from rank 0's parameters
cuda = torch.cuda.is_available()
device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.bfloat16)
digits = load_digits()
model = MLP(digits.spec["input_shape"], digits.spec["num_classes"]).to(device)
opt = kf.FusedAdamW(model.parameters(), lr=1e-3)
opt.accumulate(ACC)
scaler = torch.amp.GradScaler(device, enabled=cuda)

for i in range(STEPS * ACC):
    x, y = digits.train.fetch(torch.randint(len(digits.train), (BATCH,)).numpy())
    with torch.autocast(device, dtype):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
    scaler.scale(loss / ACC).backward()
    if (i + 1) % ACC == 0:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

if kf.rank() == 0:
    print(f"loss {loss.item():.3f}, noise scale above {opt.stats.noise_scale_low:.1f} micro-batches of {BATCH}")
