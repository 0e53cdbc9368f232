"""Parameters and optimizer state in flat buffers, one per bucket.

With `comm.state=sharded` a worker keeps state for its shard of each bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm.buckets import Bucket, flat_zeros
from kfuse.comm.engine import Engine
from kfuse.kernels import take_changed
from kfuse.optim.layout import MASTER, Entry, Part, fill, refuse_overlaps, with_own_storage
from kfuse.optim.rules import BucketState, Rule
from kfuse.optim.updates import Updates, named_parameters


class FlatState(Updates):
    """Keeps torch's per-parameter `state` as views of flat buffers, so that state_dict is torch's own.

    A 16-bit parameter's moments are fp32, and `state` has its fp32 weights too, as "master". torch's optimizers leave
    that entry alone, and round the moments to the parameter's dtype as they load them.
    """

    def __init__(self, opt: torch.optim.Optimizer, rule: Rule) -> None:
        super().__init__(opt)
        self.rule = rule
        self.names = (*rule.all_moment_names, MASTER)  # of all state tensors shaped like the parameter
        self.states: list[BucketState] = []  # of each bucket of gradients
        self.steps: Tensor  # fp32: the numbers of updates of all parameters, bucket by bucket

    def pairs(self) -> Iterator[tuple[Bucket, BucketState]]:
        return zip(self.engine.gradient_buckets, self.states, strict=True)

    def lay_out(self, engine: Engine) -> None:
        super().lay_out(engine)
        groups = {id(p): index for index, group in enumerate(self.opt.param_groups) for p in group["params"]}
        sizes = [len(bucket.layout.params) for bucket in engine.gradient_buckets]
        self.steps = torch.zeros(sum(sizes), dtype=torch.float32, device=engine.device)
        steps = self.steps.split_with_sizes(sizes) if sizes else ()
        buckets = zip(engine.gradient_buckets, steps, strict=True)
        self.states = [self._flatten(bucket, groups, of_bucket) for bucket, of_bucket in buckets]

    def _flatten(self, bucket: Bucket, groups: dict[int, int], steps: Tensor) -> BucketState:
        params = bucket.tensors
        param = flat_zeros(bucket.body, 1, bucket.device, bucket.layout.dtype, bucket.room)
        views = bucket.view(param)
        fill(views, [p.data for p in params])
        for p, view in zip(params, views, strict=True):
            p.data = with_own_storage(view)
        own, mirror, group = Part(bucket.shard), Part(bucket.mirrored), groups[id(params[0])]
        rule = self.rule.of(self.opt.param_groups[group])
        state = BucketState(param, group, rule, steps, [Entry() for _ in params], own, mirror)
        self.take(bucket, state)
        state.addresses = [p.data_ptr() for p in params]
        return state

    def take(self, bucket: Bucket, state: BucketState) -> None:
        """Moves what torch has loaded into its `state` to its place in the flat buffers. What lies there is not copied.

        With sharded state torch's `state` then has the numbers of updates only.
        """
        params = bucket.tensors
        saved: list[dict[str, Any]] = [self.opt.state.get(p, {}) for p in params]
        loaded = [of.get(MASTER) is not None for of in saved]
        state.entries = [Entry(known=has_moments(state, of)) for of in saved]
        names = list(state.rule.moment_names) if state.has_moments else []
        names += [MASTER] if state.param.dtype != torch.float32 else []
        for part in state.parts:
            part.tensors = {name: tensor for name, tensor in part.tensors.items() if name in names}
            part.make(names, bucket.device)
            for name in names:  # another optimizer, torch's above all, has saved no master
                weights = [p.data if name == MASTER else None for p in params]
                part.fill(bucket, name, [of.get(name, weight) for of, weight in zip(saved, weights, strict=True)])
        fill(state.steps, [torch.as_tensor(of.get("step", 0.0), dtype=torch.float32).reshape(()) for of in saved])
        state.compare_updates()
        for of in saved:
            for name in self.names if bucket.sharded else (MASTER,):
                of.pop(name, None)
        self.publish(bucket, state, [k for k, entry in enumerate(state.entries) if entry.known])
        self.publish_masters(bucket, state, [k for k, entry in enumerate(state.entries) if entry.known or loaded[k]])

    def publish(self, bucket: Bucket, state: BucketState, which: Sequence[int]) -> None:
        """Makes the flat state of these parameters visible as torch's `state`. Of shards there is none to be seen."""
        params = bucket.tensors
        for name, moment in state.own.moments.items() if not bucket.sharded else ():
            views = bucket.view(moment)
            for k in which:
                self.opt.state[params[k]][name] = views[k]
        for k in which if state.rule.counts_updates else ():
            self.opt.state[params[k]]["step"] = state.steps[k]

    def publish_masters(self, bucket: Bucket, state: BucketState, which: Sequence[int]) -> None:
        """Makes the masters of these parameters visible in `state`: from the first update on, as torch makes state."""
        master = state.own.master
        if master is None or all(state.entries[k].mastered for k in which):
            return
        for k in which:
            state.entries[k].mastered = True
        if not bucket.sharded:
            params, views = bucket.tensors, bucket.view(master)
            for k in which:
                self.opt.state[params[k]][MASTER] = views[k]

    # -- between and in updates -----------------------------------------------------------------------------------

    def make(self, bucket: Bucket, state: BucketState, which: Sequence[int]) -> None:
        """Makes the state of these parameters of the bucket, as of no update."""
        for part in state.parts:
            part.make(state.rule.moment_names, bucket.device)
        self.publish(bucket, state, which)
        for k in which:
            state.entries[k].known = True

    def keep_flat(self) -> None:
        """Copies parameters whose `.data` was replaced since the last step back into the flat buffers.

        Raises RuntimeError where it has another shape, type or device now, ValueError where two share their memory.
        """
        moved: list[tuple[Parameter, Tensor]] = []
        for bucket, state in self.pairs():
            if list(map(Tensor.data_ptr, bucket.tensors)) == state.addresses:
                continue
            start = state.param.data_ptr()
            for k, (index, offset) in enumerate(zip(bucket.layout.params, bucket.layout.offsets, strict=True)):
                p, name = self.engine.params[index], self.engine.names[index]
                if p.data_ptr() != start + state.param.element_size() * offset and p.numel():
                    place = bucket.view(state.param)[k]
                    was, now = (f"{tuple(t.shape)}, {t.dtype} on {t.device}" for t in (place, p))
                    if was != now:
                        raise RuntimeError(
                            f"{name} was {was} and is {now} now: change the model first, then make its optimizer"
                        )
                    moved.append((p, place))
        if moved:
            refuse_overlaps(named_parameters(self.opt.param_groups))
            values = [p.data.clone() for p, _ in moved]  # they may lie in each other's places
            for (p, place), value in zip(moved, values, strict=True):
                place.copy_(value)
                p.data = with_own_storage(place)

    def renew_parameters(self) -> None:
        """Messages under way may still write to the parameters' memory, at any time: takes another one."""
        for bucket, state in self.pairs():
            param = flat_zeros(bucket.body, 1, bucket.device, bucket.layout.dtype, bucket.room)
            state.param = param.copy_(state.param)
            params = bucket.tensors
            for p, view in zip(params, bucket.view(state.param), strict=True):
                p.data = with_own_storage(view)
            state.addresses = [p.data_ptr() for p in params]

    def weights(self) -> list[Tensor]:
        """The masters in place of 16-bit parameters, with the changes that were made to the parameters since."""
        self.keep_flat()
        masters: dict[int, Tensor] = {}
        for bucket, state in self.pairs():
            if (master := state.own.master) is not None:
                take_changed(state.param, master)
                masters.update(zip(bucket.layout.params, bucket.view(master), strict=True))
        return [masters.get(index, p.detach()) for index, p in enumerate(self.engine.params)]

    def weights_changed(self) -> None:
        """The caller has changed what `weights` returned: 16-bit parameters follow."""
        for state in self.states:
            if state.own.master is not None:
                state.param.copy_(state.own.master)


def has_moments(state: BucketState, of: Mapping[str, Any]) -> bool:
    """Whether torch's `state` of a parameter of the bucket has moments."""
    return any(of.get(name) is not None for name in state.rule.moment_names)
