"""Kernels on flat gradient buckets: Triton on GPUs, PyTorch everywhere else.

Importing this package needs torch alone; Triton is imported when the first GPU tensor arrives.
"""

from kfuse.kernels.private_names import NAMES, need
from kfuse.kernels.reduction import BlockSumsqArguments as BlockSumsqArguments
from kfuse.kernels.reduction import Merges as Merges
from kfuse.kernels.reduction import PackArguments as PackArguments
from kfuse.kernels.reduction import SumPartialsArguments as SumPartialsArguments
from kfuse.kernels.reduction import balanced as balanced
from kfuse.kernels.reduction import block_sumsq as block_sumsq
from kfuse.kernels.reduction import pack as pack
from kfuse.kernels.reduction import reduce as reduce
from kfuse.kernels.reduction import sum_partials as sum_partials
from kfuse.kernels.table import BLOCK as BLOCK
from kfuse.kernels.table import CHUNK as CHUNK
from kfuse.kernels.table import PackTable as PackTable
from kfuse.kernels.table import num_blocks as num_blocks
from kfuse.kernels.updates import AdamOptions as AdamOptions
from kfuse.kernels.updates import AdamWArguments as AdamWArguments
from kfuse.kernels.updates import SGDOptions as SGDOptions
from kfuse.kernels.updates import adamw as adamw
from kfuse.kernels.updates import lamb as lamb
from kfuse.kernels.updates import lamb_trust as lamb_trust
from kfuse.kernels.updates import sgd as sgd
from kfuse.kernels.updates import take_changed as take_changed

need(NAMES)
