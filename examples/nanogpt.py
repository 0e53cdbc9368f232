"""plain/nanogpt.py with workers that come and go: kfuse-run --workers 2 --max-workers 4 nanogpt.py [FILE]"""

import sys

import numpy as np
import torch
import torch.nn.functional as F

import kfuse as kf
from kfuse.data.builtin import load_text
from kfuse.models import GPT

BATCH, BLOCK, ACC, CLIP, STEPS, EVAL_EVERY, EVALS = 8, 64, 8, 1.0, 61, 20, 10
device = kf.init().group.device
dtype = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
tokens = np.memmap(sys.argv[1], np.uint8, "r") if sys.argv[1:] else load_text().train.pieces[0]  # a token is a byte
data = {"train": tokens[: -len(tokens) // 10], "val": tokens[-len(tokens) // 10 :]}


@torch.autocast(device.type, dtype, enabled=device.type == "cuda")
def get_loss(split):  # of a batch of windows that begin anywhere
    places = torch.randint(len(data[split]) - BLOCK, (BATCH, 1)) + torch.arange(BLOCK + 1)
    window = torch.from_numpy(data[split][places.numpy()].astype(np.int64)).to(device)
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def estimate_loss(step):
    model.eval()
    for split in data:
        print(f"step {step}: {split} loss {sum(get_loss(split) for _ in range(EVALS)).item() / EVALS:.3f}")
    model.train()


torch.manual_seed(1337)
model = GPT(256, BLOCK, layers=2, heads=2, width=64, dropout=0.0).to(device)
opt = kf.FusedAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
for step in kf.DataLoader(model, range(len(tokens)), opt, batch_size=ACC * BATCH, micro_batch=BATCH, steps=STEPS):
    number = step.number
    opt.param_groups[0]["lr"] = 1e-3 * (0.55 + 0.45 * np.cos(np.pi * number / STEPS))
    if number % EVAL_EVERY == 0 and kf.rank() == 0:
        estimate_loss(number)
    for _ in step:  # kfuse seeds the generators for each micro-batch, so any workers draw the same windows
        scaler.scale(get_loss("train")).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
