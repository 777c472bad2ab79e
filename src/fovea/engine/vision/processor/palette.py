"""From byte values to the floats that an encoder was trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.engine.vision.processor.settings import Settings

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Palette:
    """A byte has 256 values, so rescaling and normalising is a table per channel: exact by construction, and one
    pass over the pixels instead of five. The table itself is made by the arithmetic of Hugging Face's processors:
    multiply in float64, round to float32, then subtract and divide in float32.

    key: names the arithmetic. table: float32 (3, 256), from (channel, byte) to value.
    average: `image_mean` as a color in bytes, fractions cut; what LLaVA borders pictures with.
    """

    key: str
    average: tuple[int, int, int]
    table: NDArray[np.float32]

    @classmethod
    def read(
        cls,
        settings: Settings,
        mean: tuple[float, float, float] = CLIP_MEAN,
        std: tuple[float, float, float] = CLIP_STD,
    ) -> Palette:
        """mean, std: the defaults of the processor class. `do_convert_rgb` asks nothing: images arrive as RGB."""
        settings.flag("do_convert_rgb", True)
        factor = settings.number("rescale_factor", 1 / 255)
        mean, std = settings.channels("image_mean", mean), settings.channels("image_std", std)
        if 0.0 in std:
            raise settings.wrong("image_std", std, "numbers other than 0")
        rescale, normalize = settings.flag("do_rescale", True), settings.flag("do_normalize", True)
        levels = np.arange(256, dtype=np.float64)
        table = np.tile((levels * factor if rescale else levels).astype(np.float32), (3, 1))
        if normalize:
            table = (table - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
        key = f"rescale={factor if rescale else None};norm={(mean, std) if normalize else None}"
        return cls(key, (int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)), table)

    def paint(self, planes: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """planes: (n, 3, k) bytes. out: (n, 3, copies, k), filled with the same values for every copy."""
        for channel in range(3):
            # "clip" spares numpy its buffered checking of the indices; no byte is outside the table.
            out[:, channel] = np.take(self.table[channel], planes[:, channel], mode="clip")[:, None]

    def tiles(self, tiles: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Equally sized (height, width, 3) bytes to float32 (tiles, 3, height, width)."""
        out = np.empty((len(tiles), 3, *tiles[0].shape[:2]), np.float32)
        for tile, plane in zip(tiles, out, strict=True):
            for channel in range(3):
                np.take(self.table[channel], tile[:, :, channel], mode="clip", out=plane[channel])
        return out
