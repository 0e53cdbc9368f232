"""Groups of several workers on CPUs, over gloo.

A wait polls in short slices, so that a worker notices a timeout, or a new view from the supervisor, while a peer is
silent. (With gloo only the neighbours of a lost rank get an error, and nothing can interrupt its blocking wait.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from kfuse.comm.group import EARLY, REDUCE_OPS, SLICE_S, CommError, Group, Links, Pending, first_line
from kfuse.comm.settings import BUSY

_SLICE = timedelta(seconds=SLICE_S)
_SWAP_BELOW, _SWAP_BELOW_ON_ONE_HOST = 2**16, 2**20
"""Bytes below which two workers exchange a tensor in one all-to-all, the call with the least CPU time and latency.

Over a link a larger one takes up to twice as long as the other calls: on one connection each direction waits for the
other (`GlooGroup.__init__`). `benchmarks/comm.py --link 20mbit --megabytes 0.55` shows it.
"""
_EXCHANGE = 1  # the tag of messages between two ranks


class GlooPending(Pending):
    """Messages of gloo. Their wait is the host's."""

    def __init__(
        self, group: Group, what: str, works: list[tuple[Any, int | None]], then: Callable[[], object] | None = None
    ) -> None:
        """then: what the first wait does when all have come."""
        super().__init__(group, what, works)
        self._then = then
        self._failed: str | None = None

    def release(self) -> None:
        for work, peer in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                self._failed = self._lost_contact(peer, error)
        super().release()

    def _lost_contact(self, peer: int | None, error: RuntimeError) -> str:
        return f"{self.what}: lost contact with {self.group.whom(peer)}: {first_line(error)}"

    def wait(self) -> None:
        if self._failed:
            raise CommError(self._failed)
        since = time.monotonic()  # not since the start: this worker has computed meanwhile
        for work, peer in self.works:
            self._wait_one(work, peer, since)
        self.works.clear()  # a message that has ended keeps its connections open
        self.group.under_way.pop(self, None)
        if self._then is not None:
            self._then()
            self._then = None

    def _wait_one(self, work: Any, peer: int | None, since: float) -> None:
        while True:
            with contextlib.suppress(RuntimeError):  # a timeout, or a failure that the next lines look at
                work.wait(_SLICE)
                return
            if work.is_completed():
                try:
                    work.wait()  # it may have come through since: then this returns
                    return
                except RuntimeError as error:
                    raise CommError(self._lost_contact(peer, error)) from error
            self.group.check()
            waited = time.monotonic() - since
            if waited > self.limit_s:
                whom, late = self.group.whom(peer), self.group.late_ranks(self.what) if peer is None else ""
                raise CommError(f"{self.what}: waited {waited:.1f} s for {whom} (comm.timeout_s){late}; {BUSY}")


