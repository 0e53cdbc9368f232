"""The command `kfuse ramp RUN_DIR`: the batch sizes of a run, as a schedule that other programs can follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from kfuse.settings.tree import ConfigError
from kfuse.tools.run_files import config_path, read_config, read_metrics

USAGE = """\
kfuse ramp RUN_DIR [TOKENS_PER_SAMPLE]

Prints the batch sizes that a policy chose in the run recorded in RUN_DIR, smoothed to doublings, as
  - a list of SAMPLES:BATCH_SIZE, which policy=schedule and a loop of your own take (docs/policies.md)
  - the argument of Megatron-LM's --step-batch-size-schedule
  - OLMo-core's BatchSizeSchedulerCallback, in tokens, where TOKENS_PER_SAMPLE is given
and the rule by which the run's learning rate followed.
Exit status 0; 2 for what is no run directory, and for a run that began after its first step."""

_RULES = {
    "none": "the learning rate did not follow the batch size",
    "sqrt": "multiply the learning rate by sqrt(batch size / the first one)",
    "linear": "multiply the learning rate by batch size / the first one",
    "adascale": "AdaScale's gain depends on the gradients; linear is its upper bound",
}

Ramp = list[tuple[int, int]]
"""Pairs (samples used so far, batch size from there on); the first at 0."""


def main(words: Sequence[str]) -> int:
    """Prints the ramp. Returns the exit status. Raises ConfigError for what has none."""
    if not 1 <= len(words) <= 2 or (len(words) == 2 and not (words[1].isdecimal() and int(words[1]) > 0)):
        raise ConfigError(
            "kfuse ramp: must be given a run's directory, and tokens per sample as a whole number or none"
        )
    run_dir = Path(words[0])
    lines = read_metrics(run_dir)
    if lines[0]["step"] != 0:
        raise ConfigError(f"{run_dir}: its first step is {lines[0]['step']}: must be a run from step 0 on")
    known = config_path(run_dir).exists()
    scaling = read_config(run_dir, ("lr.scaling",))["lr"]["scaling"] if known else None
    ramp = ramp_of([(line["samples"], line["batch_size"]) for line in lines])
    text = " ".join(f"{samples}:{size}" for samples, size in ramp)
    print(f'kfuse:        policy=schedule policy.phases="{text}"')
    print(f'Megatron-LM:  --step-batch-size-schedule "{text}"')
    if len(words) == 2:
        tokens = int(words[1])
        sizes = ", ".join(str(size * tokens) for _, size in ramp)
        starts = ", ".join(f"Duration.tokens({samples * tokens})" for samples, _ in ramp)
        print(f"OLMo-core:    BatchSizeSchedulerCallback(batch_sizes=[{sizes}], schedule=[{starts}])")
    if scaling is not None:
        print(f"lr.scaling={scaling}: {_RULES[scaling]}")
    return 0


def ramp_of(steps: Sequence[tuple[int, int]]) -> Ramp:
    """Returns the steps' batch sizes as doublings of the smallest one, each where the nearest by ratio is reached.

    Of each step the smallest batch size from there on counts: one that was only tried, or given up, is left out.

    steps: samples used with the step, and its batch size; at least one.
    """
    kept = [*accumulate((size for _, size in reversed(steps)), min)][::-1]
    begins = [0, *(samples for samples, _ in steps)]
    found: Ramp = [(0, kept[0])]
    for begin, size in zip(begins, kept, strict=False):
        doubled = kept[0] * 2 ** round(math.log2(size / kept[0]))
        if doubled > found[-1][1]:
            found.append((begin, doubled))
    return found
