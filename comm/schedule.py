"""Schedules: what a step does with one bucket, as a small program.

A program is a tuple of operations. `Executor` runs it for each bucket, up to its barrier during backward; the rest as
the optimizer updates. The transformations are CoCoNeT's (Jangda et al. 2022, "Breaking the Computation and
Communication Abstraction Barrier in Distributed Machine Learning Workloads"): each makes an equivalent program of
another one. Where that one does not allow it, the result is refused by `validate`, if not by ValueError at once.

    allreduce        pack   exchange           wait                                barrier   measure   update
    all_to_all       pack   exchange (shard)   wait   reduce   share   wait        barrier   measure   update
    its sharded one  pack   exchange (shard)   wait   reduce+measure               barrier   update    share   wait

Where an update needs whole matrices (Muon's), each is orthogonalised by one worker alone, its owner:

    allreduce        pack   exchange   wait   barrier   measure   orthogonalise (shard)   share   wait   update
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

ALL, SHARD = "all", "shard"  # places: the whole bucket, or this worker's part of it

PULLED = "symmetric"  # the transport whose exchange is no message: `reduce` reads contributions where they are

GRADIENT, PARAMETER, FACTOR = "gradient", "parameter", "factor"  # what is shared


@dataclass(frozen=True)
class Op:
    """One operation on a bucket."""

    kind: str
    """One of `KINDS`, or several that one kernel does, joined by "+".

    pack: gradients to the flat buffer. exchange: messages between all workers, by the transport. wait: for the bucket's
    last message. reduce: adds up the contributions that the exchange brought. measure: sums of squares of the mean
    gradient. mirror: the worker after it gets this one's shard of the gradient. share: every worker gets all parts.
    barrier: until all buckets have come here, on this worker; for sharded state the workers' sums of squares are shared
    there. orthogonalise: of the matrices that this worker owns, by the optimizer. update: by the optimizer.
    """
    place: str = ALL  # what it leaves, works on or waits for
    what: str = ""  # exchange: the transport's name. share: gradient | parameter | factor.

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.kind.split("+"))

    @property
    def stream(self) -> str:
        """Where a GPU does it: compute (the current stream), messages (the communicator's), or side (one for sums)."""
        if self.kind in ("exchange", "mirror", "share") and self.what != PULLED:
            return "messages"
        on_shard = self.place == SHARD and self.kind != "update"
        return "side" if on_shard else "compute"


@dataclass(frozen=True)
class Program:
    """What a step does with one bucket."""

    ops: tuple[Op, ...]

    @property
    def sharded(self) -> bool:
        """Whether each worker updates its own part of the bucket, and keeps optimizer state for that part only."""
        return self.ops[self.index("update")].place == SHARD

    @property
    def measures_shards(self) -> bool:
        """Whether each worker measures its own part of the bucket."""
        return self.ops[self.index("measure")].place == SHARD

    @property
    def transport(self) -> str:
        return self.ops[self.index("exchange")].what

    @cached_property
    def pause(self) -> int:
        """The number of the wait for the last message before the barrier, or of the barrier where none comes so late.

        What is before it can be done while backward goes on.
        """
        barrier = self.index("barrier")
        after_exchange = range(self.index("exchange") + 1, barrier)
        return next((at for at in after_exchange if self.ops[at] == Op("wait", ALL)), barrier)

    def index(self, kind: str, what: str = "") -> int:
        """The number of the first operation that does this. Raises ValueError if there is none."""
        if (kind, what) not in self._first:
            raise ValueError(f"the program has no {kind} {what}".rstrip() + f": {self}")
        return self._first[kind, what]

    @cached_property
    def _first(self) -> dict[tuple[str, str], int]:
        """By what an operation does, with and without `Op.what`: the number of the first one. Steps look it up."""
        found: dict[tuple[str, str], int] = {}
        for index, op in enumerate(self.ops):
            for kind in op.kinds:
                found.setdefault((kind, ""), index)
                found.setdefault((kind, op.what), index)
        return found

    def has(self, kind: str) -> bool:
        return (kind, "") in self._first

    def __str__(self) -> str:
        return ", ".join(f"{op.kind}({', '.join(filter(None, (op.what, op.place)))})" for op in self.ops)


# What each kind of operation needs. An update follows the barrier: clipping needs all buckets, and a failure must leave
# none updated.
KINDS = {
    "pack": "must be the first, of all gradients",
    "exchange": "must follow pack, once",
    "wait": "no message under way brings that",
    "reduce": "must follow the wait for an exchange that leaves this worker its shard",
    "measure": "needs the mean gradient, and must come once, before the update",
    "mirror": "needs the mean gradient of this worker's shard, before the barrier",
    "share": "needs this worker's shard of the gradient before the update, or of the factors or updated parameters",
    "barrier": "must come once, when the bucket's sum is there",
    "orthogonalise": "needs the whole gradient of this worker's matrices, measured, after the barrier",
    "update": "must come once, after the barrier, with the mean gradient measured, and with all factors that it needs",
}


def validate(program: Program) -> None:
    """Raises ValueError unless the program makes one update by the mean gradient that all parameters get.

    Each operation needs what earlier ones left. No message may be under way where its data are used, nor at the end.
    """
    done: set[str] = set()
    under_way = brings = gradient = ""  # the place and content of a message; where the mean gradient is
    contributions = False  # those of all workers to this one's shard are here
    parameters = factors = ALL  # where they are those of the last update, or of this step
    for op in program.ops:
        place = op.place
        for kind in op.kinds:
            has_shard = not under_way and gradient == SHARD
            match kind:
                case "pack":
                    fits = not done and place == ALL
                case "exchange":
                    fits = "pack" in done and not brings
                    under_way, brings = place, "contributions" if place == SHARD else GRADIENT
                case "wait":
                    fits = bool(under_way) and under_way == place
                    contributions = brings == "contributions"
                    # Where the transport adds up itself the shard's sum is there; else a reduce makes it.
                    gradient = {"contributions": SHARD, GRADIENT: ALL}.get(brings, gradient)
                    parameters = ALL if brings == PARAMETER else parameters
                    factors = ALL if brings == FACTOR else factors
                    under_way = ""
                case "reduce":
                    fits = contributions and place == SHARD
                case "measure":
                    fits = not under_way and gradient in (place, ALL) and not done & {"measure", "update"}
                case "mirror":
                    fits = has_shard and place == SHARD and "barrier" not in done
                    under_way, brings = ALL, "mirror"
                case "share":
                    before = op.what == GRADIENT and has_shard and "update" not in done
                    after = op.what == PARAMETER and not under_way and "update" in done and parameters == SHARD
                    between = op.what == FACTOR and not under_way and "update" not in done and factors == SHARD
                    fits = place == ALL and (before or between or after)
                    under_way, brings = ALL, op.what
                case "barrier":
                    fits = "barrier" not in done and not under_way and bool(gradient) and place == ALL
                case "orthogonalise":
                    fits = {"barrier", "measure"} <= done and not done & {"orthogonalise", "update"} and place == SHARD
                    factors = SHARD
                case "update":
                    ready = {"barrier", "measure"} <= done and "update" not in done and not under_way
                    fits = ready and gradient in (place, ALL) and factors in (place, ALL)
                    parameters = place
                case _:
                    raise ValueError(f"{kind!r} is no operation: {program}")
            if not fits:
                raise ValueError(f"{op.kind} ({place}): {KINDS[kind]}: {program}")
            contributions = contributions and kind == "wait"
            done.add(kind)
    if "update" not in done or under_way or parameters != ALL:
        raise ValueError(f"at its end all parameters must be updated, and no message under way: {program}")


def all_reduce(transport: str) -> Program:
    """The plain program: one exchange whose result is the sum, on every worker."""
    exchange = Op("exchange", ALL, transport)
    return Program((Op("pack"), exchange, Op("wait"), Op("barrier"), Op("measure"), Op("update")))


def split(program: Program, transport: str, reduces: bool) -> Program:
    """The exchange leaves each worker its shard of the sum, which is then shared: reduce-scatter and all-gather.

    reduces: the exchange brings all workers' contributions, and the worker adds them up itself.
    """
    at = program.index("exchange")
    parts = [Op("exchange", SHARD, transport), Op("wait", SHARD)]
    if reduces:
        parts.append(Op("reduce", SHARD))
    parts.append(Op("share", ALL, GRADIENT))
    return Program((*program.ops[:at], *parts, *program.ops[at + 1 :]))


def reorder(program: Program) -> Program:
    """Updates before the share: each worker its own shard, whose parameters are shared in place of the gradient."""
    share = program.index("share", GRADIENT)
    wait, barrier, measure, update = program.ops[share + 1 :]
    on_shard = (replace(measure, place=SHARD), barrier, replace(update, place=SHARD))
    return Program((*program.ops[:share], *on_shard, Op("share", ALL, PARAMETER), wait))


def measure_shards(program: Program) -> Program:
    """Each worker measures its shard of the sum before it is shared: in fp32, where what is shared is rounded."""
    share, measure = program.index("share", GRADIENT), program.index("measure")
    rest = program.ops[share:measure] + program.ops[measure + 1 :]
    return Program((*program.ops[:share], Op("measure", SHARD), *rest))


def fuse(program: Program) -> Program:
    """One kernel adds up the contributions and measures the sum, which it has in registers: no second pass over it."""
    at, ops = program.index("reduce"), program.ops
    if [op.kind for op in ops[at : at + 2]] != ["reduce", "measure"] or ops[at].place != ops[at + 1].place:
        raise ValueError(f"fuse: a measure of the same place must follow the reduce: {program}")
    return Program((*ops[:at], Op("reduce+measure", ops[at].place), *ops[at + 2 :]))


def orthogonalise(program: Program) -> Program:
    """Each worker orthogonalises the matrices that it owns. Where it updates more than these the factors are shared."""
    at = program.index("update")
    shared = () if program.sharded else (Op("share", ALL, FACTOR), Op("wait"))
    return Program((*program.ops[:at], Op("orthogonalise", SHARD), *shared, *program.ops[at:]))


def mirror(program: Program) -> Program:
    """The worker after one gets its shard of the gradient too, so it can repeat its update: see `Group.pass_on`."""
    barrier = program.index("barrier")
    return Program((*program.ops[:barrier], Op("mirror", SHARD), Op("wait"), *program.ops[barrier:]))
