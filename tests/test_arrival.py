"""comm.overlap_share: parameters that are shared while the next forward runs. Nobody ever sees an old value of one.

The messages here bring their data as late as they may: at the wait. So a reader that does not wait has other bits.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from torch import Tensor, nn
from torch.nn import Parameter

import kfuse as kf
from kfuse.comm.arrival import Arrival, reads_are_noticed, wait_later
from kfuse.comm.buckets import ALIGN
from kfuse.comm.gloo import GlooGroup
from kfuse.comm.group import CommError, Group, Pending

WIDTH = 96  # a layer has 9216 elements: a part of its bucket for each of two workers


def arriving(param: Tensor) -> bool:
    return type(param) is not Parameter


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """torch.compile in another test of this process: from then on kfuse waits at once."""

    def forget() -> None:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()

    forget()
    yield
    forget()


def test_it_is_an_option_of_sharded_state() -> None:
    assert not kf.CommOptions(state="sharded").overlap_share
    with pytest.raises(ValueError, match=r"^comm.overlap_share=true: must be false with comm.state=replicated$"):
        kf.CommOptions(overlap_share=True)


# -- one parameter ---------------------------------------------------------------------------------------------------


class Late(Pending):
    """Writes ones into the parameters when it is waited for."""

    def __init__(self, *tensors: Tensor, error: bool = False) -> None:
        super().__init__(Group(), "a share", [])
        self._tensors, self._error, self.waits = [t.detach() for t in tensors], error, 0

    def wait(self) -> None:
        super().wait()
        self.waits += 1
        if self._error:
            raise CommError("a share: lost contact with rank 1")
        for tensor in self._tensors:
            tensor.fill_(1.0)


READS: dict[str, Any] = {
    "a layer": lambda p: F.linear(torch.ones(1, 3), p),
    "a list": lambda p: torch.cat([p, p]),
    "nested lists": lambda p: torch._foreach_add([p.detach()], 1.0)[0],
    "a keyword": lambda p: torch.add(input=torch.zeros(3, 3), other=p),
    "an operator": lambda p: 2 * p,
    "an index": lambda p: p[0],
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "its address": lambda p: p.data_ptr() and p,
    "its storage": lambda p: p.untyped_storage() and p,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "item": lambda p: torch.tensor([p[0, 0].item()]),
    "a copy": lambda p: copy.deepcopy(p),
    "pickled": lambda p: pickle.loads(pickle.dumps(p)),
    "printed": lambda p: torch.ones(1) * float("1." in repr(p)),
    "in place": lambda p: torch.no_grad()(p.mul_)(1.0),
    "state_dict": lambda p: nn.ParameterList([p]).state_dict()["0"],
    "func": lambda p: torch.func.functional_call(nn.Linear(3, 3), {"weight": p, "bias": torch.ones(3)}, torch.ones(3)),
}


@pytest.mark.parametrize("name", READS)
def test_every_use_of_a_parameter_waits_for_it(name: str) -> None:
    p = Parameter(torch.zeros(3, 3))
    late = Late(p)
    Arrival([p], late)
    value = READS[name](p)
    assert late.waits == 1 and not arriving(p)
    assert type(value) in (Tensor, Parameter) and bool((value > 0).all())


def test_a_function_of_ones_own_gets_the_new_values() -> None:
    p = Parameter(torch.zeros(3))

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return 2 * w * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return None, grads[0]

    Arrival([p], Late(p))
    out: Any = Double.apply(torch.ones(3), p)  # type: ignore[no-untyped-call]
    assert out.tolist() == [2.0, 2.0, 2.0]
    out.sum().backward()
    assert p.grad is not None


def test_what_reads_no_value_does_not_wait() -> None:
    p = Parameter(torch.zeros(3, 4))
    p.grad = torch.ones(3, 4)
    late = Late(p)
    Arrival([p], late)
    assert (p.shape, p.dtype, p.numel(), p.dim()) == ((3, 4), torch.float32, 12, 2) and p.requires_grad and p.is_leaf
    assert {p: 1}[p] == 1 and isinstance(p, Parameter) and p.device.type == "cpu"
    assert p.grad is not None
    p.grad = None
    assert late.waits == 0 and arriving(p)


def test_a_wait_brings_all_parameters_of_its_message_and_no_others() -> None:
    one, two, other = (Parameter(torch.zeros(3)) for _ in range(3))
    first, second = Late(one, two), Late(other)
    arrival = Arrival([one, two], first)
    Arrival([other], second)
    assert one.sum().item() == 3.0
    assert not arriving(two) and arriving(other) and second.waits == 0
    arrival.wait()
    assert first.waits == 1
    assert torch.dot(two, other).item() == 3.0 and second.waits == 1


def test_a_lost_worker_is_an_error_where_the_parameter_is_read() -> None:
    p = Parameter(torch.zeros(3))
    Arrival([p], Late(p, error=True))
    with pytest.raises(CommError, match="lost contact"):
        F.linear(torch.ones(1, 3), p)


@pytest.mark.parametrize("lost", [False, True])
def test_each_thread_waits(lost: bool) -> None:
    """One thread waits for the message, and the others for it: they too have the new values, or the error."""
    one, two = Parameter(torch.zeros(3)), Parameter(torch.zeros(3))
    waits, arrives = threading.Event(), threading.Event()

    class Slow(Late):
        def wait(self) -> None:
            waits.set()
            assert arrives.wait(60)
            super().wait()

    late = Slow(one, two, error=lost)
    arrival = Arrival([one, two], late)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(lambda: one.sum().item())
        assert waits.wait(60)
        others = [pool.submit(lambda p=p: p.sum().item()) for p in (one, two)]
        assert arriving(one) and arriving(two)  # a plain one would be read without a wait
        assert not any(other.done() for other in others)
        arrives.set()
        if not lost:
            assert [read.result(60) for read in (first, *others)] == [3.0] * 3
        else:
            with pytest.raises(CommError, match="lost contact"):
                first.result(60)
    assert late.waits == 1 and not arriving(one) and not arriving(two)
    if lost:
        with pytest.raises(CommError, match="lost contact"):
            arrival.wait()


class Interrupted(Late):
    def wait(self) -> None:
        if not self.waits:
            self.waits += 1
            raise KeyboardInterrupt
        super().wait()


def test_after_ctrl_c_in_the_wait_the_next_reader_waits() -> None:
    p = Parameter(torch.zeros(3))
    Arrival([p], Interrupted(p))
    with pytest.raises(KeyboardInterrupt):
        p.sum()
    assert arriving(p) and p.sum().item() == 3.0


class Own(Parameter):
    """A class of somebody's own."""


