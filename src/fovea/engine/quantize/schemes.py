"""The schemes to which `fovea quantize` rounds weights, and their tensors in the format compressed-tensors.

int8: a scale for each output; activations are rounded to 8 bits in each call (W8A8).
int8-a16: the same weights; activations are not rounded (W8A16).
int4: a scale and a zero point for each group of inputs of an output; activations are not rounded (W4A16).
int4-a8: the same weights; activations are rounded to 8 bits in each call (W4A8).
fp8: 8-bit floats with a scale for each output; activations are rounded to 8-bit floats in each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.config_files import nearest
from fovea.core.errors import ConfigError

NONE = "none"
GROUPS = (32, 64, 128)
"""Inputs of a group of int4."""
MOST = 15
"""The largest code of int4."""
STEPS, STEP = 10, 0.04
"""int4 tries so many ranges for a group, each smaller than the one before by this share of the whole one."""
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight is rounded.

    name: "int8", "int4" or "fp8".
    group: inputs that share a scale; 0: all inputs of an output do.
    unusual: activations have the other number of bits: 8 instead of 16 for int4, 16 instead of 8 for int8.
    """

    name: str
    group: int = 0
    unusual: bool = False

    @property
    def activations(self) -> int:
        """Bits to which activations are rounded in each call; 16: they are not rounded."""
        return 16 if bool(self.group) != self.unusual else 8

    def __str__(self) -> str:
        suffix = f"-a{self.activations}" if self.unusual else ""
        return f"{self.name}{suffix}:{self.group}" if self.group else f"{self.name}{suffix}"

    def fits(self, k: int) -> bool:
        """Whether weights with k inputs can be rounded: groups must be whole, and words full."""
        if self.group:
            return k % self.group == 0
        return self.format != "pack-quantized" or k % 4 == 0

    def settings(self) -> dict[str, Any]:
        """Return the scheme as compressed-tensors describes it."""
        weights: dict[str, Any] = {
            "num_bits": 4 if self.group else 8,
            "type": "float" if self.name == "fp8" else "int",
            "strategy": "group" if self.group else "channel",
            "symmetric": not self.group,
            "dynamic": False,
        }
        if self.group:
            weights["group_size"] = self.group
        if self.activations == 16:
            return {"weights": weights, "input_activations": None}
        inputs = {
            "num_bits": 8,
            "type": weights["type"],
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        }
        return {"weights": weights, "input_activations": inputs}

    @property
    def format(self) -> str:
        """The name of the layout of its tensors."""
        if self.name == "fp8":
            return "float-quantized"
        return "pack-quantized" if self.group or self.activations == 16 else "int-quantized"

    def nbytes(self, n: int, k: int) -> int:
        """Return the bytes of a rounded weight (n, k) in a file."""
        groups = k // self.group if self.group else 1
        zeros = -(-n // 8) * 4 * groups if self.group else 0
        shape = 16 if self.format == "pack-quantized" else 0
        return (n * k // 2 if self.group else n * k) + 2 * n * groups + zeros + shape


def parse_scheme(text: str, param: str) -> Scheme | None:
    """Return the scheme of a text such as "int4" or "int4:64"; None for "none". Raises ConfigError."""
    name, _, group = text.partition(":")
    known = (NONE, "int8", "int8-a16", "int4", "int4-a8", "fp8")
    if name not in known:
        raise ConfigError(
            f"{param} is {text!r}; {nearest(name, known)}, or int4:N for groups of N", param=param
        )
    base, unusual, _ = name.partition("-a")
    if group and (base != "int4" or group not in map(str, GROUPS)):
        accepted = ", ".join(f"int4:{size}" for size in GROUPS)
        raise ConfigError(f"{param} is {text!r}; accepted groups: {accepted}", param=param)
    if name == NONE:
        return None
    if base == "int4":
        return Scheme(base, int(group or GROUPS[0]), bool(unusual))
    return Scheme(base, 0, bool(unusual))


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight (n, k): value = scale * (number - zero).

    numbers: (n, k) int8, uint8 codes of int4, or float8.
    scale: (n, groups) bfloat16. zero: (n, groups) uint8 for int4, else None.
    """

    scheme: Scheme
    numbers: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors in a file."""
        return sum(tensor.nbytes for tensor in self.tensors("weight").values())

    def values(self) -> Tensor:
        """Return the values, (n, k) float32."""
        n, k = self.numbers.shape
        numbers = self.numbers.float().view(n, self.scale.shape[1], -1)
        if self.zero is not None:
            numbers = numbers - self.zero[..., None].float()
        return (numbers * self.scale.float()[..., None]).view(n, k)

    def rows(self, rows: Tensor) -> Rounded:
        """Return some of the rows."""
        zero = None if self.zero is None else self.zero[rows]
        return Rounded(self.scheme, self.numbers[rows], self.scale[rows], zero)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that stand for the weight `name`, which ends with "weight"."""
        if self.scheme.format != "pack-quantized":
            return {name: self.numbers, f"{name}_scale": self.scale}
        shape = {f"{name}_shape": torch.tensor(self.numbers.shape)}
        if self.zero is None:
            packed = _words(self.numbers.long() + 128, 8)
            return {f"{name}_packed": packed, f"{name}_scale": self.scale} | shape
        return {
            f"{name}_packed": _words(self.numbers, 4),
            f"{name}_scale": self.scale,
            f"{name}_zero_point": _words(self.zero.T.contiguous(), 4).T.contiguous(),
        } | shape


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of so many bits (rows, columns) into int32, the first in the lowest bits."""
    count = 32 // bits
    padded = functional.pad(codes.long(), (0, -codes.shape[1] % count)).view(len(codes), -1, count)
    words = (padded << bits * torch.arange(count)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def round_weight(weight: Tensor, scheme: Scheme, ranges: int = STEPS) -> Rounded:
    """Round a weight (n, k) float32 to the nearest values of a scheme.

    ranges: number of ranges that int4 tries for a group.
    """
    if scheme.group:
        groups = weight.view(len(weight), -1, scheme.group)
        scale, zero = fit_groups(groups, steps=ranges)
        codes = codes_of(groups, scale, zero)
        return Rounded(
            scheme, codes.flatten(1).to(torch.uint8), scale.to(torch.bfloat16), zero.to(torch.uint8)
        )
    most = 127.0 if scheme.name == "int8" else FP8_MAX
    scale = (weight.abs().amax(1, keepdim=True) / most).clamp(min=1e-12).to(torch.bfloat16)
    levels = (weight / scale.float()).clamp(-most, most)
    numbers = levels.round().to(torch.int8) if scheme.name == "int8" else levels.to(torch.float8_e4m3fn)
    return Rounded(scheme, numbers, scale)


def fit_groups(groups: Tensor, importance: Tensor | None = None, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Return scales and zero points (..., groups) of int4, float32, with the least squared error of several
    ranges.

    groups: (..., groups, group).
    importance: a factor of each value's squared error, which can be broadcast to `groups`; None: 1.
    steps: number of ranges.
    """
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    least = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for step in range(steps):
        share = 1 - STEP * step
        scale = _bf16(((high - low) * share / MOST).clamp(min=1e-12))
        zero = (-low * share / scale).round().clamp(0, MOST)
        error = (groups - (codes_of(groups, scale, zero) - zero[..., None]) * scale[..., None]).square()
        total = (error if importance is None else error * importance).sum(-1)
        better = total < least
        least = torch.where(better, total, least)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def codes_of(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the nearest codes of int4, shaped like groups (..., group), as floats."""
    return ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, MOST)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()
