"""plain/nanogpt.py and its noise scale: python, or torchrun --nproc-per-node 2, nanogpt_monitor.py [FILE]"""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import kfuse as kf
from kfuse.data.builtin import load_text
from kfuse.models import GPT

BATCH, BLOCK, ACC, CLIP, STEPS, EVAL_EVERY, EVALS = 8, 64, 8, 1.0, 61, 20, 10
ddp, rank, workers = "RANK" in os.environ, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ACC //= workers  # micro-batches of a step on each
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
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
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
if ddp:
    dist.init_process_group()
    torch.manual_seed(1337 + rank)
    model = torch.nn.parallel.DistributedDataParallel(model)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
monitor = (kf.ddp_hook if ddp else kf.monitor)(model, samples=BATCH, accumulate=ACC, scaler=scaler)
for number in range(STEPS):
    opt.param_groups[0]["lr"] = 1e-3 * (0.55 + 0.45 * np.cos(np.pi * number / STEPS))
    if number % EVAL_EVERY == 0 and rank == 0:
        estimate_loss(number)
        print(f"noise scale {monitor.stats and monitor.stats.noise_scale} sequences")
    for micro_step in range(ACC):
        model.require_backward_grad_sync = micro_step == ACC - 1  # DDP looks at it in forward
        scaler.scale(get_loss("train") / ACC).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
