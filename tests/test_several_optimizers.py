"""Several optimizers in one process train as in plain torch: in one kf.Optimizer, of one backward, and by turns."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gan_loop
import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from elastic_job import run_script
from limits import limits
from problems import all_equal, relative, update
from support import supervised
from test_fit_checkpoint import Growing, Interrupted, assert_equal, problem, with_fit, with_loader
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import kfuse as kf
from kfuse import session
from kfuse.cli.check import ConfigError
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions
from kfuse.elastic.protocol import Member, View
from kfuse.session import reset
from kfuse.train.evaluation import params_sha256

TINY_BUCKETS = 64 * 4 / 2**20  # MB: every tensor travels alone


@contextmanager
def refused(error: type[Exception], message: str) -> Iterator[None]:
    """Context: an error in one line."""
    with pytest.raises(error, match=message) as raised:
        yield
    assert "\n" not in str(raised.value)


# -- one kf.Optimizer over several torch optimizers -------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def pair(net: nn.Sequential, lr: float = 0.02) -> tuple[Any, Any]:
    """Each of their three groups has a rate of its own."""
    hidden = net[2].weight
    rest = [p for p in net.parameters() if p is not hidden]
    groups = [{"params": rest[:1], "lr": 0.1 * lr}, {"params": rest[1:]}]
    return torch.optim.Muon([hidden], lr=lr), torch.optim.AdamW(groups, lr=0.3 * lr)


def with_sgd(net: nn.Sequential) -> tuple[Any, Any]:
    """Unlike Muon and AdamW it sees how long a gradient is."""
    muon, adamw = pair(net)
    return muon, torch.optim.SGD(adamw.param_groups[0]["params"] + adamw.param_groups[1]["params"], 0.5, momentum=0.5)


@pytest.mark.parametrize(("workers", "clip_norm", "most"), [(1, None, 0), (1, 0.05, 1e-3), (2, 0.05, 1e-3)])
@on_workers()
def test_one_optimizer_of_several_is_a_plain_loop_with_one_clip(workers: int, clip_norm: Any, most: float) -> None:
    """With a change of states in the middle. With a clip rounding differs, and Muon computes in bf16."""
    kf.init()
    x, y = problem()
    ours, theirs = network(), network()
    make = pair if clip_norm is None else with_sgd
    opt, plain = kf.Optimizer(*make(ours), clip_norm=clip_norm), make(theirs)
    for step in range(6):
        here = slice(kf.rank(), None, kf.size())
        F.cross_entropy(ours(x[here]), y[here]).backward()
        F.cross_entropy(theirs(x), y).backward()
        norm = clip_norm and float(nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm))
        update(opt)
        update(*plain)
        if norm and clip_norm:
            assert norm > clip_norm and opt.stats.grad_norm == pytest.approx(norm, rel=1e-3)  # type: ignore[union-attr]
        if step == 2:  # a state goes both ways
            saved = copy.deepcopy(opt.state_dict())
            opt.load_state_dict({"optimizers": [each.state_dict() for each in plain]})
            for each, state in zip(plain, saved["optimizers"], strict=True):
                each.load_state_dict(state)
    assert relative(ours.parameters(), theirs.parameters()) <= most


@on_workers(2)
def test_models_and_states_are_averaged() -> None:
    """Local SGD averages the states too, also where a worker has none yet."""
    kf.init(comm_sync="local:2")
    net = network()
    opt = kf.Optimizer(*pair(net))
    with_loader(net, opt, kf.NoPolicy(), batch_size=16, micro_batch=8, steps=4)
    states = [value for p in net.parameters() for _, value in sorted(opt.state[p].items())]
    values = [*net.parameters(), *states]
    assert all_equal(values) and len(values) == 6 + 1 + 5 * 3


SCRIPT = """
import time
import torch, torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
import kfuse as kf

kf.init(comm_check_every=1)

class Grow(kf.BasePolicy):
    def decide(self, signals):
        return kf.Decision(workers=2) if signals.step == 5 else None

