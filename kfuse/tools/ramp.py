"""The command `kfuse ramp RUN_DIR`: the batch sizes of a run, as a schedule that other programs can follow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from kfuse.settings.tree import ConfigError
from kfuse.tools.run_files import config_path, read_config, read_metrics

USAGE = """\
kfuse ramp RUN_DIR [TOKENS_PER_SAMPLE]

Prints the batch sizes that a policy chose in the run recorded in RUN_DIR, without changes by less than a quarter:
  - a list of SAMPLES:BATCH_SIZE, which policy=schedule and a loop of your own take (docs/adapt.md)
and, where TOKENS_PER_SAMPLE is given,
  - the argument of Megatron-LM's --step-batch-size-schedule, which counts tokens where it has a --seq-length
  - OLMo-core's BatchSizeSchedulerCallback, which multiplies the learning rate by the square root itself
and the rule by which the run's learning rate followed, where the run has recorded its configuration.
Exit status 0; 2 for what is no run directory, and for a run that began after its first step."""

_RULES = {
    "none": "the learning rate did not follow the batch size",
    "sqrt": "the learning rate was multiplied by sqrt(k), and Adam's betas were beta^k, k = batch size / {first}",
    "linear": "the learning rate was multiplied by batch size / {first}",
    "adascale": "AdaScale's gain depends on the gradients; linear is its upper bound",
}

Ramp = list[tuple[int, int]]
"""Pairs (samples used so far, batch size from there on); the first at 0."""


def main(words: Sequence[str]) -> int:
    """Prints the ramp. Returns the exit status. Raises ConfigError for what has none."""
    if not 1 <= len(words) <= 2 or (len(words) == 2 and not re.fullmatch("[1-9][0-9]{0,11}", words[1])):
        raise ConfigError(
            "kfuse ramp: must be given a run's directory, and tokens per sample as a whole number above 0 or none"
        )
    run_dir = Path(words[0])
    lines = [*read_metrics(run_dir)]
    if lines[0]["step"] != 0:
        raise ConfigError(f"{run_dir}: its first step is {lines[0]['step']}: must be a run from step 0 on")
    known = config_path(run_dir).exists()
    scaling = read_config(run_dir, ("lr.scaling",))["lr"]["scaling"] if known else None
    ramp = ramp_of([(line["samples"], line["batch_size"]) for line in lines])
    text = " ".join(f"{samples}:{size}" for samples, size in ramp)
    print(f'kfuse:        policy=schedule policy.phases="{text}"')
    if len(words) == 2:
        tokens = int(words[1])
        in_tokens = " ".join(f"{samples * tokens}:{size}" for samples, size in ramp)
        print(f'Megatron-LM:  --step-batch-size-schedule "{in_tokens}"')
        sizes = ", ".join(str(size * tokens) for _, size in ramp)
        starts = ", ".join(f"Duration.tokens({samples * tokens})" for samples, _ in ramp)
        print(f"OLMo-core:    BatchSizeSchedulerCallback(batch_sizes=[{sizes}], schedule=[{starts}])")
    if scaling is not None:
        rule = _RULES[scaling].format(first=lines[0]["batch_size"])
        print(f"lr.scaling={scaling}: {rule}, beside warm-up, decay and a policy's lr_scale (metrics.jsonl: lr)")
    return 0


def ramp_of(steps: Sequence[tuple[int, int]]) -> Ramp:
    """Returns the batch sizes of a run, without changes by less than a quarter.

    A step counts with the smallest batch size from it to the end, so that sizes which were only tried, or given up, are
    left out.

    steps: samples used with the step, and its batch size; at least one.
    """
    kept = [*accumulate((size for _, size in reversed(steps)), min)][::-1]
    found: Ramp = [(0, kept[0])]
    for begin, size in zip([0, *(samples for samples, _ in steps)], kept, strict=False):
        if size >= 1.25 * found[-1][1]:
            found.append((begin, size))
    return found
