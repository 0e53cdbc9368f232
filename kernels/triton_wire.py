# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""Triton: quantised messages, written and read in registers by the kernels of `triton_reduction`.

The layout and the rounding are those of `kfuse.kernels.wire`.
"""

import triton
import triton.language as tl

from kfuse.kernels import wire as layout
from kfuse.kernels.table import BLOCK as BLOCK_SIZE

GROUP = tl.constexpr(layout.GROUP)
WIRE = tl.constexpr(layout.WIRE)
BLOCK = tl.constexpr(BLOCK_SIZE)
_TINY, _MOST = tl.constexpr(layout.TINY), tl.constexpr(layout.FP32_MAX)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added to a small number it leaves the nearest integer in the last bits
_ROUNDER_BITS, _INFINITY_BITS = tl.constexpr(0x4B400000), tl.constexpr(0x7F800000)


@triton.jit
def value_place(element):
    """Where in a message the byte of an element lies."""
    return element // BLOCK * WIRE + element % BLOCK


@triton.jit
def scale_place(element):
    """Where in a message, in fp32 numbers, the scale of an element's group lies."""
    return element // BLOCK * (WIRE // 4) + BLOCK // 4 + element % BLOCK // GROUP


@triton.jit
def magnitude(values):
    """The bits of |values|, which are in the order of the magnitudes: infinity comes last, and NaN behind it."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits):
    """(scale, 1 / scale) of groups whose largest magnitude has these bits; of tiny ones 0."""
    most = tl.minimum(bits, _INFINITY_BITS).to(tl.float32, bitcast=True)
    is_tiny = most < _TINY
    inverse = tl.div_rn(127.0, tl.where(is_tiny, 1.0, most))
    return tl.where(is_tiny, 0.0, tl.minimum(most * (1 / 127), _MOST)), tl.where(is_tiny, 0.0, inverse)


@triton.jit
def rounded(values, inverse):
    """The nearest integers to values * inverse, of two the even one, int8; 127 for what is not finite."""
    product = values * inverse
    product = tl.where(product == product, product, 127.0)
    return ((product + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS).to(tl.int8)


@triton.jit
def in_groups(values):
    return tl.reshape(values, (values.shape[0] // GROUP, GROUP))
