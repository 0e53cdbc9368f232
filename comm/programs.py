"""Which schedule, programs and transports an engine has, by its options, its group and measured messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kfuse.comm import schedule, transport_names, transports
from kfuse.comm.buckets import Bucket, BucketLayout
from kfuse.comm.executor import Executor, shard_unit
from kfuse.comm.group import Group
from kfuse.comm.options import CommOptions
from kfuse.comm.schedule import Program

if TYPE_CHECKING:  # imported when used: `import kfuse` is quick
    from kfuse.comm.probe import Choice


def choose(
    options: CommOptions, group: Group, plan: Callable[[float], Sequence[BucketLayout]], again: bool
) -> Choice | None:
    """Returns what measured messages choose, None where the options leave no choice. Raises CommError.

    plan: lays out buckets of at most so many MiB. again: not for the first time.

    A worker that joins does not know yet what the others' decisions chose. So these do not matter here: all workers of
    a view must come to the same messages.
    """
    if group.size == 1 or options.is_definite:
        return None
    from kfuse.comm import probe  # not before it is needed: `import kfuse` is quick

    if not probe.leaves_choice(options):
        return None
    sizes = probe.BUCKETS_MB if options.bucket_mb is None else (options.bucket_mb,)
    buckets = {size: [layout.numel for layout in plan(size)] or [1] for size in sizes}
    if group.costs is None:
        group.costs = probe.probe(group, max(buckets[sizes[0]]), probe.AGAIN_S if again else probe.BUDGET_S)
    return probe.choose_program(group.costs, group.size, options, buckets)


def make_programs(options: CommOptions, name: str, adds_up: bool, mirrors: bool) -> tuple[Program, Program]:
    """What a step does with a bucket of gradients, and with a last bucket that has none: buffers and the tail.

    name: of the transport. adds_up: see `Group.adds_up`. mirrors: with sharded state, the next worker gets each
    worker's shard of the mean gradient too. Raises ValueError unless both are valid.
    """
    running = transports.resolve(name, adds_up, options.dtype)
    program = transports.program(running, options.sharded, options.dtype)
    program = schedule.mirror(program) if mirrors and options.sharded else program
    apart = transports.program_apart(running, options.reproducible)
    for each in (program, apart):
        schedule.validate(each)
    return program, apart


def make_executor(
    options: CommOptions,
    group: Group,
    buckets: Sequence[Bucket],
    of_gradients: int,
    name: str,
    tree: str | Sequence[int],
    mirrors: bool,
) -> Executor:
    """Makes the programs and transports, and the executor that has them.

    of_gradients: how many of the buckets have gradients. name: of the transport. tree, mirrors: see `transports.make`
    and `make_programs`. Raises ValueError, CommError, and for a class of the user's own what that raises.
    """
    program, apart = make_programs(options, name, group.adds_up, mirrors)
    programs = [program] * of_gradients + [apart] * (len(buckets) - of_gradients)
    unit, others = shard_unit(programs), transport_names.allowed(options.reproducible, options.sharded)
    names = dict.fromkeys(each.transport for each in programs)
    made = {each: transports.make(each, group, tree, unit, others) for each in names}
    return Executor(buckets, group, made, programs, options.dtype)
