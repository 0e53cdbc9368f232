"""Compares the workers' parameters and settings every `check_every` steps, and names what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kfuse.comm.group import Group
from kfuse.comm.tail import digest
from kfuse.optim.consistency import salt
from kfuse.optim.updates import Updates
from kfuse.statistics.step_stats import Statistics


class ConsistencyError(RuntimeError):
    """The workers' parameters or the optimizer's options are no longer the same; the message names the first that
    differs.
    """


class Comparison:
    """An optimizer's comparison with the other workers."""

    def __init__(self, updates: Updates, numbers: Callable[[], dict[str, float]]) -> None:
        """numbers: returns the settings that must be equal on all workers, by name."""
        self._updates, self._numbers = updates, numbers
        self._digests: dict[int, list[Tensor]] = {}

    def compared(self) -> tuple[Sequence[Tensor], int]:
        """Returns what else than parameters must be equal on all workers, in a step in which they compare.

        With sharded state the update replaces a parameter that differs by its owners' values. So each one's digest is
        kept, to name it.
        """
        engine = self._updates.engine
        if engine.options.sharded:
            self._digests[engine.step] = [digest([p]) for p in engine.params]
        return [counts for _, counts in self._updates.counts()], salt(self._numbers())

    def check(self, step: int, statistics: Statistics, model: nn.Module | None) -> None:
        """Raises ConsistencyError, on every rank after the same step, if the ranks differed when they were compared.

        model: has names for the parameters.
        """
        engine, compared = self._updates.engine, statistics.compared
        if not compared or 0 <= step - compared[0][0] < statistics.lag(engine.device):
            return
        compared_at, of_ranks = compared.popleft()
        kept = self._digests.get(compared_at, [])
        self._digests = {at: digests for at, digests in self._digests.items() if at > compared_at}
        if len(set(of_ranks)) < 2:
            return
        names = engine.names
        if model is not None:
            known = {id(p): f"parameter {name}" for name, p in model.named_parameters()}
            names = [known.get(id(p), name) for p, name in zip(engine.params, names, strict=True)]
        if len(kept) != len(names):
            kept = [digest([p]) for p in engine.params]
        digests = {
            f"the number of updates of {names[i]}": digest([counts[k]])
            for indices, counts in self._updates.counts()
            for k, i in enumerate(indices)
        }
        where = first_difference(engine.group, self._numbers(), digests | dict(zip(names, kept, strict=True)))
        raise ConsistencyError(f"step {compared_at}: the workers no longer have the same model: {where}")


def first_difference(group: Group, numbers: Mapping[str, float], digests: Mapping[str, Tensor]) -> str:
    """Returns text that names the first number or digest that differs between ranks. Every rank calls it. Raises
    CommError.
    """
    names = [*numbers, *digests]
    named = torch.tensor([len(names), salt(dict.fromkeys(names, 0.0)) >> 1], device=group.device)
    lists = torch.stack(group.all_gather(named, "names of the options")).cpu()
    others = [rank for rank in range(group.size) if not torch.equal(lists[rank], lists[0])]
    if others:
        return f"the parameter groups, or their options (ranks {', '.join(map(str, others))} have others than rank 0)"
    values = list(torch.tensor([*numbers.values()], dtype=torch.float64).view(torch.int64).to(group.device))
    values += [each.to(group.device) for each in digests.values()]
    found = torch.stack(group.all_gather(torch.stack(values), "digests of the parameters")).cpu()
    different = (found != found[0]).any(dim=0).nonzero().flatten().tolist()
    if not different:
        return "what differed then has been overwritten since"
    first = different[0]
    ranks = [rank for rank in range(group.size) if found[rank, first] != found[0, first]]
    count = f"{len(different)} of {found.shape[1]} options and parameters differ"
    return f"{names[first]} (ranks {', '.join(map(str, ranks))} against rank 0; {count})"
