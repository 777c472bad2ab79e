"""Rotary positions, in one dimension or three.

M-RoPE gives each rotary frequency one of three coordinates (time, height, width). Qwen2-VL and Qwen2.5-VL cut the
frequencies into three runs, Qwen3-VL deals them out in turn; `mrope_axes` writes either layout as one index per
frequency, and the rest is the same rule for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fovea.core.errors import UnsupportedModel


def mrope_axes(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """Which coordinate (0 time, 1 height, 2 width) each of the sum(sections) frequencies follows."""
    if len(sections) != 3:
        raise UnsupportedModel(f"mrope_section must have 3 numbers, got {list(sections)}")
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for index in range(axis, sections[axis] * 3, 3):
            axes[index] = axis
    return axes


class Rotary(nn.Module):
    """cos and sin of every row's angles. `axes` is None for one-dimensional positions."""

    def __init__(self, inverse: Tensor, scaling: float, axes: Sequence[int] | None) -> None:
        super().__init__()
        self.scaling = scaling
        self.inverse: Tensor
        self.axes: Tensor | None
        self.register_buffer("inverse", inverse.float(), persistent=False)
        self.register_buffer("axes", None if axes is None else torch.tensor(axes), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (T,) or (3, T); returns cos, sin (T, 1, head_dim) in float32, their values rounded to `dtype`.

        Rounded because the checkpoints' own code does so: their weights have seen no other angles.
        """
        if self.axes is not None:
            along = positions[self.axes].transpose(0, 1).float()
        else:
            along = positions[:, None].float()
        angles = along * self.inverse
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.to(dtype).float(), sin.to(dtype).float()
