"""Several optimizers of one kf.DataLoader, each with a pass of its own, train as in plain torch, and survive losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gan_loop
import pytest
import torch
from distributed import run_workers
from elastic_job import run_script
from limits import limits
from problems import relative
from test_fit_checkpoint import Growing, Interrupted, assert_equal
from torch import nn

import kfuse as kf
from kfuse.cli.check import ConfigError
from kfuse.session import reset
from kfuse.train.evaluation import params_sha256


def against_plain() -> float:
    ours, theirs = gan_loop.make(normalise=False), gan_loop.make(normalise=False)
    opts, plain = gan_loop.optimizers(ours, ours=True), gan_loop.optimizers(theirs, ours=False)
    assert gan_loop.train(ours, opts) == list(range(56))
    gan_loop.plain(theirs, plain)
    for one, other in zip(opts, plain, strict=True):
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert [opt.stats.samples for opt in opts] == [16, 16]
    assert [opt.stats.step for opt in opts] == [55, 27]  # each one's own
    return relative(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_gan_trains_as_in_plain_torch(workers: int) -> None:
    for error in run_workers(workers, against_plain):
        assert error < 1e-4


def undisturbed() -> str:
    kf.init(comm_reproducible=True)
    nets = gan_loop.make(normalise=True)
    gan_loop.train(nets, gan_loop.optimizers(nets, ours=True), policy=gan_loop.Averaging(nets))
    return params_sha256(nets)


@pytest.mark.full
def test_workers_are_lost_in_either_pass_with_the_same_bits(tmp_path: Path) -> None:
    elasticity = limits(2, 1, 3, script=True)
    job = run_script(tmp_path / "run", elasticity, gan_loop.__file__, str(tmp_path))
    assert job.error is None, job.told()
    for step, *_ in (*gan_loop.KILLS, *gan_loop.BREAKS):
        assert (tmp_path / f"mark-{step}").exists(), "the fault has struck"
    assert [len(view["workers"]) for view in job.views][-3:] == [3, 3, 3]
    assert [record["step"] for record in job.metrics] == list(range(56))
    for found in (*run_workers(1, undisturbed), *run_workers(3, undisturbed)):
        assert found == job.summary["params_sha256"]


def test_a_backward_outside_all_passes_counts_for_none() -> None:
    found = []
    for strays in (False, True):
        torch.manual_seed(1)
        nets = [nn.Linear(6, 1), nn.Linear(6, 1)]
        opts = [kf.FusedAdamW(net.parameters(), lr=0.1) for net in nets]
        for step in kf.DataLoader((torch.ones(8, 6), torch.ones(8)), nn.ModuleList(nets), opts, batch_size=4):
            for net, opt in zip(nets, opts, strict=True):
                if strays:
                    sum(other(torch.ones(6)) for other in nets).backward()  # type: ignore[union-attr]
                for x, _ in step.micro_batches(opt):
                    net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        found.append([p for net in nets for p in net.parameters()])
    assert all(map(torch.equal, *found))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def train(policy: kf.BasePolicy, **settings: Any) -> dict[str, torch.Tensor]:
    """The networks' state after a training in a session of its own, whose batch grows."""
    reset()
    nets = gan_loop.make(normalise=True)
    gan_loop.train(nets, gan_loop.optimizers(nets, ours=True), policy=policy, **settings)
    return {name: value.clone() for name, value in nets.state_dict().items()}


def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    undisturbed = train(Growing(at=21), data_workers=1)
    kept: Any = {"checkpoint_dir": tmp_path, "checkpoint_every_steps": 5, "checkpoint_resume": "auto"}
    for until in (13, 30):
        with pytest.raises(Interrupted):
            train(Growing(at=21, until=until), **kept)
    assert_equal(train(Growing(at=21), **kept), undisturbed)