net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
OPTIMIZERS
x, y = torch.randn(512, 6), torch.randint(3, (512,))
settings = {"batch_size": 8, "micro_batch": 4, "epochs": 5, "policy": Grow(), "scheduler": schedulers}
for step in kf.DataLoader(net, (x, y), opt, **settings):
    time.sleep(0.1 if kf.size() == 1 else 0)  # half a minute for the second one to come
    for inputs, targets in step:
        F.cross_entropy(net(inputs), targets).backward()
    opt.step()
    opt.zero_grad()
"""


ONE = """
opt = kf.FusedSGD(net.parameters(), lr=0.002)
schedulers = LambdaLR(opt, lambda step: 1 / (1 + step))
"""
SEVERAL = """
muon = torch.optim.Muon([net[0].weight])
adamw = torch.optim.AdamW([net[0].bias, *net[2].parameters()], lr=0.002)
opt = kf.Optimizer(adamw, muon)
schedulers = [LambdaLR(muon, lambda step: 0.5), LambdaLR(adamw, lambda step: 1 / (1 + step))]
"""


@pytest.mark.full
@pytest.mark.parametrize("optimizers", [ONE, SEVERAL], ids=["one", "several"])
def test_a_worker_that_joins_has_all_states_and_schedules(optimizers: str, tmp_path: Path) -> None:
    """The parameters stay the same on both: the check would end the job."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("OPTIMIZERS", optimizers))
    job = run_script(tmp_path / "run", limits(1, 1, 2, script=True), str(tmp_path / "script.py"))
    assert job.error is None and job.metrics[-1]["workers"] == 2, job.told()
    for record in job.metrics:
        assert record["lr"] == pytest.approx(0.002 / (1 + record["step"]))


# -- several kf optimizers of one backward ----------------------------------------------------------------------------


def net(width: int, out: int, layers: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(width, out))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


@pytest.mark.parametrize(("schedule", "workers"), [("tree", 2), ("all_to_all", 3)])
@on_workers()
def test_several_optimizers_train_as_their_torch_twins(schedule: str, workers: int) -> None:
    """Where one backward reaches the parameters of all. A GAN: test_scripts.

    Encoder and two heads, each with an optimizer; the heads' order differs between ranks. Some steps have two
    micro-batches.
    """
    kf.init(comm_schedule=schedule, comm_bucket_mb=TINY_BUCKETS)
    rank, size = kf.rank(), kf.size()
    ours, theirs = ([net(16, 16, 3, seed=1), net(16, 3, 3, seed=2), net(16, 3, 2, seed=3)] for _ in range(2))
    opts = [kf.FusedSGD(each.parameters(), lr=0.1, momentum=0.9) for each in ours]
    plain = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in theirs]

    def loss(nets: list[nn.Sequential], x: Tensor, step: int, rank: int) -> Tensor:
        encoded = nets[0](x)
        order = (1, 2) if (step + rank) % 2 else (2, 1)  # backward reaches the later one's parameters first
        out = sum((nets[k](encoded) for k in order), torch.zeros(()))
        if (step + rank) % 3 == 0:
            out = nets[1][-1](encoded) + nets[2](encoded)
        return F.mse_loss(out, torch.sin(x[:, :3]))

    for step in range(6):
        x = batch(step, rank)
        if step % 2:
            loss(ours, x, step, rank).backward()
        for part, last in ((slice(0, 3), False), (slice(3, 8), True)) if step % 2 == 0 else ():
            with ExitStack() as contexts:
                for opt in opts:
                    contexts.enter_context(opt.micro_batch(samples=part.stop - part.start, last=last))
                loss(ours, x[part], step, rank).backward()
        torch.stack([loss(theirs, batch(step, r), step, r) for r in range(size)]).mean().backward()
        update(*opts, *plain)
    for mine, plain_one in zip(ours, theirs, strict=True):
        assert relative(mine.parameters(), plain_one.parameters()) <= 1e-4


@on_workers(3)
def test_each_optimizer_in_use_has_connections_of_its_own() -> None:
    """A notebook's cell that is run again, a rebuild, and a model of its own. Then ranks need unequal numbers."""
    group = kf.init().group
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    first, again, other = (kf.FusedSGD(net.parameters()) for net in (a, a, b))
    found = [first.engine.lane, again.engine.lane, other.engine.lane]
    other.rebuild()
    again.rebuild()
    found += [other.engine.lane, again.engine.lane, len(group._further)]
    group.connect_lanes(1 + group.rank)
    group.barrier()  # a rank that has all its connections must not end while another still makes its own
    assert [*found, len(group._further)] == [0, 0, 1, 1, 0, 1, 2], "as many as any rank needs"


