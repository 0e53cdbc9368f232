"""Newton-Schulz iterations agree with float64, with torch.optim.Muon's bits and with the polar factor.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, INTERPRETED, normal, rounded
from torch import Tensor

from kfuse.kernels.orthogonal import orthogonalise

if INTERPRETED:  # its product takes the bits of bf16 for integers
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(builder: InterpreterBuilder, a: tl.tensor, b: tl.tensor, *rest: object) -> object:
        wide = (builder.create_fp_ext(each, tl.float32) if each.dtype == tl.bfloat16 else each for each in (a, b))
        return plain(builder, *wide, *rest)

    InterpreterBuilder.create_dot = create_dot

MUON = (3.4445, -4.775, 2.0315)
EPS = 1e-7
ALLOWED = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
"""Of the largest element, after two steps. Each further one enlarges what a sum rounded otherwise has changed."""

pytestmark = pytest.mark.parametrize("device", DEVICES)


def found(matrices: list[Tensor], dtype: torch.dtype, steps: int = 5) -> list[Tensor]:
    outs = [torch.full_like(matrix, torch.nan, dtype=dtype) for matrix in matrices]
    orthogonalise(matrices, outs, MUON, steps, EPS)
    return outs


def iterated(matrix: Tensor, dtype: torch.dtype, steps: int) -> Tensor:
    """In float64, with each product rounded to the arithmetic's type."""
    a, b, c = MUON
    x = matrix.cpu().to(dtype)
    x = (x / x.norm()).double()
    for _ in range(steps):  # as for a wide matrix: for a tall one the same polynomial of its transpose
        x = x.T if matrix.shape[0] > matrix.shape[1] else x
        gram = rounded((x @ x.T).float(), dtype).double()
        update = rounded((b * gram + c * gram @ gram).float(), dtype).double()
        x = rounded((a * x + update @ x).float(), dtype).double()
        x = x.T if matrix.shape[0] > matrix.shape[1] else x
    return x


# Smaller and larger than tiles of 64 and 128 elements, whole tiles, and more than one of them on either side.
SHAPES = [(1, 7), (40, 40), (130, 200), (300, 150), (128, 256)]


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("shape", SHAPES)
def test_near_float64_and_the_same_bits_alone_and_among_others(
    device: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrices = [normal(shape, seed, device) * 10.0**seed for seed in range(3)]
    matrices[1] = matrices[1].T.contiguous().T  # its elements lie column by column
    outs = found(matrices, dtype, steps=2)
    for matrix, out in zip(matrices, outs, strict=True):
        right = iterated(matrix, dtype, steps=2)
        assert float((out.cpu().double() - right).abs().max() / right.abs().max()) < ALLOWED[dtype]
    assert torch.equal(found(matrices[1:2], dtype, steps=2)[0], outs[1])


def test_singular_vectors_stay_and_values_come_near_one(device: str) -> None:
    """The closed form: U and V of the matrix, with the polynomial of each singular value. Zero stays zero."""
    a, b, c = MUON
    u, v = (torch.linalg.qr(normal((size, 20), size, "cpu").double())[0] for size in (24, 70))
    values = torch.logspace(0, -2, 20, dtype=torch.float64)
    after = values / values.norm()
    for _ in range(5):
        after = a * after + b * after**3 + c * after**5
    assert 0.65 < after.min() < after.max() < 1.25  # so it is near U V^T
    [out, zero] = found([(u * values @ v.T).float().to(device), torch.zeros(24, 70, device=device)], torch.float32)
    torch.testing.assert_close(out.cpu().double(), u * after @ v.T, rtol=0.0, atol=2e-5)
    assert not zero.any()


def test_torch_optim_muons_bits(device: str) -> None:
    """On a CPU, where both call the same products."""
    muon = pytest.importorskip("torch.optim._muon", reason="torch.optim.Muon came with torch 2.9")
    if INTERPRETED or device != "cpu":
        pytest.skip("other products")
    for shape in SHAPES:
        matrix = normal(shape, 5, device)
        theirs = muon._zeropower_via_newtonschulz(matrix, MUON, 5, EPS)
        assert torch.equal(found([matrix], torch.bfloat16)[0], theirs)


def test_what_does_not_fit_is_refused(device: str) -> None:
    matrix = torch.ones(3, 4, device=device)
    for matrices, outs, message in (
        ([matrix[0]], [matrix[0]], r"must be matrices, to fp32 or bf16, got \[4\]"),
        ([matrix], [matrix.half()], r"must be matrices, to fp32 or bf16, got \[3, 4\] to torch.float16"),
        ([matrix, matrix], [matrix, matrix[:2]], r"must be alike, .* got \[3, 4\], torch.float32 to \[2, 4\]"),
        ([matrix.bfloat16()], [matrix], "must be alike, and fp32 at first, .*torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            orthogonalise(matrices, outs, MUON, 5, EPS)
