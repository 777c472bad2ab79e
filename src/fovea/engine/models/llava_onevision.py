"""LLaVA-OneVision (arXiv 2408.03326): SigLIP tiles, resampled if they have too many patches."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional

from fovea.core.errors import UnsupportedModel
from fovea.engine.models.llava import TiledLlava

RESAMPLE_ABOVE = 1.1
"""A picture is resampled if its side is more than this many times the allowed one."""


class LlavaOnevision(TiledLlava):
    """LLaVA-OneVision. The setting `vision_aspect_ratio`, anyres_max_N, allows the patches of N tiles."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        prefix, _, number = str(config.vision_aspect_ratio).rpartition("_")
        if prefix != "anyres_max" or not number.isdigit():
            raise UnsupportedModel(
                f"vision_aspect_ratio {config.vision_aspect_ratio!r}; accepted: anyres_max_N"
            )
        self.max_tiles = int(number)

    def shrink(self, picture: Tensor) -> Tensor:
        rows, columns = picture.shape[1:]
        ratio = math.sqrt(rows * columns / (self.max_tiles * self.side**2))
        if ratio <= RESAMPLE_ABOVE:
            return picture
        size = [int(rows // ratio), int(columns // ratio)]
        return functional.interpolate(picture[None], size, mode="bilinear")[0]
