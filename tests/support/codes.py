"""Makers of random codes in the schemes of published formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fovea.kernels.codes import Codes


def numbers(*shape: int, low: float = 0.001, high: float = 0.01) -> Tensor:
    """Random numbers that float16 holds exactly."""
    return (low + (high - low) * torch.rand(*shape)).half().float()


def codes_of(n: int, k: int, bits: int) -> Tensor:
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)


def in_groups(bits: int, group: int, zero: str) -> Callable[[int, int], Codes]:
    """Return a maker of codes with one scale per group. zero: "minimum", "zeros", or a number."""

    def make(n: int, k: int) -> Codes:
        groups = -(-k // group)
        codes = Codes(codes_of(n, k, bits), bits, group, numbers(n, groups))
        if zero == "minimum":
            return replace(codes, minimum=-numbers(n, groups, high=0.1))
        if zero == "zeros":
            return replace(codes, zero=torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8))
        return replace(codes, zero=int(zero))

    return make


def nested(bits: int, group: int, zero: int = 0) -> Callable[[int, int], Codes]:
    """Return a maker of codes whose scales are products, as in GGUF's K formats."""

    def make(n: int, k: int) -> Codes:
        groups, outer = -(-k // group), -(-k // 256)
        scale = torch.randint(1, 64, (n, groups)).float()
        codes = Codes(
            codes_of(n, k, bits), bits, group, scale, zero, outer=numbers(n, outer), outer_groups=256 // group
        )
        if zero:
            return replace(codes, scale=scale - 32)
        minimum = -torch.randint(0, 64, (n, groups)).float()
        return replace(codes, minimum=minimum, outer_minimum=numbers(n, outer))

    return make


def bf16_scales(n: int, k: int) -> Codes:
    codes = in_groups(8, 128, "128")(n, k)
    return replace(codes, scale=codes.scale.to(torch.bfloat16).float())


SCHEMES = {
    "Q4_0": in_groups(4, 32, "8"),
    "Q4_1": in_groups(4, 32, "minimum"),
    "Q5_0": in_groups(5, 32, "16"),
    "Q8_0": in_groups(8, 32, "128"),
    "Q4_K": nested(4, 32),
    "Q5_K": nested(5, 32),
    "Q6_K": nested(6, 16, 32),
    "AWQ": in_groups(4, 128, "zeros"),
    "GPTQ in groups of 64": in_groups(4, 64, "zeros"),
    "one scale per output": in_groups(4, 1 << 20, "8"),
    "int8": bf16_scales,
}
"""Makers of codes (n, k), by the name of a format."""
