"""Products of 8-bit floats on Hopper and later: half the bytes of bf16, and twice the rate of its matrix units.

A weight row has a scale of its own, made once; so has every row of activations, in each call. Scales put the largest
magnitude of a row at the end of float8_e4m3fn's range (448), and rounding is to nearest. `multiplied` is the twin in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.errors import ConfigError
from fovea.kernels.activation import finish
from fovea.kernels.quantize import Format

FP8 = Format("fp8", 0, 0, 8)
"""group: a scale is a whole row's. number: C++ does not know it."""
FLOAT8 = torch.float8_e4m3fn
MOST = torch.finfo(FLOAT8).max
LEAST_SCALE = 1e-12
STEP = 16
"""Both sides of a weight are padded to a multiple of this many numbers, as torch._scaled_mm asks."""
HOPPER = (9, 0)


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where there are no such products."""
    found = f"the device is {device}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        if capability >= HOPPER and dtype is torch.bfloat16:
            return
        found += f", the model runs in {str(dtype).removeprefix('torch.')}"
    raise ConfigError(
        f"quantization is 'fp8', which needs CUDA with compute capability 9.0 and bfloat16: {found}; accepted here: none, "
        "int8, int4",
        param="quantization",
    )


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows (n, k) of any float type as float8_e4m3fn (n, k), and the scale of each, (n, 1) float32."""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / MOST).clamp(min=LEAST_SCALE)
    return (wide / scale).clamp(-MOST, MOST).to(FLOAT8), scale


def multiplied(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """x (rows, k), weight (n, k) float8 and their scales (rows, 1), (n, 1): x W^T in float32, rounded to `dtype`."""
    return ((x.float() @ weight.float().T) * x_scale * weight_scale.T).to(dtype)


def multiplied_by_cuda(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same. Sums are in the matrix units' own precision, as is usual for inference."""
    return torch._scaled_mm(
        x, weight.T, scale_a=x_scale, scale_b=weight_scale.T, out_dtype=dtype, use_fast_accum=True
    )


class Fp8Product:
    """On CUDA by its matrix units, elsewhere by the twin."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool) -> None:
        self.n, self.k = weight.shape
        self.values, self.scale = rounded(functional.pad(weight, (0, -self.k % STEP, 0, -self.n % STEP)))
        self.bias, self.activation, self.gated = bias, activation, gated
        self._multiply = multiplied_by_cuda if weight.device.type == "cuda" else multiplied

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows, scale = rounded(functional.pad(x.reshape(-1, self.k), (0, -self.k % STEP)))
        y = self._multiply(rows, scale, self.values, self.scale, x.dtype)[:, : self.n]
        y = y.reshape(*x.shape[:-1], self.n)
        if self.bias is not None:
            y = y + self.bias
        return finish(y, self.activation, self.gated, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, dequantized: (*ids, k) float32."""
        return (self.values[ids].float() * self.scale[ids])[..., : self.k]
