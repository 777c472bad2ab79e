"""Rotary positions, in one dimension or three.

M-RoPE gives each rotary frequency one of three coordinates (time, height, width). Qwen2-VL and Qwen2.5-VL
divide the frequencies into three runs; Qwen3-VL assigns them alternately. `mrope_axes` writes both layouts as
one index per frequency, so that the code after it is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import Rotary


def mrope_axes(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """Coordinate (0 time, 1 height, 2 width) of each of the sum(sections) frequencies.

    sections: number of frequencies of each coordinate.
    interleaved: Qwen3-VL's layout instead of three runs.

    Raises UnsupportedModel if there are not three sections.
    """
    if len(sections) != 3:
        raise UnsupportedModel(f"mrope_section must have 3 numbers, got {list(sections)}")
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for index in range(axis, sections[axis] * 3, 3):
            axes[index] = axis
    return axes


class RotaryAngles(nn.Module):
    """Cosines and sines of the rotary angles of rows."""

    def __init__(self, config: Rotary) -> None:
        super().__init__()
        self.scaling = config.scaling
        self.inverse: Tensor
        self.axes: Tensor | None
        inverse = torch.tensor(config.inverse, dtype=torch.float32)
        axes = None if config.axes is None else torch.tensor(config.axes)
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cos and sin, (T, 1, rotated numbers) in float32, with values rounded to `dtype`.

        The checkpoints' own code rounds them, so the weights were trained with rounded values.

        positions: (T,) or (3, T).
        """
        if self.axes is not None:
            along = positions[self.axes].transpose(0, 1).float()
        else:
            along = positions[:, None].float()
        angles = along * self.inverse
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.to(dtype).float(), sin.to(dtype).float()
