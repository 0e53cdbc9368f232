"""What all Triton launches share."""

import torch

WARP_SIZE = 64 if torch.version.hip else 32


def options(threads: int, warp_size: int = WARP_SIZE, registers: int = 128) -> dict[str, int | bool]:
    """Compiler options for `threads` threads a program, of `registers` each.

    Nothing is autotuned: another shape would add in another order. Multiplications and additions are not fused, so that
    each is rounded as the source says, and as the PyTorch reference rounds it. (ptxas 12.9, which Triton 3.6 uses for
    Blackwell, fuses packed pairs all the same: there, accumulating bf16 gradients with a scale can differ in a bit, and
    so can a sum of squares between `reduce` and `block_sumsq`.)
    """
    shape: dict[str, int | bool] = {"num_warps": threads // warp_size, "enable_fp_fusion": False}
    if warp_size == 32:
        # Without a limit of its own, ptxas for sm_100 would rather spill a register than lose occupancy.
        shape["maxnreg"] = registers
    return shape
