"""Weights and rows in 8 or 4 bits, in plain torch, and products of 8-bit floats on GPUs.

`quantize` and its product are the twin of `native/cpu/quantize.cpp`, and run where the C++ kernels cannot. A
value is a level times the scale of its group. A group is a run of consecutive values of k within one output
or row. Both formats round to nearest; nothing is calibrated.

8-bit floats (GPUs from Hopper on) take half the bytes of bf16, at twice its matrix rate. Every row of a
weight has a scale, computed once. Every row of activations has one, too, computed in each call. A scale
maps the largest magnitude of its row to the largest float8_e4m3fn (448). `multiply` is the twin in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.errors import ConfigError
from fovea.kernels.activation import finish
from fovea.kernels.codes import Format

INT4_LEVELS = (-127, -99, -77, -61, -46, -33, -21, -10, 0, 13, 24, 37, 50, 65, 83, 107)
"""The levels of int4; one of them is zero.

They minimise the squared error of normally distributed weights whose group is scaled so that its largest
magnitude becomes -127. native/cpu/levels.h has the same levels.
"""
SCALE_CANDIDATES = 12
"""Number of scales that are tried for a group of int4."""
QUANTIZE_WEIGHTS, QUANTIZE_WEIGHTS_ON_GPU = 1 << 16, 1 << 20
"""Number of weights that are quantized together, through copies in float32.

