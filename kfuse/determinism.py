"""comm.reproducible=true on a GPU: operations whose bits depend on timing are replaced, or refused.

Attention, in torch's own sources (pytorch/pytorch 00afd8f2, aten/src/ATen/native/transformers/cuda):
- attention_backward.cu, _flash_attention_backward: flash attention's backward takes its deterministic algorithm.
- attention_backward.cu, _efficient_attention_backward: memory-efficient attention's does not split the keys.
- sdp_utils.cpp, check_cudnn_deterministic: cuDNN's attention is passed over.
All three only if torch.use_deterministic_algorithms has not warn_only. Any other operation without a deterministic
algorithm raises an error that names it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch

from kfuse.comm import devices
from kfuse.comm.devices import DeviceError

_LOG = logging.getLogger("kfuse")

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""With one of these in CUBLAS_WORKSPACE_CONFIG cuBLAS's results do not depend on which stream was given which workspace
(NVIDIA, cuBLAS library, section "Results reproducibility")."""


def make_deterministic() -> None:
    """From now on, until the process ends, this process's GPU gives the same bits for the same operations.

    Sets torch's deterministic algorithms, cuDNN's deterministic ones without a search for the fastest, fp32 without
    TF32, cuBLAS's workspace, and torch.compile's deterministic mode. These settings are the whole process's; what the
    user had set is not put back.
    Raises DeviceError where the process has used a GPU before and cuBLAS's workspace was not set.
    """
    given = os.environ.get(_WORKSPACE)
    if given is None and devices.started():
        raise DeviceError(
            f"comm.reproducible=true: {_WORKSPACE} is not set, and this process has used a GPU already: call kf.init "
            f"before, or set {_WORKSPACE}={WORKSPACES[0]} as the process starts"
        )
    if given not in (None, *WORKSPACES):
        raise DeviceError(f"{_WORKSPACE}={given}: must be one of {', '.join(WORKSPACES)} with comm.reproducible=true")
    os.environ.setdefault(_WORKSPACE, WORKSPACES[0])
    torch.use_deterministic_algorithms(True)
    # Else torch fills each new buffer, a pass over memory before the one that writes it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    cudnn: Any = torch.backends.cudnn
    for operation in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
        operation.fp32_precision = "ieee"  # else the user's torch.backends.fp32_precision decides
    # torch.compile must choose no kernel by its time: workers would choose otherwise, with other bits. It pads matrix
    # products where that was measured to be faster, and cuts reductions so, also with deterministic algorithms (torch
    # 2.13, _inductor/fx_passes/pad_mm.py and _inductor/runtime/triton_heuristics.py).
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read as torch._inductor is imported
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.deterministic = True
    _LOG.info("deterministic algorithms on the GPU: %s=%s, no TF32", _WORKSPACE, os.environ[_WORKSPACE])
