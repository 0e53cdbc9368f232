"""`kf.nn`'s layers give the noise scale of one micro-batch, as gradients taken example by example do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import kfuse as kf
from kfuse.models import GPT
from kfuse.train.loss import default_loss


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module], rms: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Linear(6, 20)
        self.norm = norm(20)
        self.middle = nn.Linear(20, 20)
        self.last_norm = rms(20)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x))
        return self.head(self.last_norm(hidden + self.middle(hidden).tanh()).mean(1))


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 5, 6, generator=generator)
    return x, x[:, :, :3].sum(1).argmax(1)


def each_gradient(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of every example's own loss, in float64: [examples, ...] for each parameter."""
    twin = Net(nn.LayerNorm, lambda n: nn.RMSNorm(n, eps=torch.finfo(torch.float32).eps)).double()  # type: ignore[arg-type]
    parameters = {name: p.detach().double() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(twin, parameters, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x.double(), y)


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_noise_of_the_layers_is_that_of_their_per_example_gradients(loss_scale: float) -> None:
    net = Net(kf.nn.LayerNorm, kf.nn.RMSNorm)
    x, y = batch(12)
    (F.cross_entropy(net(x), y) * loss_scale).backward()
    found = kf.nn.norm_layers_noise(net, loss_scale=loss_scale)
    assert found is not None and found.samples == 12
    gradients = [g.flatten(1) for name, g in each_gradient(net, x, y).items() if "norm" in name]
    flat = torch.cat(gradients, dim=1)
    variance = float(flat.var(0).sum())  # the trace of the sample covariance is S, whatever formula gives it
    assert found.grad_variance == pytest.approx(variance, rel=1e-4)
    assert found.grad_sq == pytest.approx(float(flat.mean(0).square().sum()) - variance / 12, rel=1e-4, abs=1e-9)


def test_one_backward_a_call() -> None:
    net = Net(kf.nn.LayerNorm, kf.nn.RMSNorm)
    with pytest.raises(ValueError, match=r"one backward of each since the last call; some had \[0, 0\]"):
        kf.nn.norm_layers_noise(net)
    x, y = batch(4)
    for _ in range(2):
        F.cross_entropy(net(x), y).backward()
    with pytest.raises(ValueError, match=r"some had \[2, 2\]"):
        kf.nn.norm_layers_noise(net)
    F.cross_entropy(net(x[:1]), y[:1]).backward()
    assert kf.nn.norm_layers_noise(net) is None, "one sample has no noise scale"
    with pytest.raises(ValueError, match=r"\(0 in the model\)"):
        kf.nn.norm_layers_noise(nn.Linear(2, 2))


def test_drop_in() -> None:
    """State dicts both ways, torch's own result where no gradient is wanted, and none of ours left out of pickling."""
    ours, theirs = Net(kf.nn.LayerNorm, kf.nn.RMSNorm), Net(nn.LayerNorm, nn.RMSNorm)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, _ = batch(3)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    plain = kf.nn.LayerNorm(4, elementwise_affine=False)
    assert torch.equal(plain(x[:, :4, :4]), F.layer_norm(x[:, :4, :4], (4,)))
    ours.norm.requires_grad_(False)
    ours(x).sum().backward()
    assert ours.norm.per_example_sq_norm is None and ours.last_norm.per_example_sq_norm is not None


def test_gpt_trains_the_same_and_measures_its_normalisation_layers() -> None:
    """Through the trainer: after each step of one micro-batch S and G2 of these layers are there."""
    plain, model = (GPT(11, 8, layers=1, heads=2, width=8, dropout=0.0, noise_norm=noise) for noise in (False, True))
    model.load_state_dict(plain.state_dict())
    tokens, found = torch.randint(0, 11, (24, 8)), []
    for net in (plain, model):
        default_loss(net(tokens), tokens).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    kf.nn.norm_layers_noise(model)

    class Watch(kf.BasePolicy):
        def after_step(self) -> None:
            found.append(kf.nn.norm_layers_noise(model))

    model.zero_grad()
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3)
    kf.fit(model, (tokens, tokens), opt, Watch(), steps=3, batch_size=8, micro_batch=8)
    assert [noise.samples for noise in found if noise is not None] == [8, 8, 8]
    assert all(noise.grad_variance > 0 and noise.grad_sq > -noise.grad_variance for noise in found if noise)
