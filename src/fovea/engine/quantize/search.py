"""Chooses scales and codes of weights so that the outputs on calibration data change least.

Everything is decided by the second moments of a linear map's inputs, H = sum of r x x^T over rows x, where r
is the weight of the row's modality. If a weight W (n, k) becomes W + D, the outputs change by tr(D H D^T) in
all.

- `smooth`: factors of the inputs, which the step before divides by (AWQ, arXiv 2306.00978; SmoothQuant,
  arXiv 2211.10438). Rows of images count less or more than text by MBQ's factor (arXiv 2412.19509).
- `round_by_columns`: rounds one column after the other, and moves its error to the columns that are still to
  be rounded (GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.engine.quantize.schemes import Rounded, Scheme, codes_of, fit_groups, round_weight

ALPHAS = tuple(step / 20 for step in range(20))
"""Exponents of the mean magnitudes that AWQ tries."""
SMOOTH_ALPHA = 0.5
"""SmoothQuant's exponent of activations; the rest is that of weights."""
DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it, so that it can be inverted."""
BLOCK = 128
"""Columns whose errors are moved to the later blocks together."""
LEAST = 1e-5


@dataclass
class Moments:
    """Statistics of the inputs (k,) of a linear map.

    second: H, (k, k) float32.
    magnitude: sum of r |x|, (k,). largest: largest |x|, (k,).
    weight: sum of r.
    """

    second: Tensor
    magnitude: Tensor
    largest: Tensor
    weight: float = 0.0

    @classmethod
    def empty(cls, k: int) -> Moments:
        return cls(torch.zeros(k, k), torch.zeros(k), torch.zeros(k))

    def add(self, x: Tensor, importance: Tensor) -> None:
        """Add rows x (rows, k). importance: (rows,), r of each row."""
        x = x.float()
        self.second.addmm_((x * importance[:, None]).T, x)
        self.magnitude += (x.abs() * importance[:, None]).sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.weight += float(importance.sum())

    def divided(self, factors: Tensor) -> Moments:
        """Return the statistics of inputs that are divided by factors (k,)."""
        return Moments(
            self.second / (factors[:, None] * factors),
            self.magnitude / factors,
            self.largest / factors,
            self.weight,
        )


def smooth(weight: Tensor, moments: Moments, scheme: Scheme) -> Tensor:
    """Return factors (k,) by which the inputs are divided, and the weight's columns multiplied.

    weight: (n, k) float32, all maps that read these inputs.
    """
    if scheme.name == "int8":
        largest = weight.abs().amax(0).clamp(min=LEAST)
        factors = moments.largest.clamp(min=LEAST) ** SMOOTH_ALPHA / largest ** (1 - SMOOTH_ALPHA)
        return _centred(factors)
    if scheme.name == "fp8":  # its levels are relative, so factors change little
        return torch.ones(weight.shape[1])
    mean = (moments.magnitude / max(moments.weight, LEAST)).clamp(min=1e-4)
    least, best = torch.inf, torch.ones(weight.shape[1])
    for alpha in ALPHAS:
        factors = _centred(mean**alpha)
        change = round_weight(weight * factors, scheme).values() / factors - weight
        error = float(((change @ moments.second) * change).sum())
        if error < least:
            least, best = error, factors
    return best


def round_by_columns(weight: Tensor, moments: Moments, scheme: Scheme) -> Rounded:
    """Round a weight (n, k) float32 to a scheme, for the least change of its outputs."""
    n, k = weight.shape
    left, second = weight.clone(), moments.second.clone()
    dead = second.diagonal() <= 0  # inputs that are always zero
    second.diagonal()[dead] = 1.0
    second.diagonal().add_(DAMPING * second.diagonal().mean())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(second)), upper=True)
    grouped = scheme.group > 0
    whole = None if grouped else round_weight(weight, scheme)
    size = scheme.group or k
    codes = torch.empty(n, k)
    scales, zeros = torch.empty(n, k // size), torch.zeros(n, k // size)
    if whole is not None:
        scales = whole.scale.float()
    for first in range(0, k, BLOCK):
        last = min(k, first + BLOCK)
        errors = torch.zeros(n, last - first)
        for column in range(first, last):
            group = column // size
            if grouped and column % size == 0:
                some = left[:, column : column + size]
                scales[:, group], zeros[:, group] = fit_groups(some)
            value = left[:, column]
            codes[:, column], rounded = _round_column(value, scales[:, group], zeros[:, group], scheme)
            error = (value - rounded) / upper[column, column]
            left[:, column:last] -= error[:, None] * upper[column, column:last]
            errors[:, column - first] = error
        left[:, last:] -= errors @ upper[first:last, last:]
    if grouped:
        return Rounded(scheme, codes.to(torch.uint8), scales.to(torch.bfloat16), zeros.to(torch.uint8))
    kind = torch.int8 if scheme.name == "int8" else torch.float8_e4m3fn
    return Rounded(scheme, codes.to(kind), scales.to(torch.bfloat16))


def _round_column(value: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the codes of a column (n,) as floats, and the values that they stand for."""
    if scheme.group:
        codes = codes_of(value[:, None], scale, zero)[:, 0]
        return codes, (codes - zero) * scale
    if scheme.name == "int8":
        codes = (value / scale).round().clamp(-127, 127)
    else:
        codes = (value / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return codes, codes * scale


def _centred(factors: Tensor) -> Tensor:
    """Scale factors so that the largest and the smallest are equally far from 1."""
    return factors / (factors.max() * factors.min()).sqrt()