def test_it_waits_at_once_where_a_reader_may_go_unnoticed() -> None:
    plain, kept = Parameter(torch.zeros(3)), Parameter(torch.zeros(3))
    alias = kept.data
    for params in ([kept], [plain, kept], [Own(torch.zeros(3))]):
        late = Late(*params)
        assert wait_later(params, late) is None and late.waits == 1
        assert not arriving(plain)
    assert alias.tolist() == [1.0, 1.0, 1.0]
    del alias, late  # which keeps one too
    late = Late()
    arrival = wait_later([kept], late)
    assert arrival is not None and arriving(kept) and late.waits == 0
    arrival.wait()


@pytest.mark.full
def test_it_waits_at_once_where_torch_compile_is_in_use() -> None:
    p = Parameter(torch.zeros(3))
    step: Any = torch.compile(lambda w: 2 * w, backend="eager")
    late = Late(p)
    assert wait_later([p], late) is None and late.waits == 1
    assert step(p).tolist() == [2.0] * 3


@pytest.mark.full
def test_the_first_compiled_code_of_a_process_reads_new_values() -> None:
    """Compiled while values are under way, as a loss may be that only some step calls."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    step: Any = torch.compile(lambda model, x: model(x).sum(), backend="aot_eager")
    for _ in range(3):
        lates = [Late(*layer.parameters()) for layer in (model[0], model[2])]
        for layer, late in zip((model[0], model[2]), lates, strict=True):
            nn.init.zeros_(layer.weight)
            Arrival(list(layer.parameters()), late)
        found = step(model, torch.ones(2, 3)).item()
        assert found == model(torch.ones(2, 3)).sum().item() != 0.0
        assert [late.waits for late in lates] == [1, 1]


@pytest.mark.full
def test_script_modules_and_compiled_ones_are_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert reads_are_noticed(model)
    model.append(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))  # type: ignore[no-untyped-call]
    assert not reads_are_noticed(model)
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile(backend="eager")
    assert not reads_are_noticed(compiled)
    part: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    assert not reads_are_noticed(part)
    assert not reads_are_noticed(nn.Sequential(part))


# -- a training ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Reads parameters in all the ways that one may think of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third, self.rare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(WIDTH, 3)
        self.everything = list(self.parameters())  # no module's attribute leads to these
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(sum(map(arriving, self.everything)))
        penalty = 1e-4 * self.everything[-1].square().sum()  # the last layer's, before any layer has run
        x = torch.tanh(self.first(x))
        x = torch.tanh(F.linear(x, self.third.weight))  # another layer's weight, before that layer has run
        x = torch.tanh(self.second(x) + self.third(x))
        x = torch.tanh(self.second(x) + self.tied(x))  # a shared module, and a shared weight
        if float(x.detach().sum()) > 0:
            x = self.rare(x)
        out: Tensor = self.last(x)
        return out + penalty


def bits(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Looks(kf.BasePolicy):
    """Reads parameters in its hooks: from the model, or by tensors that it keeps from step to step."""

    def __init__(self, model: Net, readers: str) -> None:
        self.model, self.readers, self.found = model, readers, list[str]()

    def before_train(self) -> None:
        self.alias = [p.data for p in self.model.parameters()] if self.readers == "kept" else []

    def after_step(self) -> None:
        if self.readers in ("hooks", "kept"):
            self.found.append(bits(self.alias or self.model.parameters()))


def late_share(self: GlooGroup, flat: Tensor, what: str, unit: int = ALIGN) -> Pending:
    """Parameters are written at the wait."""
    arrives = flat.clone() if "share of the parameter" in what else flat
    pending = SHARE(self, arrives, what, unit)
    wait = pending.wait

    def arrive() -> None:
        wait()
        flat.copy_(arrives)

    pending.wait = arrive  # type: ignore[method-assign]
    return pending


SHARE = GlooGroup.share


def train(folder: str, overlapped: bool, readers: str, schedule: str) -> dict[str, Any]:
    if overlapped:
        GlooGroup.share = late_share  # type: ignore[method-assign]
    kf.init(kf.CommOptions(state="sharded", schedule=schedule, bucket_mb=0.03, overlap_share=overlapped))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(96, 8, generator=generator)
    y = x[:, :3].argmax(1)
    model = Net()
    opt = kf.FusedAdamW(model.parameters(), lr=0.01, clip_norm=1.0)
    policy = Looks(model, readers)
    summary = kf.fit(
        model,
        (x, y),
        opt,
        kf.Hook(policy),
        steps=9,
        batch_size=16,
        micro_batch=4,
        heldout=(x, y),
        eval_every=1 if readers == "evaluation" else None,
        checkpoint=f"{folder}/{kf.rank()}",
        checkpoint_every=1 if readers == "checkpoints" else 100,
        progress=False,
        save_model=readers == "checkpoints",
    )
    assert summary is not None and not any(map(arriving, model.parameters()))
    assert opt.stats is not None
    return {
        "parameters": summary["params_sha256"],
        "numbers": (summary["loss"], summary["eval_loss"], summary["eval_accuracy"], opt.stats.grad_norm),
        "policy": policy.found,
        "arriving": max(model.seen),
    }


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("readers", ["nobody", "hooks", "kept", "evaluation", "checkpoints"])
def test_nobody_sees_an_old_parameter(tmp_path: Path, readers: str, schedule: str) -> None:
    """Layers that share, or use another one's weight, and whoever reads between steps: bitwise as without overlap."""
    wanted = run_workers(2, train, str(tmp_path / "a"), False, readers, schedule)
    found = run_workers(2, train, str(tmp_path / "b"), True, readers, schedule)
    overlapped = [result.pop("arriving") for result in (*wanted, *found)]
    assert found == wanted and wanted[0] == wanted[1]
    assert overlapped[:2] == [0, 0]
    if readers in ("nobody", "kept"):
        assert [count > 0 for count in overlapped[2:]] == [readers == "nobody"] * 2


