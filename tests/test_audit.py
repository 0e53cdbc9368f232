"""Audits find the worker that computes wrongly, accuse no other, and change no bit of the training."""

from __future__ import annotations

import logging
import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_workers
from elastic_job import Job, assert_same_training, chaos, read_lines, run_job, words
from hypothesis import given
from hypothesis import strategies as st
from problems import Seen
from torch import Tensor, nn
from torch.utils.data import Dataset

import kfuse as kf
from kfuse.comm.digest import digest
from kfuse.train.audit import choose, culprit
from kfuse.train.step import StepSamples

SAMPLES, BATCH, MICRO = 70, 20, 3
"""An epoch ends with a step of 10 samples; a step has 7 micro-batches, the last of 2 samples, or 4, the last of 1."""


class Network(nn.Module):
    """Dropout, BatchNorm, a frozen parameter, a buffer that is replaced, and one that `expand` repeats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(5, 33), nn.LayerNorm(33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 4))
        self.norm = nn.BatchNorm1d(4, track_running_stats=True)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.running: Tensor
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(()), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x) * self.frozen + self.running  # averaged, and it changes the output
        if self.training:
            with torch.no_grad():
                self.running.mul_(0.9).add_(out.mean(0), alpha=0.1)
        self.replaced = self.replaced + 1
        if len(x) == 1:  # BatchNorm has no variance
            return out * self.expanded
        normed: Tensor = self.norm(out)
        return normed * self.expanded


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
    return x, x[:, :4].sin()


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Random numbers of the global generators belong to each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = data()
        return x[index] + torch.rand(5) + random.random() + np.random.random(5).astype(np.float32), y[index]


def flip(parameter: nn.Parameter, index: int, bit: int) -> None:
    """From now on this worker flips one bit of one element in every gradient of the parameter."""

    def wrong(grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        bits = grad.view(-1).view(torch.int32)
        bits[index % len(bits)] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        return grad

    parameter.register_hook(wrong)  # type: ignore[no-untyped-call]


class Sees(Seen):
    """Draws random numbers after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, ...]] = []

    def after_step(self) -> None:
        self.drawn.append((torch.rand(1).item(), np.random.random(), random.random()))


SOURCES: dict[str, Any] = {"tensors": data, "Augmented": Augmented}


def train(
    run_dir: Path | None,
    every: int | None = 1,
    faults: dict[int, tuple[int, int, int]] | None = None,
    source: str = "tensors",
    wrapped: bool = False,
    arguments: dict[str, Any] | None = None,
    threads: int = 1,
) -> dict[str, Any]:
    """Trains on this rank; faults: by rank, the parameter, element and bit that its gradients have wrong.

    threads: of rank 2.
    """
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kfuse").addHandler(handler)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have loaders
    own = kf.init(comm_reproducible=True, comm_audit_every=every, comm_bucket_mb=0.0005)
    rank, net, policy = own.group.rank, Network(), Sees()
    torch.set_num_threads(threads if rank == 2 else 1)
    opt: Any = kf.FusedAdamW(net.parameters(), lr=0.02, clip_norm=0.5)
    if wrapped:
        opt = kf.Optimizer(torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9))
    if faults is not None and rank in faults:
        parameter, index, bit = faults[rank]
        flip([p for p in net.parameters() if p.requires_grad][parameter], index, bit)
    given = {"epochs": 2, "batch_size": BATCH, "micro_batch": MICRO, "run_dir": run_dir} | (arguments or {})
    summary = kf.fit(net, SOURCES[source](), opt, policy, observe_progress=False, **given)
    assert summary is not None
    return {
        "sha": summary["params_sha256"],
        "buffers": [b.numpy().tobytes() for name, b in net.named_buffers() if name != "replaced"],
        "drawn": [*policy.drawn, (torch.rand(1).item(), np.random.random(), random.random())],
        "seen": [(signals.step, signals.corrupt_workers) for signals in policy.signals],
        "logged": logged,
    }