class GlooGroup(Group):
    """Workers that gloo connects. A lane has process groups for `share` and `pass_on`, and others for all others."""

    def __init__(self, *place: Any, hostname: str | None = None, **more: Any) -> None:
        """Arguments as of `Group`, and the address gloo listens on. Raises CommError if the others do not connect."""
        super().__init__(*place, **more)
        self._hostname, size = hostname, self.size
        self._number, self._further = 0, list[GlooGroup]()
        self._parts: dict[tuple[int, ...], GlooGroup] = {}
        names = ["main", "share"] + ["main, from rank 1", "share, from rank 1"] * (size == 2)
        about = self.rank, size, self.timeout_s, hostname
        made: list[Any] = self.connect(
            lambda: [process_group(PrefixStore(name, self.store), *about) for name in names], lambda made: None
        )
        # Of two workers each sends large messages over connections of its own. gloo may begin to send before it tells
        # the other that it can receive, and on one connection that word waits behind the data: half of a link's speed.
        self._pg, self._share_pg, self._from = made[0], made[1], made[::2]
        self._share_from = made[1::2] if size == 2 else [made[1]] * size
        if size == 2:
            self.swap_below = _SWAP_BELOW_ON_ONE_HOST if len(set(self.hosts)) == 1 else _SWAP_BELOW

    def lane(self, number: int) -> Group:
        if number == self._number:
            return self
        while len(self._further) < number:
            lane = self._among(range(self.size), f"lane {len(self._further) + 1}")
            self._further.append(lane)
            lane._number, lane.links = len(self._further), self.links
        return self._further[number - 1]

    def _among(self, ranks: Sequence[int], name: str) -> GlooGroup:
        """These ranks, in ascending order, with further connections. Each of them calls it at the same point."""
        place = ranks.index(self.rank), len(ranks), PrefixStore(name, self.store), self.device
        hosts = [self.hosts[r] for r in ranks]
        made = GlooGroup(*place, self.limit_s, self.check, hosts, hostname=self._hostname)
        made.timeout_s, made.first_steps = self.timeout_s, self.first_steps
        return made

    def connect_lanes(self, count: int) -> None:
        counts = self.all_gather(torch.tensor([count]), "number of lanes")
        self.lane(max(int(each) for each in counts) - 1)

    def retire(self) -> None:
        for each in (*self._further, *self._parts.values()):
            each.retire()
        super().retire()

    def close(self, timeout_s: float) -> bool:
        """As `Group.close`: a thread of gloo that frees a tensor after the interpreter has ended aborts the process. To
        end anything while messages are under way would block.
        """
        deadline = time.monotonic() + timeout_s
        closed = [each.close(max(0.0, deadline - time.monotonic())) for each in (*self._further, *self._parts.values())]
        while not all(pending.done() for pending in self.under_way):
            if time.monotonic() > deadline:
                return False
            time.sleep(SLICE_S)
        self.under_way.clear()
        self.disconnect()
        return all(closed)

    def disconnect(self) -> None:
        self._pg = self._share_pg = self._store = None
        self._from, self._share_from = [], []

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        if tensor.nbytes < self.swap_below and op in ("sum", "avg"):
            theirs = torch.empty_like(tensor)
            work = self._pass_on(self._pg, theirs, tensor)
            return GlooPending(self, what, [(work, None)], lambda: tensor.add_(theirs))
        return GlooPending(self, what, [(self._pg.allreduce(tensor, REDUCE_OPS[op]), None)])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        other = 1 - self.rank
        if self.size > 2 or max(cut[other], into[other]) * tensor.element_size() < self.swap_below:
            work = self._pg.alltoall_base(out, tensor, list(into), list(cut))
            return GlooPending(self, what, [(work, None)])
        mine, theirs = tensor.split_with_sizes(list(cut)), out.split_with_sizes(list(into))
        theirs[self.rank].copy_(mine[self.rank])
        parts = [mine[other] if source == self.rank else theirs[source] for source in range(2)]
        return GlooPending(self, what, self._broadcasts(self._from, parts))

    def share(self, flat: Tensor, what: str, cuts: Sequence[slice]) -> Pending:
        return self._share([flat[cut] for cut in cuts], what)

    def _share(self, parts: Sequence[Tensor], what: str) -> Pending:
        """Broadcasts: gloo's all-gather takes almost twice as long. They have connections of their own: messages of a
        process group must be started in the same order on all ranks, and these are not.
        """
        if max(part.nbytes for part in parts) < self.swap_below:
            return self.pass_on(parts[1 - self.rank], parts[self.rank], what)
        return GlooPending(self, what, self._broadcasts(self._share_from, parts))

    def _broadcasts(self, over: Sequence[Any], parts: Sequence[Tensor]) -> list[tuple[Any, int | None]]:
        """Starts a broadcast of each part from the rank of its number; `over`: the process group of each."""
        works: list[tuple[Any, int | None]] = []
        for source, part in enumerate(parts):
            if part.numel():
                peer = None if source == self.rank else source
                works.append((over[source].broadcast(part, source), peer))
        return works

    def pass_on(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        return GlooPending(self, what, [(self._pass_on(self._share_pg, out, tensor), None)])

    def _pass_on(self, over: Any, out: Tensor, tensor: Tensor) -> Any:
        into, cut = self._for_one(out, self.before[self.rank]), self._for_one(tensor, self.after[self.rank])
        return over.alltoall_base(out.view(-1), tensor.view(-1), into, cut)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        work = self._pg.broadcast(tensor, source)
        return GlooPending(self, what, [(work, source if self.rank != source else None)])

    def sum_among(self, flat: Tensor, ranks: Sequence[int], what: str) -> Iterator[Pending]:
        """By the library's all-reduce, over connections of these ranks alone, which the first sum makes: in gloo's
        all-to-all each rank waits for every other one's message, be it empty.
        """
        if self.rank in ranks:
            key = tuple(ranks)
            if key not in self._parts:
                self._parts[key] = self._among(ranks, f"ranks {key}")
                self._parts[key].numbers = ranks
            yield self._parts[key].all_reduce(flat, what)

    def in_pairs(self, act: Callable[[], None], what: str) -> None:
        """In a thread: a wait for one peer's message cannot be polled, as it closes the pair where it times out."""
        self.connect(act, lambda made: None, f"{what}: lost contact", f"answer ({what})")

    def exchange(self, sent: Tensor, received: Tensor, peer: int, what: str) -> None:
        limit = timedelta(seconds=self.timeout_s)
        works = self._pg.recv([received], peer, _EXCHANGE), self._pg.send([sent], peer, _EXCHANGE)
        for work in works:
            work.wait(limit)

    def take_links(self, links: Links) -> None:
        self.links = links
        for lane in self._further:
            lane.take_links(links)

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        out = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for _ in range(self.size)]
        out[self.rank].copy_(tensor)
        self._share(out, what).wait()
        return out


def process_group(store: Store, rank: int, size: int, timeout_s: float, hostname: str | None) -> Any:
    """A process group that is not registered in torch.distributed, beside any that the user has."""
    backend: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
    gloo = backend._Options()
    gloo._devices = [backend.create_device(hostname=hostname) if hostname else backend.create_default_device()]
    # Nothing else ends a wait for a worker that was lost while it connected; `Group.connect` gives up a moment before.
    gloo._timeout = timedelta(seconds=timeout_s + 1)
    gloo._threads = 2
    made = backend(store, rank, size, gloo)
    # Of messages our own timeout comes first: it names the late ranks.
    made._set_default_timeout(timedelta(seconds=2 * EARLY * timeout_s + 30))
    return made
