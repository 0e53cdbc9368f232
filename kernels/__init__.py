"""Kernels on flat gradient buckets: Triton on GPUs, PyTorch everywhere else.

Importing this package needs torch alone; Triton is imported when the first GPU tensor arrives.
"""

from kfuse.kernels.reduction import Merges, balanced, block_sumsq, pack, reduce, sum_partials
from kfuse.kernels.table import BLOCK, CHUNK, PackTable, num_blocks
from kfuse.kernels.updates import AdamOptions, SGDOptions, adamw, lamb, lamb_trust, sgd

__all__ = [
    "BLOCK",
    "CHUNK",
    "AdamOptions",
    "Merges",
    "PackTable",
    "SGDOptions",
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
]