def corruptions(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir / "events.jsonl") if event["kind"] == "corruption"]


# -- what is audited ----------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**32 - 1), st.integers(0, 10_000))
def test_owners_take_turns_and_the_second_run_is_on_another_worker(
    micro_batches: int, workers: int, every: int, seed: int, start: int
) -> None:
    samples = StepSamples(0, 0, np.arange(micro_batches), 1, workers)
    with_work = [rank for rank in range(workers) if samples.ranges[rank]]
    owners = []
    for step in range(start * every, (start + len(with_work)) * every):
        chosen = choose(step, every, samples, seed)
        assert (chosen is None) == (step % every != 0)
        if chosen is None:
            continue
        assert chosen == choose(step, every, samples, seed)
        assert chosen.micro_batch in samples.ranges[chosen.ranks[0]]
        assert len(set(chosen.ranks)) == min(workers, 3)
        owners.append(chosen.ranks[0])
    assert sorted(owners) == with_work


def test_the_one_that_two_others_contradict_computes_wrongly() -> None:
    assert culprit([1, 2]) is None
    assert culprit([1, 2, 2]) == 0
    assert culprit([1, 2, 1]) == 1
    assert culprit([1, 2, 3]) is None


# -- the digest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "width"),
    [
        ((3,), torch.float32, torch.int32),
        ((1025,), torch.bfloat16, torch.int16),
        ((3, 2048), torch.float64, torch.int64),
    ],
)
def test_a_digest_tells_elements_that_swapped_places_and_any_one_bit(shape: Any, dtype: Any, width: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(shape, generator=generator).to(dtype)
    known = int(digest([value]))
    assert known == digest([value.t().contiguous().t()]) if value.dim() == 2 else True, "whatever its strides are"
    assert digest([value, value + 1]) != digest([value + 1, value])
    assert digest([value], salt=2**64 - 1) != known and digest([value.view(-1)[:0]]) == digest([]) == 0
    for _ in range(50):
        i, j, bit = (int(torch.randint(high, (), generator=generator)) for high in (*2 * (value.numel(),), 15))
        other = value.clone().view(-1)
        other[[i, j]] = other[[j, i]]
        assert int(digest([other.view(shape)])) != known or value.view(-1)[i] == value.view(-1)[j]
        for mask in (1 << bit, -1):  # one bit, or all: a complement
            other = value.clone().view(-1).view(width)
            other[i] ^= mask
            assert int(digest([other.view(dtype).view(shape)])) != known


# -- a worker that computes wrongly -------------------------------------------------------------------------------


def test_the_worker_that_computes_wrongly_is_named_by_every_audit_that_it_runs_in(tmp_path: Path) -> None:
    wrong = 0
    results = run_workers(3, train, tmp_path / "run", 1, {wrong: (0, 7, 3)})
    events, audits = corruptions(tmp_path / "run"), 8
    # Owners are the ranks in turn, checkers the next ones: of three audits the worker runs in two.
    named = [step for step in range(audits) if wrong in (step % 3, (step + 1) % 3)]
    assert [event["step"] for event in events] == named
    for event in events:
        assert (event["worker"], event["rank"]) == (wrong, wrong)
        first = event["step"] % 3
        assert [run["rank"] for run in event["runs"]] == [first, (first + 1) % 3, (first + 2) % 3]
        digests = {run["rank"]: run["digest"] for run in event["runs"]}
        good = {digest for rank, digest in digests.items() if rank != wrong}
        assert len(good) == 1 and digests[wrong] not in good
        assert len({run["pid"] for run in event["runs"]}) == 3
    assert len({result["sha"] for result in results}) == 1
    assert results[0]["seen"] == results[1]["seen"]
    assert all(corrupt == (wrong,) for step, corrupt in results[0]["seen"] if step >= named[0])
    warnings = [line for result in results for line in result["logged"] if "computes wrongly" in line]
    pid = next(run["pid"] for run in events[0]["runs"] if run["rank"] == wrong)
    assert len(warnings) == 1 and f"worker {wrong} (rank {wrong}, pid {pid}, host" in warnings[0]


class Noisy(Network):
    """A model with random numbers of its own: two runs differ."""

    generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


def test_one_worker_runs_it_twice_and_finds_that_a_model_is_not_deterministic(tmp_path: Path, caplog: Any) -> None:
    kf.init(comm_reproducible=True, comm_audit_every=1)
    for kind, differs in ((Network, False), (Noisy, True)):
        net, where = kind(), tmp_path / kind.__name__
        kf.fit(net, data(), kf.FusedSGD(net.parameters(), lr=0.1), epochs=1, batch_size=BATCH, run_dir=where)
        events = corruptions(where)
        assert len(events) == (4 if differs else 0)
        assert all("not deterministic" in event["note"] for event in events)
    assert caplog.text.count("not deterministic") == 1


def test_a_step_without_an_audit_takes_gradients_as_any_other() -> None:
    kf.init(comm_reproducible=True, comm_audit_every=2)
    net, audited = Network(), list[bool]()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)

    class Watches(kf.BasePolicy):
        def after_step(self) -> None:
            audited.append(opt.engine.audited is not None)

    kf.fit(net, data(), opt, Watches(), epochs=1, batch_size=BATCH)
    assert audited == [True, False, True, False]


