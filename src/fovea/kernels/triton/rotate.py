"""Rotary embedding in place, for the towers of encoders on a GPU: one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fovea.kernels.triton.rows import next_power


@triton.jit
def _rotate(x, cos, sin, count, stride, dim, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate the first `count` heads of one row. Each number is read and written by one thread."""
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < count) & (at < half)
    place = row * stride + head * dim + at
    angle = row * 2 * half + at
    first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
    near = first * tl.load(cos + angle, mask=at < half) - second * tl.load(sin + angle, mask=at < half)
    far = second * tl.load(cos + angle + half, mask=at < half) + first * tl.load(
        sin + angle + half, mask=at < half
    )
    tl.store(x + place, near.to(x.dtype.element_ty), mask=inside)
    tl.store(x + place + half, far.to(x.dtype.element_ty), mask=inside)


def rotate(x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Do the work of `kernels.base.Kernels.rotate`. The heads of a row of x are contiguous."""
    rows, _, dim = x.shape
    half = cos.shape[2] // 2
    sizes = {"HEADS": next_power(count), "HALF": next_power(half)}
    _rotate[(rows,)](x, cos, sin, count, x.stride(0), dim, half, **sizes)
    return x