@pytest.mark.full
@on_workers(2)
def test_workers_may_start_and_make_a_further_optimizer_at_different_times() -> None:
    """One worker starts, and makes its second optimizer, later than the others wait for it in a step."""
    time.sleep(2.0 * int(os.environ["RANK"]))
    kf.init(comm_timeout_s=1)
    for _ in range(2):
        time.sleep(2.0 * kf.rank())
        model = nn.Linear(3, 1)
        opt = kf.FusedSGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            update(opt)


# -- a pass of each optimizer in a loop's body ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
@on_workers()
def test_a_gan_trains_as_in_plain_torch(workers: int) -> None:
    ours, theirs = gan_loop.make(normalise=False), gan_loop.make(normalise=False)
    opts, plain = gan_loop.optimizers(ours, ours=True), gan_loop.optimizers(theirs, ours=False)
    assert gan_loop.train(ours, opts) == list(range(56))
    gan_loop.plain(theirs, plain)
    for one, other in zip(opts, plain, strict=True):
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert [opt.stats.samples for opt in opts] == [16, 16]
    assert [opt.stats.step for opt in opts] == [55, 27]  # each one's own
    assert relative(ours.parameters(), theirs.parameters()) < 1e-4


def undisturbed() -> str:
    kf.init(comm_reproducible=True)
    nets = gan_loop.make(normalise=True)
    gan_loop.train(nets, gan_loop.optimizers(nets, ours=True), policy=gan_loop.Averaging(nets))
    return params_sha256(nets)


@pytest.mark.full
def test_workers_are_lost_in_either_pass_with_the_same_bits(tmp_path: Path) -> None:
    job = run_script(tmp_path / "run", limits(2, 1, 3, script=True), gan_loop.__file__, str(tmp_path))
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
        for step in kf.DataLoader(nn.ModuleList(nets), (torch.ones(8, 6), torch.ones(8)), opts, batch_size=4):
            for net, opt in zip(nets, opts, strict=True):
                if strays:
                    sum(other(torch.ones(6)) for other in nets).backward()  # type: ignore[union-attr]
                for x, _ in step.micro_batches(opt):
                    net(x).square().mean().backward()
                update(opt)
        found.append([p for net in nets for p in net.parameters()])
    assert all(map(torch.equal, *found))


# -- checkpoints ------------------------------------------------------------------------------------------------------

Train = Callable[..., dict[str, Tensor]]


def train_pair(how: Any, policy: Growing, **settings: Any) -> dict[str, Tensor]:
    """With schedulers of different kinds: each optimizer's rates follow its own."""
    reset()
    net = network()
    muon, adamw = pair(net)
    opt = kf.Optimizer(muon, adamw)
    schedulers = [StepLR(adamw, 3, 0.5), LambdaLR(muon, lambda step: 0.9**step)]
    if policy.until == 13:
        schedulers.reverse()  # the same training
    how(net, opt, policy, batch_size=8, epochs=4, clip_norm=0.5, scheduler=schedulers, **settings)
    rates = [0.02 * 0.9**22, 0.002 * 0.5**7, 0.006 * 0.5**7]
    assert [group["lr"] for group in opt.param_groups] == pytest.approx(rates)
    return net.state_dict()


def train_gan(policy: kf.BasePolicy, at: Any = lambda step, moment: None, **settings: Any) -> dict[str, Tensor]:
    reset()
    nets = gan_loop.make(normalise=True)
    gan_loop.train(nets, gan_loop.optimizers(nets, ours=True), at, policy, **settings)
    return nets.state_dict()


@pytest.mark.parametrize(
    ("train", "grows", "until"),
    [
        (partial(train_pair, with_fit), 9, (5, 13)),
        (partial(train_pair, with_loader), 9, (5, 13)),
        (train_gan, 21, (13, 30)),
    ],
    ids=["fit", "loader", "passes"],
)
def test_a_resumed_training_has_the_same_bits(train: Train, grows: int, until: Any, tmp_path: Path) -> None:
    """The batch grows."""
    undisturbed = train(Growing(grows), num_workers=1)
    kept: Any = {"checkpoint_dir": tmp_path, "checkpoint_every_steps": 3, "checkpoint_resume": "auto"}
    for end in until:
        with pytest.raises(Interrupted):
            train(Growing(grows, end), **kept)
    assert_equal(train(Growing(grows), **kept), undisturbed)