# -- the training is the same -------------------------------------------------------------------------------------


def test_the_training_has_the_same_bits_with_audits_and_nobody_is_accused(tmp_path: Path) -> None:
    audited = run_workers(2, train, tmp_path / "audited", 1)
    plain = run_workers(2, train, tmp_path / "plain", None)
    for with_audits, without in zip(audited, plain, strict=True):
        for name in ("sha", "buffers", "drawn"):
            assert with_audits[name] == without[name], name
        assert not any("audit" in line for line in with_audits["logged"])
    assert corruptions(tmp_path / "audited") == []
    steps = [record | dict.fromkeys(TIMES) for record in read_lines(tmp_path / "audited" / "metrics.jsonl")]
    assert steps == [record | dict.fromkeys(TIMES) for record in read_lines(tmp_path / "plain" / "metrics.jsonl")]


TIMES = ("step_time_s", "data_wait_s", "data_bytes_per_s", "signals")  # which have times, too


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "wrapped", "arguments"),
    [
        ("tensors", False, {"micro_batch": 20, "train_precision": "bf16"}),  # one a step: workers 1 and 2 have none
        ("tensors", True, {"weight_fn": len}),
        ("Augmented", False, {"num_workers": 2}),
    ],
)
def test_other_ways_to_train_have_the_same_bits(
    source: str, wrapped: bool, arguments: dict[str, Any], tmp_path: Path
) -> None:
    def trained(workers: int, run_dir: Path | None, every: int | None) -> list[dict[str, Any]]:
        return run_workers(workers, train, run_dir, every, None, source, wrapped, arguments)

    audited, plain, alone = trained(3, tmp_path / "run", 1), trained(3, None, None), trained(1, None, 1)
    assert [result["sha"] for result in audited] == [result["sha"] for result in plain] == 3 * [alone[0]["sha"]]
    assert [result["buffers"] for result in audited] == [result["buffers"] for result in plain]
    assert corruptions(tmp_path / "run") == []


@pytest.mark.full
def test_workers_of_another_kind_are_not_compared_and_a_warning_says_so(tmp_path: Path) -> None:
    results = run_workers(3, train, tmp_path / "run", 1, {1: (0, 0, 5)}, "tensors", False, None, 2)
    assert corruptions(tmp_path / "run") == []
    [warning] = [line for result in results for line in result["logged"] if "audit" in line]
    assert "no audits with these workers" in warning


