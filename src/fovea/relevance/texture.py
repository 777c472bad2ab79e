"""Computes an image's texture: 13 channels over a grid of cells.

A cell holds the pixels that become one visual token. The channels follow the ARR-COC design, without its
known defects. Every channel is pooled over the area of a cell, so that a thin stroke counts wherever it lies.
Nothing is normalised over a batch, so that an image's texture does not depend on other images. No channel
repeats another. The 13th channel is the range of luminance within a cell, which distinguishes paper with a
stroke on it from blank paper (measured in benchmarks/relevance_texture.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

Map = NDArray[np.floating[Any]]
"""An array of float32. Numpy's functions are typed less precisely, hence the general type."""
Mask = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

CHANNELS: tuple[str, ...] = (
    "red", "green", "blue", "lightness", "green_red", "blue_yellow", "sobel_x", "sobel_y", "sobel", "y", "x",
    "eccentricity", "range",
)  # fmt: skip
SOBEL_LARGEST = 1020.0
"""Largest value of the Sobel filter on bytes: four times 255."""
_TO_XYZ = np.array(
    ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041)),
    np.float32,
)
_WHITE = np.array((0.95047, 1.0, 1.08883), np.float32)


@dataclass(frozen=True, slots=True)
class Texture:
    """Channels of one image, cell by cell.

    channels: (rows, columns, 13) float32, within [0, 1], except Sobel x and y, which have a sign: [-1, 1].
    luma: luminance of the image's pixels, (height, width) bytes.
    cell: side of a cell in pixels.
    """

    channels: Map
    luma: Bytes
    cell: int

    def __getitem__(self, name: str) -> Map:
        """The channel with that name, (rows, columns)."""
        return self.channels[:, :, CHANNELS.index(name)]

    @property
    def grid(self) -> tuple[int, int]:
        return self.channels.shape[0], self.channels.shape[1]


def texture(pixels: Bytes, cell: int) -> Texture:
    """The texture of an image.

    pixels: (height, width, 3) bytes of RGB; height and width are multiples of `cell`, or ValueError is
        raised.
    cell: side of a cell in pixels.
    """
    height, width, _ = pixels.shape
    if height % cell or width % cell or not height or not width:
        raise ValueError(f"an image of {width}x{height} pixels is not made of cells of {cell}")
    picture = PIL.Image.fromarray(pixels)
    colour = np.asarray(picture.reduce(cell), np.float32) / 255
    luma = np.asarray(picture.convert("L"))
    channels = np.empty((height // cell, width // cell, len(CHANNELS)), np.float32)
    channels[:, :, 0:3] = colour
    channels[:, :, 3:6] = lab(colour) / np.array((100, 255, 255), np.float32) + np.array(
        (0, 0.5, 0.5), np.float32
    )
    channels[:, :, 6:9] = _edges(luma, cell)
    channels[:, :, 9:12] = _places(height // cell, width // cell)
    channels[:, :, 12] = _range(luma, cell)
    return Texture(channels, luma, cell)


def lab(rgb: Map) -> Map:
    """Convert sRGB in [0, 1] to CIE L*a*b* under D65, both (..., 3)."""
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = linear.astype(np.float32) @ _TO_XYZ.T / _WHITE
    root = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    x, y, z = np.moveaxis(root, -1, 0)
    return np.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), axis=-1).astype(np.float32)


def _edges(luma: Bytes, cell: int) -> Map:
    """Means of Sobel x, Sobel y and their magnitude in each cell, (rows, columns, 3).

    The unit is SOBEL_LARGEST. Beyond its border the image is continued with the pixels of the border. One row
    of cells is computed at a time, so that its data stay in the processor's cache.
    """
    rows, columns = luma.shape[0] // cell, luma.shape[1] // cell
    wide = np.pad(luma, 1, mode="edge").astype(np.int16)
    line_sums = np.empty((3, rows, columns * cell), np.float32)
    for row in range(rows):
        band = wide[row * cell : (row + 1) * cell + 2]
        step = band[:, 2:] - band[:, :-2]
        across = (step[:-2] + step[2:] + 2 * step[1:-1]).astype(np.float32)
        step = band[2:] - band[:-2]
        down = (step[:, :-2] + step[:, 2:] + 2 * step[:, 1:-1]).astype(np.float32)
        across.sum(0, out=line_sums[0, row])
        down.sum(0, out=line_sums[1, row])
        np.square(across, out=across)
        across += np.square(down, out=down)
        np.sqrt(across, out=across).sum(0, out=line_sums[2, row])
    sums = line_sums.reshape(3, rows, columns, cell).sum(3)
    means: Map = np.moveaxis(sums, 0, -1) / np.float32(cell * cell * SOBEL_LARGEST)
    return means


def _places(rows: int, columns: int) -> Map:
    y, x = ((np.arange(size, dtype=np.float32) + 0.5) / size for size in (rows, columns))
    down, across = np.meshgrid(y, x, indexing="ij")
    away = np.hypot(down - 0.5, across - 0.5) / np.float32(np.hypot(0.5, 0.5))
    return np.stack((down, across, away), axis=-1)


def _range(luma: Bytes, cell: int) -> Map:
    rows, columns = luma.shape[0] // cell, luma.shape[1] // cell
    lines = luma.reshape(rows, cell, -1)
    high = lines.max(1).reshape(rows, columns, cell).max(2)
    low = lines.min(1).reshape(rows, columns, cell).min(2)
    spans: Map = (high - low).astype(np.float32) / 255
    return spans
