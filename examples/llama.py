"""plain/llama.py with kfuse: python llama.py book.txt, or kfuse-run --workers 2 llama.py book.txt"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import kfuse as kf

BATCH, EPOCHS, CONTEXT, WIDTH, HEADS, LAYERS = 16, 1, 64, 64, 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, rotation):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, rotation):
    (cos, sin), (a, b) = rotation, x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(256, WIDTH), nn.RMSNorm(WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        angles = torch.outer(torch.arange(input_ids.shape[1]), 10000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2))
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()))
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main(file):
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8).long()
    data = [{"input_ids": w[:-1], "labels": w[1:]} for w in text.unfold(0, CONTEXT + 1, CONTEXT)]
    model, losses = Llama(), []
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for step in kf.DataLoader(model, data, opt, batch_size=BATCH, micro_batch=BATCH // kf.size(), epochs=EPOCHS):
        for batch in step:
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main(sys.argv[1])))