# -- what cannot be audited is refused ----------------------------------------------------------------------------


def test_what_cannot_be_run_again_is_refused() -> None:
    kf.init(comm_reproducible=True, comm_audit_every=3)
    net = Network()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^comm.audit_every=3: must be None with kf.DataLoader, .* kf.fit can$"):
        kf.DataLoader(net, data(), opt, batch_size=BATCH)
    x, y = data()
    torch.nn.functional.mse_loss(net(x), y).backward()
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match=r"^comm.audit_every=3: kf.fit must drive the training loop"):
        opt.step()
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))


# -- workers that come, go and are lost ---------------------------------------------------------------------------

ELASTIC = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 workers.max=3 data=digits",
    "model._target_=faulty.Faulty batch.size=16 batch.micro=4 batch.max=64",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    directory = tmp_path_factory.mktemp("undisturbed")
    return run_job(directory / "run", [*ELASTIC, "train.steps=60", *chaos(directory)])


@pytest.mark.full
@pytest.mark.jobs
def test_an_elastic_job_names_the_worker_and_a_policy_replaces_it(tmp_path: Path) -> None:
    """The new worker computes rightly: no audit names anybody once it is there."""
    settings = ["comm.audit_every=2", "workers.count=3", "+model.worker=1", "train.steps=200"]
    policy = "policy._target_=faulty.ReplaceCorrupt"
    job = run_job(tmp_path / "run", [*ELASTIC, *settings, policy])
    assert job.error is None, job.told()
    events = job.of_kind("corruption")
    assert events and {event["worker"] for event in events} == {1}
    assert events[0]["step"] <= 2
    pids = {run["worker"]: run["pid"] for run in events[0]["runs"]}
    assert pids == {worker["rank"]: worker["pid"] for worker in job.views[0]["workers"]}
    assert [event["replace"] for event in job.of_kind("decision") if "replace" in event] == [1]
    replaced = next(view for view in job.views if view["reason"] in ("replace", "shrink"))
    assert all(event["step"] < replaced["step"] for event in events)
    assert sum("computes wrongly" in line for line in job.lines) == 1


@pytest.mark.full
@pytest.mark.jobs
def test_workers_are_lost_during_audits(undisturbed: Job, tmp_path: Path) -> None:
    """As owner, checker or third, before it sends its digest or after: the bits stay, and nobody is accused."""
    kill = {"how": "kill", "workers": 3}
    events = [
        {"step": 12, "moment": "audit", "rank": 0, **kill},
        {"step": 22, "moment": "audited", "rank": 1, **kill},
        {"step": 33, "moment": "audit", "rank": 2, **kill},
    ]
    gates = [{"step": step, "workers": 3} for step in (20, 30)]
    settings = ["comm.audit_every=1", "workers.count=3", "train.steps=60", *chaos(tmp_path, events=events, gates=gates)]
    job = run_job(tmp_path / "run", [*ELASTIC, *settings])
    assert_same_training(job, undisturbed)
    assert len(job.of_kind("failure")) == 3 and job.of_kind("corruption") == []


@pytest.mark.full
@pytest.mark.jobs
def test_a_worker_is_lost_while_a_third_one_decides(tmp_path: Path) -> None:
    """The step comes again, and then, or at a later audit, the worker is named."""
    events = [{"step": 4, "moment": "third run", "rank": 2, "how": "kill", "workers": 3}]
    gates = [{"step": 20, "workers": 3}]
    settings = ["comm.audit_every=1", "workers.count=3", "+model.worker=1", "train.steps=40"]
    job = run_job(tmp_path / "run", [*ELASTIC, *settings, *chaos(tmp_path, events=events, gates=gates)])
    assert job.error is None and len(job.of_kind("failure")) == 1, job.told()
    named = {event["worker"] for event in job.of_kind("corruption")}
    assert named == {1, None}  # None: while there were two