class Reader(nn.Module):
    """Reads its weights twice: in threads or by TorchScript, and then from Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)
        self.read: Any = torch.clone
        if how == "script":
            self.read = torch.jit.trace(torch.clone, torch.ones(2, 2), check_trace=False)
        self.pool = ThreadPoolExecutor(4) if how == "threads" else None
        self.old = self.under_way = 0

    def forward(self, x: Tensor) -> Tensor:
        weights = [layer.weight for layer in self.layers]
        if not torch.compiler.is_compiling():
            self.under_way += sum(map(arriving, weights))
            apply: Any = map if self.pool is None else self.pool.map
            early = list(apply(lambda weight: self.read(weight).detach(), weights * 2))
            self.old += sum(not torch.equal(a, b) for a, b in zip(early, weights * 2, strict=True))
        out: Tensor = self.last(sum(torch.tanh(layer(x)) for layer in self.layers))
        return out


def mean_squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def reads(how: str, overlap_share: bool) -> tuple[int, int, str]:
    """Weights that were old as they were read; weights that were under way; digest of the trained parameters."""
    GlooGroup.share = late_share  # type: ignore[method-assign]
    kf.init(kf.CommOptions(state="sharded", bucket_mb=0.03, reproducible=True, overlap_share=overlap_share))
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(32, WIDTH, generator=generator), torch.randn(32, 3, generator=generator)
    model = Reader(how)
    step: Any = torch.compile(mean_squares, backend="aot_eager") if how == "compiled" else mean_squares
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    kf.fit(model, data, opt, step_fn=step, steps=5, batch_size=16, micro_batch=4, progress=False)
    return model.old, model.under_way, bits(model.parameters())


@pytest.mark.full
def test_threads_that_read_parameters_have_the_new_values() -> None:
    plain = run_workers(1, reads, "nothing", False)[0][2]
    for old, under_way, trained in run_workers(2, reads, "threads", True):
        assert (old, trained) == (0, plain) and under_way > 0


@pytest.mark.full
def test_script_functions_have_the_new_values_by_default() -> None:
    plain = run_workers(1, reads, "nothing", False)[0][2]
    for found in run_workers(2, reads, "script", False):
        assert found == (0, 0, plain)


@pytest.mark.full
def test_a_compiled_step_function_waits_in_the_optimizer_step() -> None:
    """Bits are compared with those of a worker for which compiled code reads parameters that are never under way."""
    plain = run_workers(1, reads, "compiled", False)[0][2]
    for found in run_workers(2, reads, "compiled", True):
        assert found == (0, 0, plain)