def test_a_state_that_a_body_takes_is_after_its_updates() -> None:
    undisturbed, states = train(Growing(at=21)), list[dict[str, Any]]()

    def take(step: int, moment: str) -> None:
        if (step, moment) == (9, "critic's reduced"):
            with pytest.raises(RuntimeError, match=r"call it after opt\.step"):
                kf.state_dict()
        if (step, moment) == (9, "end"):
            states.append(kf.state_dict())

    reset()
    nets = gan_loop.make(normalise=True)
    gan_loop.train(nets, gan_loop.optimizers(nets, ours=True), take, Growing(at=21))
    kf.load_state_dict(states[0])
    assert_equal(train(Growing(at=21)), undisturbed)


# -- wrong uses -------------------------------------------------------------------------------------------------------


def test_wrong_optimizers_are_refused() -> None:
    nets, data = gan_loop.make(normalise=False), (torch.ones(8, 6), torch.ones(8))
    opt_c, opt_g = gan_loop.optimizers(nets, ours=True)
    plain = gan_loop.optimizers(gan_loop.make(normalise=False), ours=False)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: kf.DataLoader(data, nets, [opt_c, plain[1]]), TypeError, r"make one: kf\.Optimizer\(a, b\)"),
        (lambda: kf.DataLoader(data, nets, [opt_c, opt_c]), ValueError, "must be one, or several different ones"),
        (lambda: kf.DataLoader(data, nets["critic"], [opt_c, opt_g]), ValueError, "parameter 0 of Optimizer, .* model"),
        (
            lambda: kf.DataLoader(data, [*nets.values()], [opt_c, opt_g]),
            TypeError,
            r"model must be an nn\.Module, got list",
        ),
        (lambda: kf.fit(nets, data, [opt_c, opt_g]), ValueError, r"kf\.fit takes one optimizer"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    reset()
    kf.init(comm_sync="local:2")
    opts = gan_loop.optimizers(nets, ours=True)
    with pytest.raises(ConfigError, match="comm_sync=local:2: must be ssgd with optimizers=2"):
        kf.DataLoader(data, nets, opts)


def test_wrong_passes_are_refused() -> None:
    """An error ends the training, so each has one of its own."""

    def backward(step: Any, opt: Any, net: nn.Module, steps: bool = True) -> None:
        for x, _ in step.micro_batches(opt):
            net(x).sum().backward()
        if steps:
            opt.step()

    def none(step: Any) -> None:
        next(iter(step))

    def twice(step: Any) -> None:
        backward(step, first, a)
        backward(step, first, a)

    def interleaved(step: Any) -> None:
        backward(step, first, a, steps=False)
        backward(step, second, b)

    def without_the_first(step: Any) -> None:
        backward(step, second, b)

    def without_a_pass(step: Any) -> None:
        backward(step, first, a)
        a(torch.ones(1, 6)).sum().backward()
        b(torch.ones(1, 6)).sum().backward()
        second.step()

    def both_in_one_pass(step: Any) -> None:
        for x, _ in step.micro_batches(first):
            (a(x) + b(x)).sum().backward()
        first.step()
        second.step()

    def saved_too_early(step: Any) -> None:
        backward(step, first, a)
        kf.state_dict()
        backward(step, second, b)

    wrong = {
        none: "has several optimizers: write",
        twice: "has had its pass",
        interleaved: r"call step\(\) of optimizer 0",
    }
    wrong |= {without_the_first: "the first one's in each body", without_a_pass: "gradients of no pass"}
    wrong |= {saved_too_early: "has ended this step", both_in_one_pass: "this optimizer has had no pass in this body"}
    for body, message in wrong.items():
        a, b = nn.Linear(6, 1), nn.Linear(6, 1)
        first, second = (kf.FusedSGD(net.parameters(), lr=0.1) for net in (a, b))
        data = (torch.ones(8, 6), torch.ones(8))
        with pytest.raises(RuntimeError, match=message):
            for step in kf.DataLoader(data, nn.ModuleList([a, b]), [first, second], batch_size=4):
                body(step)
                first.zero_grad()
                second.zero_grad()
