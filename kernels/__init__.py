"""Kernels on flat gradient buckets: Triton on GPUs, PyTorch everywhere else.

Importing this package needs torch alone; Triton is imported when the first GPU tensor arrives.
"""

from kfuse.kernels.private_names import NAMES, need
from kfuse.kernels.reduction import (
    BlockSumsqArguments,
    Merges,
    PackArguments,
    SumPartialsArguments,
    balanced,
    block_sumsq,
    pack,
    reduce,
    sum_partials,
)
from kfuse.kernels.table import BLOCK, CHUNK, PackTable, num_blocks
from kfuse.kernels.updates import AdamOptions, AdamWArguments, SGDOptions, adamw, lamb, lamb_trust, sgd, take_changed

need(NAMES)

__all__ = [
    "BLOCK",
    "CHUNK",
    "AdamOptions",
    "AdamWArguments",
    "BlockSumsqArguments",
    "Merges",
    "PackArguments",
    "PackTable",
    "SGDOptions",
    "SumPartialsArguments",
    "adamw",
    "balanced",
    "block_sumsq",
    "lamb",
    "lamb_trust",
    "num_blocks",
    "pack",
    "reduce",
    "sgd",
    "sum_partials",
    "take_changed",
]
