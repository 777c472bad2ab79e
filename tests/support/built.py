"""A format of built encoders that needs no compiler."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fovea.engine.vision.built.formats import RunSegment


class Eager:
    """A format that compiles nothing: a file holds a description of its segment, and the eager segment runs.

    scale: factor of all outputs, to make wrong results.
    """

    suffix = ".eager"
    packages = ("torch",)
    shares_weights = True
    scale = 1.0

    def check(self, device: torch.device) -> None:
        """Accept every device."""

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def build(self, segment: nn.Module, x: Tensor, path: Path) -> None:
        path.write_text(f"{segment.shape} {list(x.shape)} {x.dtype}")  # type: ignore[union-attr]

    def load(self, path: Path, segment: nn.Module) -> RunSegment:
        path.read_bytes()
        return lambda x: tuple(output * self.scale for output in segment(x))
