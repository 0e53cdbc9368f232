"""Kernels on flat gradient buckets: Triton on GPUs, a PyTorch reference everywhere else.

Importing this package needs torch alone; Triton is imported when the first GPU tensor arrives.
"""

from kfuse.kernels.dispatch import block_sumsq, pack, reduce, sum_partials
from kfuse.kernels.measure import Measures
from kfuse.kernels.options import AdamOptions, SGDOptions
from kfuse.kernels.table import BLOCK, CHUNK, PackTable, num_blocks
from kfuse.kernels.updates import adamw, lamb, sgd

__all__ = [
    "BLOCK",
    "CHUNK",
    "AdamOptions",
    "Measures",
    "PackTable",
    "SGDOptions",
    "adamw",
    "block_sumsq",
    "lamb",
    "num_blocks",
    "pack",
    "reduce",
    "sgd",
    "sum_partials",
]
