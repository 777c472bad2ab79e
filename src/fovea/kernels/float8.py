"""Weights and rows in 8-bit floats, and their products on GPUs from Hopper on.

8-bit floats take half the bytes of bf16, at twice its matrix rate. Every row of a weight has a scale,
computed once. Every row of activations has one, too, computed in each call. A scale maps the largest
magnitude of its row to the largest float8_e4m3fn (448). `multiply` is the twin in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.activation import finish
from fovea.kernels.codes import Format

FP8 = Format("fp8", 0, 0, 8)
"""Its group is 0: a scale belongs to a whole row. Its number is 0: the C++ kernels do not have it."""
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
MIN_SCALE = 1e-12
STEP = 16
"""Both sides of a weight are padded to a multiple of this many numbers, as torch._scaled_mm requires."""


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
