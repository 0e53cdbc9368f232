"""Updates of parameters in flat buffers, by a rule: one kernel call for each bucket, or piece of one.

With `comm.state=sharded` a worker updates its shard of each bucket; the engine then gives all workers the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm.buckets import Bucket
from kfuse.comm.engine import Engine
from kfuse.comm.group import CommError
from kfuse.optim import sharding
from kfuse.optim.flat import FlatState, has_moments
from kfuse.optim.layout import MASTER, Entry, Piece, piece_of, refuse_overlaps
from kfuse.optim.rules import BucketState
from kfuse.optim.updates import Update, named_parameters

_NEVER_LOADED = {"amsgrad": True, "differentiable": True}
_OTHER_ARITHMETIC = _NEVER_LOADED | {"decoupled_weight_decay": False}  # which AdamW sets to True as it loads


class FlatUpdates(FlatState):
    """Makes updates by a rule."""

    weight_names = (MASTER,)
    skips_on_device = True
    _counts_differ = False  # workers may have made different updates
    _state: Any = None  # the optimizer's `state` after the last update, and how many entries it had
    _known = 0

    def options_of(self, state: BucketState) -> dict[str, Any]:
        return self.opt.param_groups[state.group]

    def check_layout(self, named: list[tuple[Parameter, str]]) -> None:
        """Raises ValueError if two parameters share memory: in flat buffers each has its own place. And for float64."""
        self._refuse_options(self.opt.param_groups, _OTHER_ARITHMETIC)
        for p, name in named:
            if p.dtype == torch.float64:
                raise ValueError(
                    f"{name} is torch.float64: kf.{type(self.opt).__name__} updates in fp32: use kf.Optimizer over an "
                    "optimizer of torch's"
                )
        refuse_overlaps(named)

    def owner_costs(self, params: Sequence[Parameter], group: Mapping[str, Any]) -> list[int] | None:
        return self.rule.of(group).owner_costs(params, group)

    def _refuse_options(self, groups: list[dict[str, Any]], options: dict[str, bool]) -> None:
        """Raises ValueError for an option of torch's whose arithmetic the kernels do not have."""
        for index, group in enumerate(groups):
            for name, value in options.items():
                if name in group and bool(group[name]) == value:
                    raise ValueError(
                        f"parameter group {index} has {name}={group[name]!r}, which {type(self.opt).__name__} does not "
                        "offer: kf.Optimizer wraps any torch optimizer"
                    )

    def lay_out(self, engine: Engine) -> None:
        self.sharded = engine.options.sharded
        super().lay_out(engine)
        for bucket, state in self.pairs():
            state.rule.lay_out(bucket, (state.own, state.mirror))

    # -- an update ------------------------------------------------------------------------------------------------

    def update(self, given: Update) -> None:
        """Also raises ValueError or RuntimeError for options and parameters that the user has changed wrongly."""
        self._refuse_options(self.opt.param_groups, _OTHER_ARITHMETIC)
        resumes = given.step.resumed
        if self.sharded and not resumes and any(state.own.place != bucket.shard for bucket, state in self.pairs()):
            raise RuntimeError("comm.state=sharded: the group has changed, and the optimizer's state was not moved")
        self.keep_flat()
        changed = self.opt.state is not self._state or len(self.opt.state) < self._known
        if self._known and changed and not self.sharded:
            for bucket, state in self.pairs():  # the user has replaced it, or taken entries out, to begin anew
                self.take(bucket, state)
        self._counted = self.engine.on_gpu and not self.sharded and self._count_together(given)
        self.rule.update(self, given)
        self._state, self._known = self.opt.state, len(self.opt.state)

    def run(self, update: Callable[[Bucket, BucketState], None]) -> None:
        """Updates this worker's part of each bucket, and shares its shards. Raises CommError."""
        try:
            whole = reversed(self.engine.gradient_buckets)
            for bucket in self.engine.updates([state.param for state in self.states]) if self.sharded else whole:
                update(bucket, self.states[bucket.index])
        except CommError:
            self.renew_parameters()
            raise

    def pieces(self, bucket: Bucket, state: BucketState, given: Update) -> list[list[Piece]]:
        """Returns what is to be updated of each of this worker's parts of a bucket. Makes the state that is needed.

        Updates are counted on each worker, also those of parameters that are not its own.
        """
        params, options = bucket.tensors, self.options_of(state)
        keeps = state.rule.keeps_state(options)
        if self._all_in_one_call(bucket, state, given):
            calls = [range(len(params))]
        else:
            # Some parameters had no gradient on any worker, now or before: torch leaves those alone, so must we.
            state.together = state.together and not keeps
            calls = [range(k, k + 1) for k, has_gradient in enumerate(self._updated(bucket, given)) if has_gradient]
        parts = state.parts
        pieces: list[list[Piece]] = [[] for _ in parts]
        for which in calls:
            skip = given.skip_of(bucket.layout.params[which[0]])  # of several in one call none is in doubt
            first = keeps and not state.entries[which[0]].known
            if first and state.rule.skips_first(options, skip):
                continue
            if first:
                self.make(bucket, state, which)
            self.publish_masters(bucket, state, which)
            if not self._counted:
                state.count_update(which, given.batch_factor, skip)
            for part, found in zip(parts, pieces, strict=True):
                piece = piece_of(bucket, state.param, state.steps, part, which, first, skip)
                if piece is not None:
                    found.append(piece)
        return pieces

    def _all_in_one_call(self, bucket: Bucket, state: BucketState, given: Update) -> bool:
        certain = not given.step.in_doubt or all(index not in given.step.in_doubt for index in bucket.layout.params)
        alike = state.together or not state.rule.keeps_state(self.options_of(state))
        return certain and alike and all(self._updated(bucket, given))

    def _updated(self, bucket: Bucket, given: Update) -> list[bool]:
        """Whether each of the bucket's parameters is updated: the user may have taken a `p.grad` away; with sharded
        state there is none.
        """
        if bucket.sharded:
            return [index not in given.step.left_out for index in bucket.layout.params]
        return [p.grad is not None for p in bucket.tensors]

    def _count_together(self, given: Update) -> bool:
        """Counts an update of all parameters, by a kernel or two, if each bucket has its state and one call."""
        together = all(s.entries[0].known and self._all_in_one_call(bucket, s, given) for bucket, s in self.pairs())
        if together:
            made: float | Tensor = 1.0 if given.skip is None else 1.0 - given.skip
            self.steps.add_(made, alpha=given.batch_factor)
        return together

    # -- averages -------------------------------------------------------------------------------------------------

    def make_state(self, lacking: Sequence[int]) -> None:
        for bucket, state in self.pairs():
            which = [k for k, index in enumerate(bucket.layout.params) if index in lacking]
            if which:
                self.make(bucket, state, which)
        self._counts_differ = True

    def average_models(self, weights: bool = True, states: bool = True) -> None:
        """Numbers of updates are averaged too: those of workers that made fewer are fractions."""
        super().average_models(weights, states)
        if states and self._counts_differ:
            for state in self.states:
                state.compare_updates()
            self._counts_differ = False

    # -- what is compared and saved -------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        names = self.engine.names
        return {
            f"whether {names[index]} has optimizer state": float(entry.known)
            for bucket, state in (self.pairs() if self.sharded else ())
            for index, entry in zip(bucket.layout.params, state.entries, strict=True)
        }

    def counts(self) -> list[tuple[Sequence[int], Tensor]]:
        return [(bucket.layout.params, state.steps) for bucket, state in self.pairs()] if self.sharded else []

    def state_dict(self, only: int | None = None) -> dict[str, Any]:
        if not self.sharded:
            return super().state_dict()
        if only is None:
            self.engine.group.meet("opt.state_dict() or kf.state_dict(), with comm.state=sharded")
        with self._shown(only):
            state = super().state_dict()
            return state | {"state": {key: dict(of) for key, of in state["state"].items()}}

    @contextmanager
    def _shown(self, only: int | None) -> Iterator[None]:
        """Gathers the whole tensors, on this rank or on all, and makes them visible in `state`, as if replicated."""
        try:
            wholes = sharding.gather(self.engine, self.states, only)
            for (bucket, state), tensors in zip(self.pairs(), wholes, strict=True):
                params = bucket.tensors
                for name, whole in tensors.items():
                    for p, view, entry in zip(params, bucket.view(whole), state.entries, strict=True):
                        if entry.mastered if name == MASTER else entry.known:
                            self.opt.state[p][name] = view
            yield
        finally:
            for p in self.engine.params:
                for name in self.names:
                    self.opt.state.get(p, {}).pop(name, None)

    def shards_shown(self) -> AbstractContextManager[None]:
        if not (self.sharded and any(state.has_moments or state.has_masters for state in self.states)):
            return nullcontext()
        self.engine.group.meet("opt.rebuild() or opt.add_param_group(), with comm.state=sharded")
        return self._shown(None)

    def load_state_dict(self, state: dict[str, Any], whole: bool = False) -> None:
        self._refuse_options(state["param_groups"], _NEVER_LOADED)
        self._check_shapes(state)
        self._load_by_torch(state)
        for bucket, of_bucket in self.pairs():
            if bucket.sharded:
                of_bucket.own.move_to(slice(0, bucket.body) if whole else bucket.shard)
                of_bucket.mirror.move_to(slice(0, 0))
                of_bucket.others = []
                of_bucket.rule.lay_out(bucket, [of_bucket.own])
            self.take(bucket, of_bucket)

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        named = named_parameters(self.opt.param_groups)
        for of, (p, label) in zip(self._states_of_params(state_dict), named, strict=False):  # torch checks the numbers
            for name in self.names:
                value = of.get(name)
                if value is not None and value.shape != p.shape:
                    raise ValueError(
                        f"{label} of shape {tuple(p.shape)}: the saved {name} has shape {tuple(value.shape)}"
                    )

    def _load_by_torch(self, state_dict: dict[str, Any]) -> None:
        """Loads by torch all but tensors which it would round to the parameter's dtype, or move to its device."""
        by_torch = not self.sharded and all(p.dtype == torch.float32 for p in self._params())
        names, rest = () if by_torch else self.names, dict[Any, Any]()
        for key, of in state_dict["state"].items():
            rest[key] = {name: value for name, value in of.items() if name not in names or value is None}
        super().load_state_dict({**state_dict, "state": rest})
        for p, of in zip(self._params(), self._states_of_params(state_dict), strict=True):
            for name in names:
                if (value := of.get(name)) is not None:
                    self.opt.state[p][name] = value.to(value.device if self.sharded else p.device, torch.float32)

    def _params(self) -> list[Parameter]:
        return [p for group in self.opt.param_groups for p in group["params"]]

    @staticmethod
    def _states_of_params(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        return [state_dict["state"].get(key, {}) for group in state_dict["param_groups"] for key in group["params"]]

    def make_room(self, state: dict[str, Any]) -> None:
        """Zeros, for what has not been updated here. Shards come apart."""
        if self.sharded:
            return
        given = dict(zip(map(id, self._params()), self._states_of_params(state), strict=False))
        for bucket, of_bucket in self.pairs():
            theirs = [given.get(id(p), {}) for p in bucket.tensors]
            missing = [
                k for k, of in enumerate(theirs) if not of_bucket.entries[k].known and has_moments(of_bucket, of)
            ]
            if missing:
                self.make(bucket, of_bucket, missing)
            self.publish_masters(bucket, of_bucket, [k for k, of in enumerate(theirs) if MASTER in of])

    # -- shards that move between workers -------------------------------------------------------------------------

    def common_state(self) -> dict[str, Any]:
        if not self.sharded:
            return super().common_state()
        shards = [([astuple(entry) for entry in state.entries], state.steps) for state in self.states]
        return {**super().state_dict(), "shards": shards}

    def load_common_state(self, state: dict[str, Any], keeps_shards: bool) -> None:
        if not self.sharded:
            super().load_common_state(state, keeps_shards)
            return
        self._load_by_torch({key: value for key, value in state.items() if key != "shards"})
        for (bucket, of_bucket), (entries, steps) in zip(self.pairs(), state["shards"], strict=True):
            if not keeps_shards:
                of_bucket.own.move_to(slice(0, 0))
                of_bucket.mirror.move_to(slice(0, 0))
                of_bucket.others = []
            of_bucket.entries = [Entry(*entry) for entry in entries]
            of_bucket.steps.copy_(steps)
            of_bucket.compare_updates()
            self.publish(bucket, of_bucket, [k for k, entry in enumerate(of_bucket.entries) if entry.known])

    def regroup(self, has_state: bool) -> None:
        if self.sharded:
            if self.engine.on_gpu:
                self.renew_parameters()  # with the room that the new group's messages need
            sharding.regroup(self.engine, self.states, has_state)
            for bucket, state in self.pairs():
                state.rule.lay_out(bucket, (state.own, state.mirror))

    def hand_over(self, leavers: Collection[int]) -> None:
        if self.sharded and leavers:
            sharding.hand_over(self.engine, self.states, leavers)

    def collect_parameters(self, rank: int, has_state: bool) -> None:
        sharding.collect(self.engine, self.states, rank, has_state)