def test_a_state_that_a_body_takes_is_after_its_updates() -> None:
    undisturbed, states = train_gan(Growing(at=21)), list[dict[str, Any]]()

    def take(step: int, moment: str) -> None:
        if (step, moment) == (9, "critic's reduced"):
            with pytest.raises(RuntimeError, match=r"call it after opt\.step"):
                kf.state_dict()
        if (step, moment) == (9, "end"):
            states.append(kf.state_dict())

    train_gan(Growing(at=21), take)
    kf.load_state_dict(states[0])
    assert_equal(train_gan(Growing(at=21)), undisturbed)


# -- wrong uses -------------------------------------------------------------------------------------------------------


def test_wrong_optimizers_are_refused() -> None:
    net = network()
    muon, adamw = pair(net)
    empty, every = torch.optim.SGD([{"params": []}]), torch.optim.SGD(net.parameters())
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((muon, every), ValueError, r"parameter 2 of SGD, of shape \(12, 12\), is a parameter of Muon too"),
        ((muon, adamw, muon), ValueError, "the same Muon is given twice"),
        ((muon, empty), ValueError, "SGD has no parameters: leave it out"),
        ((muon, [adamw]), TypeError, "wraps a torch.optim.Optimizer, not list"),
        ((muon, kf.FusedSGD(network().parameters())), TypeError, "not FusedSGD"),
    ]
    for given, error, message in wrong:
        with refused(error, message):
            kf.Optimizer(*given)
    nets, data = gan_loop.make(normalise=False), (torch.ones(8, 6), torch.ones(8))
    opt_c, opt_g = gan_loop.optimizers(nets, ours=True)
    _, plain = gan_loop.optimizers(gan_loop.make(normalise=False), ours=False)
    loaders: list[tuple[Any, list[Any], type[Exception], str]] = [
        (nets, [opt_c, plain], TypeError, r"make one: kf\.Optimizer\(a, b\)"),
        (nets, [opt_c, opt_c], ValueError, "must be one, or several different ones"),
        (nets["critic"], [opt_c, opt_g], ValueError, "parameter 0 of Optimizer, .* model"),
        ([*nets.values()], [opt_c, opt_g], TypeError, r"model must be an nn\.Module, got list"),
    ]
    for model, opts, error, message in loaders:
        with refused(error, message):
            kf.DataLoader(model, data, opts)
    with refused(ValueError, r"kf\.fit takes one optimizer"):
        kf.fit(nets, data, [opt_c, opt_g])  # type: ignore[arg-type]
    for options in ({"comm_sync": "local:2"}, {"comm_state": "sharded"}):
        reset()
        kf.init(**options)  # type: ignore[arg-type]
        if "comm_sync" in options:
            with refused(ConfigError, "comm_sync=local:2: must be ssgd with optimizers=2"):
                kf.DataLoader(nets, data, [*gan_loop.optimizers(nets, ours=True)])
        else:
            with refused(ValueError, r"comm\.state=sharded: kf\.Optimizer has whole state only"):
                kf.Optimizer(muon, adamw)


