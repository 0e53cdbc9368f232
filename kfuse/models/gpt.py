"""A decoder-only transformer (GPT-2's architecture), in its plainest form."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfuse import nn as measuring


class Attention(nn.Module):
    """Causal multi-head self-attention, `[B, T, width]` to `[B, T, width]`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to [B, T, width]. Position t sees positions 0 to t."""
        batch, length, width = x.shape
        qkv: Tensor = self.qkv(x)
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on a normalised copy added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float, norm: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.norm1 = norm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = norm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = F.gelu(self.expand(self.norm2(x)))
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out


class GPT(nn.Module):
    """Predicts the next token at each position.

    Input int64 `[B, T]` with T <= block_size; output logits `[B, T, vocab_size]`.

    Pre-norm, learned positions, the output layer tied to the token embedding, and GPT-2's initialisation:
    N(0, 0.02^2), and 0.02 / sqrt(2 * layers) for the layers that write to the residual stream
    (Radford et al. 2019).

    noise_norm: normalise with `kf.nn.LayerNorm`, whose backward also measures each sequence's gradient. After a step
        of one micro-batch `kf.nn.norm_layers_noise(model)` has S and G2 of these layers. The model trains as without.

    Raises ValueError for sizes below 1, heads that do not divide width, and a longer input.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.1,
        noise_norm: bool = False,
    ) -> None:
        super().__init__()
        if min(layers, heads, width) < 1 or width % heads != 0:
            raise ValueError(f"layers={layers}, heads={heads}, width={width}: at least 1, width a multiple of heads")
        norm = measuring.LayerNorm if noise_norm else nn.LayerNorm
        self.block_size = block_size
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, norm) for _ in range(layers))
        self.norm = norm(width)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes_residual = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if writes_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] to a score per next token, [B, T, vocab_size]. Raises ValueError for T above block_size."""
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than block_size={self.block_size}")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
