"""Normalisation: turns byte values into the floats that an encoder was trained on."""

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
    """Rescaling and normalisation of pixels, as a table per channel.

    A byte has 256 values, so a table is exact, and takes one pass over the pixels instead of five. The table
    is computed with the arithmetic of Hugging Face's processors: multiply in float64, round to float32, then
    subtract and divide in float32.

    key: names the arithmetic, for cache keys.
    average: `image_mean` as a color in bytes, fractions cut off. LLaVA's borders have this color.
    table: float32 (3, 256), maps (channel, byte) to a value.
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
        *,
        normalizes: bool = True,
    ) -> Palette:
        """Read the normalisation from a checkpoint's settings. Raises CheckpointError.

        `do_convert_rgb` has no effect, because images are RGB already.

        mean, std, normalizes: defaults of the processor class; the last is that of `do_normalize`.
        """
        settings.flag("do_convert_rgb", True)
        factor = settings.number("rescale_factor", 1 / 255)
        mean, std = settings.channels("image_mean", mean), settings.channels("image_std", std)
        if 0.0 in std:
            raise settings.error("image_std", std, "numbers other than 0")
        rescale, normalize = settings.flag("do_rescale", True), settings.flag("do_normalize", normalizes)
        levels = np.arange(256, dtype=np.float64)
        table = np.tile((levels * factor if rescale else levels).astype(np.float32), (3, 1))
        if normalize:
            table = (table - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
        key = f"rescale={factor if rescale else None};norm={(mean, std) if normalize else None}"
        return cls(key, (int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)), table)

    def paint(self, planes: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Normalise planes of bytes into `out`.

        planes: bytes (n, 3, k).
        out: float32 (n, 3, copies, k); every copy gets the same values.
        """
        for channel in range(3):
            # "clip" avoids numpy's check of the indices, which needs a buffer. No byte is outside the table.
            out[:, channel] = np.take(self.table[channel], planes[:, channel], mode="clip")[:, None]

    def tiles(self, tiles: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Normalise equal tiles: bytes (height, width, 3) each to float32 (tiles, 3, height, width)."""
        out = np.empty((len(tiles), 3, *tiles[0].shape[:2]), np.float32)
        for tile, plane in zip(tiles, out, strict=True):
            for channel in range(3):
                np.take(self.table[channel], tile[:, :, channel], mode="clip", out=plane[channel])
        return out