def test_wrong_uses_are_refused() -> None:
    net = network()
    muon, adamw = pair(net)
    opt, sgd = kf.Optimizer(muon, adamw), kf.FusedSGD(network().parameters())
    with pytest.raises(ValueError, match="give the group to one of them before"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    needed = 'load_state_dict: a dictionary with "{}" is needed'
    states: list[tuple[Any, Any, str]] = [
        (
            opt,
            {"optimizers": [adamw.state_dict(), muon.state_dict()]},
            'have "optimizers": a list of the state_dict of Muon, A',
        ),
        (opt, adamw.state_dict(), needed.format("optimizers")),
        (opt, [muon.state_dict(), adamw.state_dict()], needed.format("optimizers")),
        (kf.Optimizer(torch.optim.SGD(network().parameters())), {"state": {}}, needed.format("param_groups")),
        (sgd, opt.state_dict(), "different number of parameter groups"),
    ]
    for loads, state, message in states:
        with pytest.raises(ValueError, match=message):
            loads.load_state_dict(state)
    first, other = StepLR(muon, 1), StepLR(pair(network())[0], 1)
    for schedulers, message in (
        ([other], "it belongs to another optimizer"),
        ([first] * 2, "the same StepLR is given twice"),
    ):
        with pytest.raises(ValueError, match=f"scheduler: {message}"):
            kf.fit(net, problem(), opt, scheduler=schedulers)
    for left_out in (adamw, opt):
        StepLR(left_out, 1)
        with pytest.raises(ValueError, match=r"kf\.fit would not step it"):
            kf.fit(net, problem(), opt, scheduler=first)
        del left_out.step  # the scheduler's mark
    net(problem()[0]).sum().backward()
    adamw.load_state_dict(adamw.state_dict())
    with pytest.raises(RuntimeError, match=r"one has other param_groups than when kf\.Optimizer was made"):
        opt.step()


def test_a_step_of_one_alone_is_refused() -> None:
    """Left in the loop beside opt.step(), it would make each update twice."""
    net = network()
    muon, adamw = pair(net)
    kf.Optimizer(muon, adamw)
    opt = kf.Optimizer(muon, adamw)
    net(problem()[0]).sum().backward()
    opt.step()
    with pytest.raises(RuntimeError, match=r"AdamW\.step\(\): kf\.Optimizer has this AdamW and steps it"):
        adamw.step()


def test_a_second_optimizer_is_refused_where_workers_may_join() -> None:
    """Its state would not go along to a worker that joins."""
    session._current = joined = session.Session(Group(), CommOptions(), supervised())
    joined.view = View(1, (Member(0, os.getpid(), "host"),), ("127.0.0.1", 1), "start")
    model, other = nn.Linear(16, 3), nn.Linear(16, 3)
    opt, second = kf.FusedSGD(model.parameters(), lr=0.1), kf.FusedSGD(other.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"of several optimizers give kf\.DataLoader a list"):
        for step in kf.DataLoader(model, (batch(0, 0), torch.zeros(8, 3)), opt, batch_size=4):
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            opt.step()
            other(batch(0, 0)).sum().backward()
            second.step()


# A pass is of one of the optimizers; True: its step follows.
WRONG_PASSES: dict[str, tuple[list[Any], str]] = {
    "none": (["next"], "has several optimizers: write"),
    "twice": ([("first", True), ("first", True)], "has had its pass"),
    "interleaved": ([("first", False), ("second", True)], r"call step\(\) of optimizer 0"),
    "without the first": ([("second", True)], "the first one's in each body"),
    "without a pass": ([("first", True), "bare", "second.step"], "gradients of no pass"),
    "both in one pass": ([("both", True), "second.step"], "this optimizer has had no pass in this body"),
    "saved too early": ([("first", True), "state", ("second", True)], "has ended this step"),
}


@pytest.mark.parametrize(("acts", "message"), WRONG_PASSES.values(), ids=WRONG_PASSES)
def test_wrong_passes_are_refused(acts: list[Any], message: str) -> None:
    nets = {"first": nn.Linear(6, 1), "second": nn.Linear(6, 1)}
    opts = {name: kf.FusedSGD(net.parameters(), lr=0.1) for name, net in nets.items()}

    def act(step: Any, what: Any) -> None:
        if what == "next":
            next(iter(step))
        elif what == "bare":
            sum(net(torch.ones(1, 6)).sum() for net in nets.values()).backward()  # type: ignore[union-attr]
        elif what == "second.step":
            opts["second"].step()
        elif what == "state":
            kf.state_dict()
        else:
            name, steps = what
            own = "first" if name == "both" else name
            for x, _ in step.micro_batches(opts[own]):
                sum(net(x).sum() for each, net in nets.items() if name in (each, "both")).backward()  # type: ignore[union-attr]
            if steps:
                opts[own].step()

    loader = kf.DataLoader(nn.ModuleDict(nets), (torch.ones(8, 6), torch.ones(8)), [*opts.values()], batch_size=4)
    with pytest.raises(RuntimeError, match=message):
        for step in loader:
            for what in acts:
                act(step, what)
            for opt in opts.values():
                opt.zero_grad()
