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

from fovea.engine.quantize.schemes import FP8_MAX, Rounded, Scheme, codes_of, fit_groups, round_weight

ALPHAS = tuple(step / 10 for step in range(10))
"""Exponents of the mean magnitudes that AWQ tries."""
TRIED_ROWS, TRIED_RANGES = 1024, 3
"""Rows of a weight, and ranges of a group, with which AWQ tries an exponent."""
SMOOTH_ALPHA = 0.5
"""SmoothQuant's exponent of activations; the rest is that of weights."""
DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it, so that it can be inverted."""
BLOCK = 128
"""Columns whose errors are moved to the later blocks together."""
SWEEPS = 2
"""Times that scales and codes of all columns are improved after they are rounded."""
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
    some = weight[:: -(-len(weight) // TRIED_ROWS)]
    least, best = torch.inf, torch.ones(weight.shape[1])
    for alpha in ALPHAS:
        factors = _centred(mean**alpha)
        change = round_weight(some * factors, scheme, ranges=TRIED_RANGES).values() / factors - some
        error = float(((change @ moments.second) * change).sum())
        if error < least:
            least, best = error, factors
    return best


def round_by_columns(weight: Tensor, moments: Moments, scheme: Scheme) -> Rounded:
    """Round a weight (n, k) float32 to a scheme, for the least change of its outputs.

    Columns with large inputs are rounded first, because the errors of the first have most others to be moved
    to. Scales belong to groups of neighbouring columns all the same, so they are chosen before. Afterwards
    each scale and each code is set to its best value while all others stay, `SWEEPS` times.
    """
    second = moments.second.clone()
    second.diagonal()[second.diagonal() <= 0] = 1.0  # inputs that are always zero
    second.diagonal().add_(DAMPING * second.diagonal().mean())
    grid = _Grid(weight, second.diagonal(), scheme)
    codes = _columns(weight, second, grid)
    if scheme.name != "fp8":
        for _ in range(SWEEPS):
            _sweep(weight, codes, second, grid)
    return grid.rounded(codes)


def _columns(weight: Tensor, second: Tensor, grid: _Grid) -> Tensor:
    """Round one column after the other. Returns the codes (n, k) as floats."""
    n, k = weight.shape
    order = second.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(second[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    left, codes = weight[:, order], torch.empty(n, k)
    numbers = order.tolist()
    for first in range(0, k, BLOCK):
        last = min(k, first + BLOCK)
        errors = torch.zeros(n, last - first)
        for column in range(first, last):
            value = left[:, column]
            code, rounded = grid.nearest(value, numbers[column])
            codes[:, numbers[column]] = code
            error = (value - rounded) / upper[column, column]
            left[:, column:last] -= error[:, None] * upper[column, column:last]
            errors[:, column - first] = error
        left[:, last:] -= errors @ upper[first:last, last:]
    return codes


def _sweep(weight: Tensor, codes: Tensor, second: Tensor, grid: _Grid) -> None:
    """Set each group's scale and each code to its best value while all others stay."""
    pull = (weight - grid.values(codes)) @ second  # half the error's gradient in the values, negated
    k, size = weight.shape[1], grid.size if grid.grouped else BLOCK
    for first in range(0, k, size):
        block = slice(first, min(k, first + size))
        own, before, local = second[block, block], grid.values(codes, block), pull[:, block].clone()
        if grid.grouped:
            local -= grid.rescale(codes[:, block], local, own, first // size) @ own
        for column in range(block.start, block.stop):
            at = column - first
            value = grid.value(codes[:, column], column)
            code, rounded = grid.nearest(value + local[:, at] / own[at, at], column)
            codes[:, column] = code
            local -= (rounded - value)[:, None] * own[at]
        pull -= (grid.values(codes, block) - before) @ second[block]


class _Grid:
    """The values to which a weight can be rounded: scales and zero points of its groups, (n, groups)."""

    def __init__(self, weight: Tensor, importance: Tensor, scheme: Scheme) -> None:
        """importance: (k,), factors of the columns' squared errors."""
        self.scheme, self.grouped = scheme, scheme.group > 0
        n, k = weight.shape
        self.size = scheme.group or k
        if self.grouped:
            shape = -1, scheme.group
            self.scales, self.zeros = fit_groups(weight.view(n, *shape), importance.view(*shape))
        else:
            self.scales, self.zeros = round_weight(weight, scheme).scale.float(), torch.zeros(n, 1)

    def nearest(self, value: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Return the nearest codes to the values (n,) of a column, and the values that they stand for."""
        group = column // self.size
        scale, zero = self.scales[:, group], self.zeros[:, group]
        if self.grouped:
            codes = codes_of(value[:, None], scale, zero)[:, 0]
        elif self.scheme.name == "int8":
            codes = (value / scale).round().clamp(-127, 127)
        else:
            codes = (value / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        return codes, (codes - zero) * scale

    def value(self, codes: Tensor, column: int) -> Tensor:
        """Return the values that the codes (n,) of a column stand for."""
        group = column // self.size
        return (codes - self.zeros[:, group]) * self.scales[:, group]

    def values(self, codes: Tensor, columns: slice = slice(None)) -> Tensor:
        """Return the values that codes (n, k) stand for, in some columns."""
        groups = torch.arange(codes.shape[1])[columns] // self.size
        return (codes[:, columns] - self.zeros[:, groups]) * self.scales[:, groups]

    def rescale(self, codes: Tensor, pull: Tensor, second: Tensor, group: int) -> Tensor:
        """Set the scales of a group to their best values. Returns the change of the values (n, size).

        codes, pull, second: those of the group's columns.
        """
        levels, scale = codes - self.zeros[:, group, None], self.scales[:, group]
        energy = ((levels @ second) * levels).sum(1)
        best = scale + (levels * pull).sum(1) / energy.clamp(min=1e-20)
        best = best.to(torch.bfloat16).float()
        best = torch.where((energy > 0) & (best > 0), best, scale)
        self.scales[:, group] = best
        return levels * (best - scale)[:, None]

    def rounded(self, codes: Tensor) -> Rounded:
        scales = self.scales.to(torch.bfloat16)
        if self.grouped:
            return Rounded(self.scheme, codes.to(torch.uint8), scales, self.zeros.to(torch.uint8))
        kind = torch.int8 if self.scheme.name == "int8" else torch.float8_e4m3fn
        return Rounded(self.scheme, codes.to(kind), scales)


def _centred(factors: Tensor) -> Tensor:
    """Scale factors so that the largest and the smallest are equally far from 1."""
    return factors / (factors.max() * factors.min()).sqrt()
