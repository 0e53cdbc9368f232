"""Models to train out of the box. Arguments that the data can answer are named as in `DataSplit.spec`."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

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
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return cast(Tensor, self.project(mixed.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on a normalised copy added to the residual stream, `[B, T, width]`."""

    def __init__(self, width: int, heads: int, dropout: float, norm: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.norm1 = norm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = norm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = F.gelu(self.expand(self.norm2(x)))
        return x + cast(Tensor, self.dropout(self.contract(hidden)))


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
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than block_size={self.block_size}")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class MLP(nn.Module):
    """Linear layers with ReLU between them, over the flattened input. `hidden=()` is softmax regression.

    Input `[B, *input_shape]`, floating; output logits `[B, num_classes]`.
    Raises ValueError for a width below 1.
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (128,), dropout: float = 0.0
    ) -> None:
        super().__init__()
        if min(hidden, default=1) < 1:
            raise ValueError(f"hidden={list(hidden)}: must be at least 1")
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(widths[-1], num_classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))


class ResidualBlock(nn.Module):
    """relu(BN(conv(relu(BN(conv(x))))) + shortcut(x)), 3x3 convolutions (He et al. 2016, figure 2)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """fp32 [B, channels_in, H, W] to [B, channels_out, H', W'], H' = ceil(H / stride)."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ConvNet(nn.Module):
    """Three stages of residual blocks, the last two halving the image, and a mean over what is left.

    Input `[B, channels, height, width]`, floating, height and width at least 5; output logits
    `[B, num_classes]`. Batch normalisation sees one micro-batch at a time. Raises ValueError for a smaller
    image.
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, width: int = 32, blocks_per_stage: int = 1
    ) -> None:
        super().__init__()
        if min(width, blocks_per_stage) < 1:
            raise ValueError(f"width={width}, blocks_per_stage={blocks_per_stage}: must be at least 1")
        # A 5x5 image ends as 2x2, so that batch normalisation has a variance even with one sample.
        if len(input_shape) != 3 or min(input_shape[1:]) < 5:
            raise ValueError(
                f"input_shape={tuple(input_shape)}: a convnet needs (channels, height, width), at least 5x5"
            )
        self.stem = nn.Sequential(
            nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for block in range(blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResidualBlock(channels, width << stage, stride))
                channels = width << stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.stem(x))
        return cast(Tensor, self.head(features.mean(dim=(2, 3))))


def load_hf(
    name: str,
    pretrained: bool = True,
    vocab_size: int | None = None,
    block_size: int | None = None,
    num_classes: int | None = None,
    pad_token_id: int | None = None,
) -> nn.Module:
    """Returns a model of Hugging Face's `transformers`, fp32, that returns its logits.

    A causal language model; where the data have classes, one for the classification of texts. Its parameters have the
    names that they have in transformers. name: on the hub, or a folder. pretrained: False: random weights, in the sizes
    of its configuration. Raises ValueError, in one line, also where the data's tokens do not fit it.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"model=hf needs transformers (pip install 'kfuse[transformers]'): {error}") from error
    if name.startswith(("/", ".", "~")) and not os.path.isdir(os.path.expanduser(name)):
        raise ValueError(f"name={name}: no such folder")
    auto: Any = transformers.AutoModelForCausalLM
    own: dict[str, Any] = {"use_cache": False}  # of keys and values, for generation
    if num_classes is not None:
        auto = transformers.AutoModelForSequenceClassification
        own |= {"num_labels": num_classes, "pad_token_id": pad_token_id}
    transformers.utils.logging.disable_progress_bar()  # a worker's output is shown by lines
    try:
        config: Any = transformers.AutoConfig.from_pretrained(os.path.expanduser(name), **own)
        if pretrained:
            model: Any = auto.from_pretrained(os.path.expanduser(name), config=config, dtype=torch.float32)
        else:
            model = auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # many types, by what the folder or the hub gave
        raise ValueError(f"name={name}: {textwrap.shorten(f'{type(error).__name__}: {error}', 300)}") from error
    words = model.get_input_embeddings().num_embeddings
    places = getattr(config, "max_position_embeddings", None)
    if vocab_size is not None and vocab_size > words:
        raise ValueError(f"name={name}: has {words} tokens: the data's tokenizer, of {vocab_size}, must have no more")
    if block_size is not None and places is not None and block_size > places:
        raise ValueError(f"name={name}: takes {places} tokens at most: data.block_size={block_size} must not be above")
    model.register_forward_hook(_logits)
    return cast(nn.Module, model)


def _logits(model: nn.Module, inputs: Any, output: Any) -> Tensor:
    return cast(Tensor, output.logits)
