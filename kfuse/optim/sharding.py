"""Moves shards of optimizer state between workers: to one place for a state_dict, and to new owners after a resize.

A worker announces which parts of each bucket it holds, and takes those that it lacks from workers that hold them. So
it does not matter which view the parts are from: only what has another owner travels, and a part may have several
holders.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kfuse.comm.buckets import Bucket
from kfuse.comm.engine import Engine
from kfuse.comm.group import Group
from kfuse.optim.layout import MASTER, Part
from kfuse.optim.rules import BucketState
from kfuse.optim.updates import ShardsLost


class Move(NamedTuple):
    """Elements of a bucket that rank `source` has and rank `target` wants; both may be the same."""

    source: int
    target: int
    place: slice


def plan_moves(held: Sequence[Sequence[slice]], wanted: Sequence[Sequence[slice]]) -> list[Move]:
    """Who gives what to whom, in the order of targets and places. Each argument: of every rank, places of one bucket.

    What a rank holds itself it takes from there; else the first rank that has it gives it. A pure function: every rank
    comes to the same plan. Raises ShardsLost, which names the elements that no rank has.
    """
    moves: list[Move] = []
    missing: list[str] = []
    edges = sorted({edge for places in held for place in places for edge in (place.start, place.stop)})
    for target, places in enumerate(wanted):
        for place in places:
            cuts = [place.start, *(edge for edge in edges if place.start < edge < place.stop), place.stop]
            for start, stop in pairwise(cuts):
                if start == stop:
                    continue
                holders = [r for r, theirs in enumerate(held) if any(p.start <= start < p.stop for p in theirs)]
                if not holders:
                    missing.append(f"{start} to {stop}")
                    continue
                source = target if target in holders else holders[0]
                moves.append(Move(source, target, slice(start, stop)))
    if missing:
        raise ShardsLost(f"elements {', '.join(missing)}")
    return moves


def move(
    group: Group,
    buckets: Sequence[Bucket],
    held: Sequence[Sequence[Part]],
    wanted: Sequence[Sequence[Sequence[slice]]],
    names: Sequence[Sequence[str]],
    what: str,
) -> list[list[Part]]:
    """Returns the parts that this worker wants, of each bucket. Every rank of the group calls it.

    held: of each bucket what this worker has; it stays. wanted: of each bucket, of each rank. names: of each bucket's
    tensors. Wanted and names are the same on all ranks. Raises CommError, and ShardsLost on every rank.
    """
    everywhere = _announce(group, held, what)
    try:
        plans = [
            plan_moves(theirs, wanted_places) if of_bucket else []
            for theirs, wanted_places, of_bucket in zip(everywhere, wanted, names, strict=True)
        ]
    except ShardsLost as error:
        raise ShardsLost(f"comm.state=sharded: no worker has this optimizer state any more: {error}") from None
    moved: list[list[Part]] = []
    for bucket, mine, plan, wanted_places, of_bucket in zip(buckets, held, plans, wanted, names, strict=True):
        new = [Part(place) for place in wanted_places[group.rank] if place.stop > place.start]
        for part in new:
            part.make(of_bucket, bucket.device)
        for name in of_bucket:
            _exchange(group, plan, mine, new, name, f"{what}, {bucket.name}")
        moved.append(new)
    return moved


def _announce(group: Group, held: Sequence[Sequence[Part]], what: str) -> list[list[list[slice]]]:
    """Of each bucket, of each rank, the places that it holds."""
    rows = [[index, part.place.start, part.place.stop] for index, parts in enumerate(held) for part in parts]
    counts = group.all_gather(torch.tensor([len(rows)], device=group.device), what)
    most = max(int(count) for count in counts)
    padded = torch.tensor(rows + [[-1, 0, 0]] * (most - len(rows)), dtype=torch.int64, device=group.device)
    everywhere: list[list[list[slice]]] = [[[] for _ in range(group.size)] for _ in held]
    for rank, table in enumerate(group.all_gather(padded.view(most, 3), what)):
        for index, start, stop in table.tolist():
            if index >= 0:
                everywhere[index][rank].append(slice(start, stop))
    return everywhere


def _exchange(
    group: Group, plan: Sequence[Move], held: Sequence[Part], new: Sequence[Part], name: str, what: str
) -> None:
    """Fills the tensors of `new` with what the plan brings this rank."""
    rank, ranks = group.rank, range(group.size)

    def at(parts: Sequence[Part], place: slice) -> Tensor:
        part = next(p for p in parts if p.place.start <= place.start and place.stop <= p.place.stop)
        return part.cut(name, place)

    for own in (m for m in plan if m.source == m.target == rank):
        at(new, own.place).copy_(at(held, own.place))
    travelling = [m for m in plan if m.source != m.target]
    if not travelling:
        return
    sent = [[at(held, m.place) for m in travelling if (m.source, m.target) == (rank, r)] for r in ranks]
    received = [[at(new, m.place) for m in travelling if (m.source, m.target) == (r, rank)] for r in ranks]
    cut, into = ([sum(part.numel() for part in parts) for parts in by_rank] for by_rank in (sent, received))
    nothing = torch.empty(0, dtype=torch.float32, device=group.device)
    out = torch.empty(sum(into), dtype=torch.float32, device=group.device)
    group.all_to_all(out, into, torch.cat([nothing, *(p for parts in sent for p in parts)]), cut, what).wait()
    places = [part for parts in received for part in parts]
    for place, values in zip(places, out.split_with_sizes([p.numel() for p in places]), strict=True):
        place.copy_(values)


def regroup(engine: Engine, states: Sequence[BucketState], has_state: bool) -> None:
    """Gives each worker its shards of the engine's present group, and what it mirrors. Every rank calls it.

    has_state: this worker's parts are of the newest state. Raises CommError and ShardsLost. Until all ranks have theirs
    each keeps what another one may still lack: after an error that is among `BucketState.others`.
    """
    buckets, group = engine.gradient_buckets, engine.group
    names = [_names_of(state) for state in states]
    held = [
        [part for part in state.held() if has_state and part.tensors.keys() >= set(of_bucket)]  # a new worker has none
        for state, of_bucket in zip(states, names, strict=True)
    ]
    mirrors, before, cuts = engine.mirrors and group.size > 1, group.before, [bucket.shards for bucket in buckets]
    wanted = [
        [[shard, shards[before[rank]]] if mirrors else [shard] for rank, shard in enumerate(shards)] for shards in cuts
    ]
    moved = move(group, buckets, held, wanted, names, "optimizer state to its new owners")
    for state, new in zip(states, moved, strict=True):
        state.others += new
    group.barrier("optimizer state is with its new owners")
    for bucket, state, new in zip(buckets, states, moved, strict=True):
        state.others = []
        for part, place in ((state.own, bucket.shard), (state.mirror, bucket.mirrored)):
            part.move_to(place)
            for each in new:
                part.tensors |= each.tensors if each.place == place else {}
            part.make(state.rule.moment_names if state.has_moments else (), bucket.device)
            if part.master is None and state.param.dtype != torch.float32:
                part.tensors[MASTER] = state.param[place].float()


def hand_over(engine: Engine, states: Sequence[BucketState], leavers: Collection[int]) -> None:
    """Before the group changes: workers that leave it give their shards to those that stay (`hand_overs`).

    Every rank calls it. Raises CommError and ShardsLost.
    """
    buckets, group = engine.gradient_buckets, engine.group
    wanted = [hand_overs(bucket.shards, leavers, group.after) for bucket in buckets]
    names = [_names_of(state) for state in states]
    held = [state.held() for state in states]
    moved = move(group, buckets, held, wanted, names, "optimizer state of workers that leave")
    for state, new in zip(states, moved, strict=True):
        state.others += new


def _names_of(state: BucketState) -> list[str]:
    """The names of the tensors that the bucket's state has, the same on every worker. Masters are made from parameters
    before they are state.
    """
    moments = state.rule.moment_names if state.has_moments else ()
    return [*moments, *([MASTER] if state.has_masters else ())]


def collect(engine: Engine, states: Sequence[BucketState], rank: int, has_state: bool) -> None:
    """Gives rank `rank` all parameters, each from a worker that has updated it. Every rank calls it.

    has_state: this worker has updated its parts. Raises CommError and ShardsLost.
    """
    group, buckets = engine.group, engine.gradient_buckets
    held = [
        [Part(part.place, {"param": state.param[part.place].float()}) for part in state.parts] if has_state else []
        for state in states
    ]
    wanted = [[[slice(0, bucket.body)] if r == rank else [] for r in range(group.size)] for bucket in buckets]
    names = [["param"]] * len(buckets)
    for state, whole in zip(states, move(group, buckets, held, wanted, names, "updated parameters"), strict=True):
        for part in whole:
            state.param.copy_(part.tensors["param"])


def hand_overs(shards: Sequence[slice], leavers: Collection[int], after: Sequence[int]) -> list[list[slice]]:
    """Of each rank, the shards that it takes from ranks that leave: the one that mirrors it, or else the next one that
    stays. after: as `Group.after`.
    """
    taken: list[list[slice]] = [[] for _ in shards]
    for leaver in leavers:
        following = [after[leaver], *((leaver + k) % len(shards) for k in range(1, len(shards)))]
        for heir in [rank for rank in following if rank not in leavers][:1]:
            taken[heir].append(shards[leaver])
    return taken


def gather(engine: Engine, states: Sequence[BucketState], only: int | None) -> list[dict[str, Tensor]]:
    """Returns the whole state tensors of each bucket, [body], on the host. Every rank calls it. Raises CommError.

    only: the rank that gets them; the others get none. None: every rank does.
    """
    group, gathered = engine.group, list[dict[str, Tensor]]()
    for bucket, state in zip(engine.gradient_buckets, states, strict=True):  # apart: the device has one whole at a time
        wanted = [[slice(0, bucket.body)] if only in (None, rank) else [] for rank in range(group.size)]
        [found] = move(group, [bucket], [[state.own]], [wanted], [list(state.own.tensors)], "optimizer state")
        found = found if bucket.body else [state.own]  # parameters without elements: nothing travels
        gathered.append({name: tensor.cpu() for part in found for name, tensor in part.tensors.items()})
    return gathered
