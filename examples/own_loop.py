"""A training loop of one's own. Alone, on several workers, or on workers that come and go:

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
kfuse-run --workers 2 --max-workers 4 examples/own_loop.py
"""

import torch
import torch.nn.functional as F

import kfuse as kf
from kfuse.data import load_digits
from kfuse.models import MLP

torch.manual_seed(0)
digits = load_digits()
model = MLP(digits.spec["input_shape"], digits.spec["num_classes"])
opt = kf.FusedAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)

for step in kf.DataLoader(model, digits.train, opt, batch_size=64, micro_batch=16, epochs=20):
    for x, y in step:  # this worker's micro-batches of the step
        step.loss = F.cross_entropy(model(x), y)
        step.loss.backward()
    opt.step()
    opt.zero_grad()

if kf.rank() == 0:
    x, y = digits.heldout.fetch(torch.arange(len(digits.heldout)).numpy())
    print(f"held-out accuracy {(model(x).argmax(-1) == y).float().mean():.3f}, noise scale {opt.stats.noise_scale}")
