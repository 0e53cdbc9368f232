"""Two models, two optimizers, bare backwards: a GAN on digits. torchrun --nproc-per-node 2 examples/gan.py

In a job whose workers come and go, use one optimizer with two parameter groups, and kf.DataLoader.
"""

import torch
import torch.nn.functional as F
from torch import nn

import kfuse as kf
from kfuse.data import load_digits

BATCH, STEPS, NOISE = 32, 300, 16

kf.init()
torch.manual_seed(kf.rank())  # other samples on each worker; all models start from rank 0's parameters
real = load_digits().train
generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
opt_g = kf.FusedAdamW(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
opt_c = kf.FusedAdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

for step in range(STEPS):
    x, _ = real.fetch(torch.randint(len(real), (BATCH,)).numpy())
    fake = generator(torch.randn(BATCH, NOISE))

    loss_real = F.binary_cross_entropy_with_logits(critic(x.flatten(1)), ones)
    loss_c = loss_real + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
    loss_c.backward()
    opt_c.step()
    opt_c.zero_grad()

    loss_g = F.binary_cross_entropy_with_logits(critic(fake), ones)
    loss_g.backward()
    opt_g.step()
    opt_g.zero_grad()
    opt_c.zero_grad()  # the generator's loss has left gradients in the critic

    if step % 50 == 49:
        means = [kf.allreduce(loss.item(), "avg") for loss in (loss_c, loss_g)]
        if kf.rank() == 0:
            print(f"step {step + 1}: critic {means[0]:.3f}, generator {means[1]:.3f}")
