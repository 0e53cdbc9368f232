"""Which worker gives which part of the state to whom: everything arrives, and only what changes owner travels."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfuse.comm.copies import ranks_after
from kfuse.comm.group import Group
from kfuse.kernels import BLOCK
from kfuse.optim.sharding import hand_overs, plan_moves
from kfuse.optim.updates import ShardsLost

SIZES = st.integers(1, 6)


def group(size: int) -> Group:
    made = Group()
    made.size = size
    return made


def elements(places: list[slice]) -> set[int]:
    """In units that every place begins and ends at (but for the end of the bucket)."""
    return {at for place in places for at in range(place.start, place.stop, BLOCK)}


@settings(max_examples=200, deadline=None)
@given(old=SIZES, new=SIZES, blocks=st.integers(0, 40), data=st.data())
def test_a_resize(old: int, new: int, blocks: int, data: st.DataObject) -> None:
    """Some workers leave, which hand over before; some stay, in any order of ranks; some join, and have nothing."""
    numel = max(0, blocks * BLOCK - data.draw(st.integers(0, 100)))
    stay = data.draw(st.permutations(range(old)))[: data.draw(st.integers(1, min(old, new)))]
    ranks = data.draw(st.permutations(range(new)))
    new_ranks = [ranks[stay.index(rank)] if rank in stay else None for rank in range(old)]
    before, after = group(old).shards(numel, BLOCK), group(new).shards(numel, BLOCK)

    after_each = ranks_after(data.draw(st.lists(st.sampled_from("abc"), min_size=old, max_size=old)))
    taken = hand_overs(before, [rank for rank in range(old) if rank not in stay], after_each)
    moves = plan_moves([[shard] for shard in before], taken)
    assert all(new_ranks[move.source] is None and new_ranks[move.target] is not None for move in moves)
    held: list[list[slice]] = [[] for _ in range(new)]
    for rank, later in enumerate(new_ranks):
        if later is not None:
            held[later] = [before[rank], *taken[rank]]
    assert elements([place for places in held for place in places]) == elements([slice(0, numel)])

    moves = plan_moves(held, [[shard] for shard in after])
    arrived: list[list[slice]] = [[] for _ in range(new)]
    for move in moves:
        assert elements([move.place]) <= elements(held[move.source])
        arrived[move.target].append(move.place)
    for target, places in enumerate(arrived):
        assert elements(places) == elements([after[target]])
        assert all(a.stop == b.start for a, b in pairwise(places))
        travelled = [move.place for move in moves if move.target == target and move.source != target]
        assert not elements(travelled) & elements(held[target])


HOSTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=8)


@given(HOSTS)
def test_as_many_mirrors_as_can_be_are_on_another_host(hosts: list[str]) -> None:
    """Each worker has one, and is one. On one host, or with a host each, it is the next worker."""
    after, size = ranks_after(hosts), len(hosts)
    assert sorted(after) == list(range(size)) and (size == 1 or all(rank != other for rank, other in enumerate(after)))
    beside = sum(hosts[rank] == hosts[other] for rank, other in enumerate(after))
    most = max(hosts.count(host) for host in hosts)
    assert beside == max(0, most - (size - most))
    if len({*hosts}) in (1, size):
        assert after == [(rank + 1) % size for rank in range(size)]


def with_mirrors(numel: int, hosts: list[str]) -> list[list[slice]]:
    """What each rank has: its own shard, and the one of the rank before."""
    group = Group(0, len(hosts), hosts=hosts)
    own = group.shards(numel, 8)
    return [[own[r], own[group.before[r]]] if group.size > 1 else [own[r]] for r in range(group.size)]


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, list[str], list[int], int]:
    """(elements, the host of each worker before, ranks that survive, new workers)."""
    hosts = draw(HOSTS)
    alive = draw(st.lists(st.integers(0, len(hosts) - 1), min_size=1, unique=True))
    return draw(st.integers(0, 300)), hosts, sorted(alive), draw(st.integers(0, 2))


@given(losses())
def test_survivors_get_all_unless_owner_and_mirror_are_lost(case: tuple[int, list[str], list[int], int]) -> None:
    numel, hosts, alive, new = case
    before, after, size = with_mirrors(numel, hosts), ranks_after(hosts), len(hosts)
    held = [before[r] for r in alive] + [[] for _ in range(new)]
    wanted = with_mirrors(numel, [hosts[r] for r in alive] + ["c"] * new)
    lost = [r for r in range(size) if r not in alive and after[r] not in alive]
    if any(before[r][0].stop > before[r][0].start for r in lost):
        with pytest.raises(ShardsLost):
            plan_moves(held, wanted)
        return
    moves = plan_moves(held, wanted)
    for to, places in enumerate(wanted):
        mine = sorted((m.place.start, m.place.stop) for m in moves if m.target == to)
        assert [e for start, stop in mine for e in range(start, stop)] == sorted(
            e for place in places for e in range(place.start, place.stop)
        )
    for move in moves:
        assert any(p.start <= move.place.start and move.place.stop <= p.stop for p in held[move.source])