On a CPU these copies stay below a megabyte: with larger ones the C library kept twice the memory of the
quantized model while it was loaded. On a GPU fewer, larger steps are faster.
"""
MULTIPLY_WEIGHTS = 1 << 24
"""Number of weights that are dequantized together for a product."""


INT8, INT4 = Format("int8", 1, 128, 8), Format("int4", 2, 64, 4)
FORMATS = {format.name: format for format in (INT8, INT4)}


@dataclass(frozen=True, slots=True)
class Levels:
    """Quantized rows.

    values: levels, (rows, groups, group) int8.
    scale: (rows, groups) float32.
    k: columns before they were padded with zeros to whole groups.
    """

    values: Tensor
    scale: Tensor
    k: int

    def dequantize(self) -> Tensor:
        """Return the values that the levels stand for, (rows, k) float32."""
        return (self.values * self.scale[..., None]).flatten(1)[:, : self.k]


def quantize(weight: Tensor, format: Format) -> Levels:
    """Quantize a weight (n, k) of any float type.

    Scales are rounded to bf16. Levels are chosen for the rounded scales.
    """
    groups = _groups(weight, format.group)
    if format.bits == 8:
        scale = _bf16(groups.abs().amax(-1) / 127)
        return Levels(_levels(groups, _inverse(scale)), scale, weight.shape[1])
    values, scale = _nearest_levels(groups)
    return Levels(values, scale, weight.shape[1])


def quantize_rows(x: Tensor, group: int) -> Levels:
    """Quantize rows of x (rows, k) as the C++ products do: to 8 bits, with scales in float32."""
    groups = _groups(x, group)
    most = groups.abs().amax(-1)
    # Not `127 / most`: torch computes that as 127 times the reciprocal, which rounds twice.
    factor = torch.where(most > 1e-30, torch.full_like(most, 127.0) / most, 0.0)
    return Levels(_levels(groups, factor), most / 127, x.shape[1])


def product(x: Levels, weight: Levels) -> Tensor:
    """Return the product (rows, n) float32.

    Sums within groups are exact. Groups are added one after the other, with one rounding each.
    """
    total = torch.zeros(len(x.values), len(weight.values))
    for g in range(x.values.shape[1]):
        exact = x.values[:, g].double() @ weight.values[:, g].double().T
        scale = x.scale[:, g, None] * weight.scale[None, :, g]
        total = (total.double() + exact * scale.double()).float()
    return total


class TorchQuantizedProduct:
    """A product on any device and in any float type. Every call dequantizes the weight, some rows at a time.

    This saves memory, not time. Rows of x are not quantized.

    values: levels (n, groups, group) int8, or codes of int4, two per byte: (n, groups, group / 2) uint8.
    scale: (n, groups) bfloat16.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> None:
        rows, self.k = weight.shape
        groups, device = -(-self.k // format.group), weight.device
        width = format.group * format.bits // 8
        kind = torch.int8 if format.bits == 8 else torch.uint8
        self.values = torch.empty(rows, groups, width, dtype=kind, device=device)
        self.scale = torch.empty(rows, groups, dtype=torch.bfloat16, device=device)
        together = QUANTIZE_WEIGHTS if device.type == "cpu" else QUANTIZE_WEIGHTS_ON_GPU
        step = max(1, together // self.k)
        for first in range(0, rows, step):
            levels = quantize(weight[first : first + step], format)
            self.values[first : first + step] = (
                levels.values if format.bits == 8 else _pack_codes(levels.values)
            )
            self.scale[first : first + step] = levels.scale
        self.table = torch.tensor(INT4_LEVELS, dtype=torch.int8, device=device) if format.bits == 4 else None
        self.bias, self.activation, self.gated = bias, activation, gated

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        step = max(1, MULTIPLY_WEIGHTS // self.k)
        parts = [
            functional.linear(x, self._weight(slice(first, first + step), x.dtype))
            for first in range(0, len(self.values), step)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.bias is not None:
            y = y + self.bias
        return finish(y, self.activation, self.gated, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, dequantized: (*ids, k) float32."""
        return self._weight(ids.flatten(), torch.float32).view(*ids.shape, self.k)

    def _weight(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        values = self.values[rows]
        if self.table is not None:
            values = self.table[torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).int()]
        return (values * self.scale[rows].float()[..., None]).flatten(1)[:, : self.k].to(dtype)


def _pack_codes(levels: Tensor) -> Tensor:
    """Return the codes of int4 levels, two in a byte, the first in the low half."""
    codes = torch.bucketize(levels, torch.tensor(INT4_LEVELS, dtype=torch.int8, device=levels.device))
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def _groups(x: Tensor, group: int) -> Tensor:
    rows, k = x.shape
    return functional.pad(x.float(), (0, -k % group)).view(rows, -1, group)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() > 1e-30, 1 / scale, 0.0)


def _levels(groups: Tensor, factor: Tensor) -> Tensor:
    return (groups * factor[..., None]).round().clamp(-127, 127).to(torch.int8)


def _nearest_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int4 levels of groups (rows, groups, group), and their scales.

    For each group, several scales around the one that fits its largest magnitude are tried. The scale with
    the least squared error is taken.
    """
    table = torch.tensor(INT4_LEVELS, dtype=torch.int8, device=groups.device)
    whole_numbers = torch.arange(-128, 128, device=groups.device)
    nearest = table[(whole_numbers[:, None] - table[None].int()).abs().argmin(1)]
    top = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    values = torch.zeros_like(groups, dtype=torch.int8)
    scale, least = _bf16(top / -127), torch.full_like(top, torch.inf)
    for step in range(SCALE_CANDIDATES):
        candidate = _bf16(top / -127 * (0.8125 + 0.03125 * step))
        levels = nearest[_levels(groups, _inverse(candidate)).int() + 128]
        error = (groups - levels * candidate[..., None]).square().sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, candidate, scale)
        values = torch.where(better[..., None], levels, values)
    return values, scale


FP8 = Format("fp8", 0, 0, 8)
"""Its group is 0: a scale belongs to a whole row. Its number is 0: the C++ kernels do not have it."""
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
MIN_SCALE = 1e-12
STEP = 16
"""Both sides of a weight are padded to a multiple of this many numbers, as torch._scaled_mm requires."""
HOPPER = (9, 0)
"""Compute capability of the first GPUs with such products."""


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the device or the type has no such products."""
    obstacle = f"the device is {device}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        obstacle = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        if capability >= HOPPER and dtype is torch.bfloat16:
            return
        obstacle += f", the model runs in {str(dtype).removeprefix('torch.')}"
    raise ConfigError(
        f"quantization is 'fp8', which needs CUDA with compute capability 9.0 and bfloat16, but {obstacle}; "
        "accepted here: none, int8, int4",
        param="quantization",
    )


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows (n, k) of any float type to float8_e4m3fn. Return them and their scales, (n, 1) float32."""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FLOAT8_MAX).clamp(min=MIN_SCALE)
    return (wide / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scale


def round_padded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pad rows (n, k) with zeros to a multiple of STEP, and round them, see `round_rows`."""
    return round_rows(functional.pad(rows, (0, -rows.shape[1] % STEP)))


def multiply(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x W^T + bias, (rows, n), computed in float32 and rounded to `dtype`.

    x, weight: (rows, k) and (n, k) float8.
    x_scale, weight_scale: (rows, 1) and (n, 1) float32.
    """
    y = (x.float() @ weight.float().T) * x_scale * weight_scale.T
    return (y if bias is None else y + bias.float()).to(dtype)


def multiply_on_cuda(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do the work of `multiply` with torch._scaled_mm.

    Sums have the precision of the matrix units, as is usual for inference. The bias is added apart: with one,
    cuBLAS on an H100 had no product of 96 outputs and 18,944 inputs.
    """
    y: Tensor = torch._scaled_mm(
        x, weight.T, scale_a=x_scale, scale_b=weight_scale.T, out_dtype=dtype, use_fast_accum=True
    )
    return y if bias is None else y + bias


class Fp8Product:
    """A product with a weight in 8-bit floats: on CUDA by its matrix units, elsewhere by the twin.

    n, k: shape of the weight before padding.
    values, scale: the weight padded to multiples of STEP, float8, and the scale of each row, (rows, 1)
        float32.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool,
        round_input: Callable[[Tensor], tuple[Tensor, Tensor]] = round_padded,
        finish: Callable[[Tensor, str | None, bool, Tensor | None], Tensor] = finish,
    ) -> None:  # fmt: skip
        """round_input: rounds rows like `round_padded`. finish: does the work of `activation.finish`."""
        self.n, self.k = weight.shape
        self.values, self.scale = round_rows(functional.pad(weight, (0, -self.k % STEP, 0, -self.n % STEP)))
        self.bias = None if bias is None else functional.pad(bias, (0, -self.n % STEP))
        self.activation, self.gated = activation, gated
        self._round_input, self._finish = round_input, finish
        self._multiply = multiply_on_cuda if weight.device.type == "cuda" else multiply

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows, scale = self._round_input(x.reshape(-1, self.k))
        y = self._multiply(rows, scale, self.values, self.scale, x.dtype, self.bias)[:, : self.n]
        y = y.reshape(*x.shape[:-1], self.n)
        return self._finish(y, self.activation, self.gated, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, dequantized: (*ids, k) float32."""
        return (self.values[ids].float() * self.scale[ids])[..., : self.k]
