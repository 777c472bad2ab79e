"""Resampling of learned position tables: which entries each patch interpolates, and with which weights.

This is arithmetic on grids, without weights. Patches come in merge order (`windows.patch_coordinates`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.engine.vision.windows import Index, patch_coordinates

Weights = NDArray[np.float32]
KEYS = -0.75
"""Parameter of the bicubic kernel of Keys, as in torch's and PIL's arithmetic on pictures."""


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A square table of learned positions, and how a grid of another size reads it.

    side: rows, and columns, of the table.
    corners: how table and grid lie on each other. True: the centres of their first and last entries coincide
        (torch's `align_corners`). False: their outer edges coincide.
    cubic: bicubic interpolation of 16 entries per patch; otherwise bilinear of 4. Entries beyond the edge are
        those at the edge.
    """

    side: int
    corners: bool
    cubic: bool = False

    def taps(self, grid: tuple[int, int, int], merge: int) -> tuple[Index, Weights]:
        """Return the entries that each patch of a grid (t, h, w) reads, and their weights.

        Both are (t * h * w, 4 or 16), in merge order. The weights of a patch sum to 1.
        """
        coordinates = patch_coordinates(grid, merge).astype(np.float32)
        if self.corners:
            last = np.array((max(grid[1] - 1, 1), max(grid[2] - 1, 1)), np.float32)
            return self._taps(coordinates * np.float32(self.side - 1) / last)
        size, half = np.array(grid[1:], np.float32), np.float32(0.5)
        return self._taps((coordinates + half) * np.float32(self.side) / size - half)

    def taps_at(self, fractions: Weights) -> tuple[Index, Weights]:
        """Return the entries and weights for patches at any places of a picture.

        fractions: (patches, 2) in [0, 1], as in `realizing.patch_fractions` with this `corners`.
        """
        if self.corners:
            return self._taps(fractions * np.float32(self.side - 1))
        return self._taps(fractions * np.float32(self.side) - np.float32(0.5))

    def _taps(self, positions: Weights) -> tuple[Index, Weights]:
        """positions: (patches, 2), in units of the table's entries."""
        taps, weights = [], []
        offsets = np.arange(-1, 3) if self.cubic else np.arange(2)
        for position in positions.T:
            floor = np.floor(position).astype(np.int64)
            fraction = position - floor.astype(np.float32)
            taps.append(np.clip(floor[:, None] + offsets, 0, self.side - 1))
            weights.append(_cubic(fraction) if self.cubic else np.stack((1 - fraction, fraction), axis=1))
        count = len(offsets) ** 2
        index = (taps[0][:, :, None] * self.side + taps[1][:, None, :]).reshape(-1, count)
        weight = (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, count)
        return index, weight.astype(np.float32)


def _cubic(fraction: Weights) -> Weights:
    """Weights (patches, 4) of the two entries before and the two after a point, by Keys' kernel.

    fraction: (patches,), distance of the point from the entry before it.
    """
    columns = []
    for distance in (fraction + 1, fraction, 1 - fraction, 2 - fraction):
        near = ((KEYS + 2) * distance - (KEYS + 3)) * distance * distance + 1
        far = ((KEYS * distance - 5 * KEYS) * distance + 8 * KEYS) * distance - 4 * KEYS
        columns.append(np.where(distance <= 1, near, far))
    return np.stack(columns, axis=1).astype(np.float32)
