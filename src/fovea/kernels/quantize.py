"""Weights and rows in 8 or 4 bits, in plain torch.

`quantize`, `quantize_rows` and `product` are the twins of `native/cpu/quantize.cpp` and `quantized.cpp`. int8
has a scale for each group of 128 values of k within one output or row. int4 has a scale and a minimum for
each group of 32, so its sixteen levels are evenly spaced between two ends that need not be symmetrical. Both
formats round to nearest; nothing is calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.codes import CodedProduct, Codes, Format, join

INT8, INT4 = Format("int8", 1, 128, 8), Format("int4", 2, 32, 4)
FORMATS = {format.name: format for format in (INT8, INT4)}
INT8_ZERO, INT4_MOST = 128, 15
"""The code of int8 that stands for zero, and the largest code of int4."""
STEPS, STEP = 4, 0.04
"""int4 tries so many lower and upper ends of a group, each by this share of its range further inside."""
QUANTIZE_WEIGHTS, QUANTIZE_WEIGHTS_ON_GPU = 1 << 16, 1 << 20
"""Number of weights that are quantized together, through copies in float32.

On a CPU these copies stay below a megabyte: with larger ones the C library kept twice the memory of the
quantized model while it was loaded. On a GPU fewer, larger steps are faster.
"""


def quantize(weight: Tensor, format: Format) -> Codes:
    """Quantize a weight (n, k) of any float type, to INT8 or INT4.

    Scales are rounded, those of int8 to bf16, scales and minima of int4 to float16. Codes are chosen for the
    rounded numbers.
    """
    groups, k = _groups(weight, format.group), weight.shape[1]
    if format.bits == 8:
        scale = (groups.abs().amax(-1) / 127).to(torch.bfloat16).float()
        codes = (_levels(groups, _inverse(scale)).int() + INT8_ZERO).to(torch.uint8)
        return Codes(codes.flatten(1)[:, :k], 8, format.group, scale, INT8_ZERO)
    codes, scale, minimum = _fit(groups)
    return Codes(codes.flatten(1)[:, :k], 4, format.group, scale, minimum=minimum)


@dataclass(frozen=True, slots=True)
class Levels:
    """Quantized rows.

    values: levels, (rows, groups, group) int8.
    scale: (rows, groups) float32.
    """

    values: Tensor
    scale: Tensor


def quantize_rows(x: Tensor, group: int) -> Levels:
    """Quantize rows of x (rows, k) as the C++ products do: to 8 bits, with scales in float32."""
    groups = _groups(x, group)
    most = groups.abs().amax(-1)
    # Not `127 / most`: torch computes that as 127 times the reciprocal, which rounds twice.
    factor = torch.where(most > 1e-30, torch.full_like(most, 127.0) / most, 0.0)
    return Levels(_levels(groups, factor), most / 127)


def product(x: Levels, weight: Codes) -> Tensor:
    """Return the product (rows, n) float32.

    Sums within groups are exact. Groups are added one after the other, with one rounding each, and one more
    for the minimum.

    x: rows with the weight's groups.
    """
    total = torch.zeros(len(x.values), weight.shape[0])
    codes = _groups(weight.codes, weight.group)
    scale, minimum = weight.full_scales()
    for g in range(x.values.shape[1]):
        zero = weight.zero if isinstance(weight.zero, int) else weight.zero[None, :, g].double()
        sums = x.values[:, g].double().sum(1, keepdim=True)
        exact = x.values[:, g].double() @ codes[:, g].double().T - zero * sums
        factor = x.scale[:, g, None] * scale[None, :, g]
        total = (total.double() + exact * factor.double()).float()
        if minimum is not None:
            part = (x.scale[:, g, None] * sums.float()).double() * minimum[None, :, g].double()
            total = (total.double() + part).float()
    return total


def quantized_product(
    weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
) -> CodedProduct:
    """Return a product with `weight` (n, k) of any float type, on any device, quantized to INT8 or INT4."""
    together = QUANTIZE_WEIGHTS if weight.device.type == "cpu" else QUANTIZE_WEIGHTS_ON_GPU
    step = max(1, together // weight.shape[1])
    parts = [quantize(weight[first : first + step], format) for first in range(0, len(weight), step)]
    return CodedProduct([join(parts)], bias, activation, gated)


def _groups(x: Tensor, group: int) -> Tensor:
    rows, k = x.shape
    return functional.pad(x.float(), (0, -k % group)).view(rows, -1, group)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() > 1e-30, 1 / scale, 0.0)


def _levels(groups: Tensor, factor: Tensor) -> Tensor:
    return (groups * factor[..., None]).round().clamp(-127, 127).to(torch.int8)


def _fit(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of groups (rows, groups, group), and their scales and minima, (rows, groups) float32.

    Several ranges inside that of the values are tried. For each, scale and minimum are fitted to the codes by
    least squares, as ggml does for Q4_1. The pair with the least squared error is taken.
    """
    low, high, total = groups.amin(-1), groups.amax(-1), groups.sum(-1)
    count, spread = groups.shape[-1], high - low
    # A group of one value has scale 0. NaN and infinity have to stay visible.
    codes, scale, minimum = torch.zeros_like(groups), torch.zeros_like(low), _half(low + (total - total))
    least = torch.where((spread > 0) & spread.isfinite(), torch.inf, -torch.inf)
    for below in range(STEPS):
        for above in range(STEPS):
            start = low + spread * STEP * below
            width = (high - spread * STEP * above - start) / INT4_MOST
            found = _nearest(groups, width, start)
            sums, squares = found.sum(-1), found.square().sum(-1)
            room = count * squares - sums * sums
            fitted = (count * (found * groups).sum(-1) - sums * total) / room
            width = _half(torch.where(room > 0, fitted, width))
            start = _half(torch.where(room > 0, (total - fitted * sums) / count, start))
            found = _nearest(groups, width, start)
            values = found * width[..., None] + start[..., None]
            error = (groups - values).square().sum(-1)
            better = error < least
            least = torch.where(better, error, least)
            scale, minimum = torch.where(better, width, scale), torch.where(better, start, minimum)
            codes = torch.where(better[..., None], found, codes)
    return codes.to(torch.uint8), scale, minimum


def _nearest(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    whole = ((groups - minimum[..., None]) * _inverse(scale)[..., None]).round()
    return whole.clamp(0, INT4_MOST)


def _half(x: Tensor) -> Tensor:
    return x.half().float()
