"""Two models, two optimizers, a step of each in turn: a GAN on digits. Alone, on several workers, or on workers that
come and go:

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py
kfuse-run --workers 2 --max-workers 4 examples/gan.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfuse as kf
from kfuse.data import load_digits

BATCH, STEPS, NOISE = 64, 300, 16

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
opt_c = kf.FusedAdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_g = kf.FusedAdamW(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))


def loss(images: Tensor, real: bool) -> Tensor:
    scores = critic(images)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


nets, opts = nn.ModuleList([critic, generator]), [opt_c, opt_g]
for step in kf.DataLoader(nets, load_digits().train, opts, batch_size=BATCH, micro_batch=16, steps=STEPS):
    for x, _ in step.micro_batches(opt_c):
        fake = generator(torch.randn(len(x), NOISE))
        step.loss = loss(x.flatten(1), True) + loss(fake.detach(), False)
        step.loss.backward()
    opt_c.step()
    opt_c.zero_grad()

    for x, _ in step.micro_batches(opt_g):
        step.loss = loss(generator(torch.randn(len(x), NOISE)), True)  # the critic's noise again
        step.loss.backward()
    opt_g.step()
    opt_g.zero_grad()

    if step.number % 50 == 49 and kf.rank() == 0 and opt_c.stats and opt_g.stats:
        print(f"step {step.number + 1}: critic {opt_c.stats.loss:.3f}, generator {opt_g.stats.loss:.3f}")
