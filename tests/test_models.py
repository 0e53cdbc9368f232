"""Each model has the right shapes and initial values, and learns what it is for; GPT is causal."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kfuse.data import load_digits
from kfuse.models import GPT, MLP, ConvNet


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


def test_sizes_and_shapes():
    for hidden, count in [((), 650), ((128,), 9610), ((32, 16), 2778)]:
        model = MLP((1, 8, 8), 10, hidden=hidden)
        assert parameter_count(model) == count
        assert model(torch.randn(5, 1, 8, 8)).shape == model(torch.randn(5, 64)).shape == (5, 10)
    for shape in [(1, 8, 8), (3, 32, 32), (2, 5, 9)]:
        assert ConvNet(shape, num_classes=7, width=4)(torch.randn(1, *shape)).shape == (1, 7)
    one, two = (ConvNet((1, 8, 8), 10, width=4, blocks_per_stage=n) for n in (1, 2))
    # Three more blocks: two 3x3 convolutions and two normalisations each, at widths 4, 8 and 16.
    assert parameter_count(two) - parameter_count(one) == sum(18 * w * w + 4 * w for w in (4, 8, 16))
    model = GPT(vocab_size=100, block_size=12, layers=1, heads=2, width=16)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 100)
    # Embeddings (the output layer is tied), a block (12 w^2 weights, 9 w biases, 4 w norms), the last norm.
    assert parameter_count(model) == (100 + 12) * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16


def test_what_a_model_cannot_take_is_refused():
    gpt = GPT(10, 4, layers=1, heads=1, width=8)
    for make, said in [
        *((lambda shape=shape: ConvNet(shape, 10), "at least 5x5") for shape in [(8, 8), (1, 4, 8)]),
        (lambda: gpt(torch.zeros(1, 5, dtype=torch.int64)), "5 tokens is longer than block_size=4"),
        (lambda: GPT(10, 4, heads=4, width=10), "width=10: at least 1, width a multiple of heads"),
        (lambda: MLP((4,), 2, hidden=(0,)), "must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            make()


def test_gpt_attends_to_the_past_only():
    model = GPT(vocab_size=256, block_size=16, layers=2, width=32).eval()
    tokens = torch.randint(0, 256, (3, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], atol=1e-6, rtol=0)
    assert ((before - after)[:, 9:].abs().amax(-1) > 1e-4).all()


def test_gpt_attention_is_softmax_of_scaled_scores():
    attention = GPT(10, 6, layers=1, heads=2, width=8).blocks[0].attention.eval()
    x = torch.randn(3, 6, 8)
    heads = []
    for q, k, v in zip(*(t.split(4, -1) for t in attention.qkv(x).split(8, -1)), strict=True):
        scores = q @ k.transpose(1, 2) / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(attention(x), attention.project(torch.cat(heads, -1)))


def test_gpt_initialisation_is_gpt_2s():
    torch.manual_seed(0)
    model = GPT(256, 64, layers=4, heads=4, width=128)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            residual = name.endswith(("project.weight", "contract.weight"))
            assert p.std().item() == pytest.approx(0.02 / math.sqrt(8) if residual else 0.02, rel=0.05), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
    tokens = torch.randint(0, 256, (4, 64))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(1))
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_the_convnet_learns_digits():
    torch.manual_seed(0)
    model, split = ConvNet(input_shape=(1, 8, 8), num_classes=10, width=8), load_digits()
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=3e-3), np.random.default_rng(0)
    for _ in range(60):
        x, y = split.train.fetch(rng.integers(0, len(split.train), 128))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = split.heldout.fetch(np.arange(len(split.heldout)))
    assert (model.eval()(x).argmax(-1) == y).float().mean().item() > 0.93
