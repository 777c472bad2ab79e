"""Decodes padded to a few batch sizes, so that a step can be replayed as it was recorded: same launches, same memory.

What changes from step to step (ids, places, block tables) are whole numbers, and all of them stand in one buffer, which is
one copy to the device. Rows past the last sequence compute a token of nobody: they read and write a scrap block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.engine.schedule.plan import Work

MOST_ROWS = 256
"""Larger batches are not padded: they keep a device busy while their launches are made."""
Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padding:
    """width: blocks of the longest context. axes: coordinates of a position, 0 for plain ones. shared_rows: of one share, 0
    for kernels that share nothing; least_rows: with fewer there is no share. scrap: the block of padded rows. launched: never
    recorded, even on CUDA."""

    sizes: tuple[int, ...]
    width: int
    axes: int
    shared_rows: int
    least_rows: int
    block_size: int
    scrap: int
    launched: bool = False

    def size(self, work: Sequence[Work]) -> int | None:
        """The batch that takes this step; None: no batch does, it is too large or does more than decode."""
        if not work or len(work) > self.sizes[-1] or not all(item.seq.decoding for item in work):
            return None
        return next(size for size in self.sizes if size >= len(work))

    def batches(self) -> list[tuple[int, bool]]:
        """Rows of every batch, and whether rows of it share prefixes; the largest first."""
        return [
            (rows, shared)
            for rows in reversed(self.sizes)
            for shared in (False, True)
            if not shared or (self.shared_rows and rows >= self.least_rows)
        ]

    def layout(self, rows: int, *, shared: bool) -> Layout:
        axes = (self.axes, rows) if self.axes else (rows,)
        shapes: dict[str, tuple[int, ...]] = {
            "ids": (rows,), "positions": axes, "slots": (rows,), "lengths": (rows,), "tables": (rows, self.width),
        }  # fmt: skip
        if shared:
            count = rows // self.least_rows
            shapes |= {"starts": (rows,), "members": (count, self.shared_rows), "prefixes": (count,)}
        return Layout(shapes)


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrays by name, one after the other in a flat buffer of `total` numbers."""

    shapes: dict[str, tuple[int, ...]]

    @property
    def total(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def parts(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Where each array stands, and its shape."""
        found, at = {}, 0
        for name, shape in self.shapes.items():
            found[name] = (slice(at, at + math.prod(shape)), shape)
            at += math.prod(shape)
        return found

    def arrays(self, buffer: Array) -> dict[str, Array]:
        return {name: buffer[where].reshape(shape) for name, (where, shape) in self.parts().items()}


def padded_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, ...: at most a third of a batch is padding from 16 rows on."""
    found = [1, 2, 4, 8, 16]
    while found[-1] < MOST_ROWS:
        found += [found[-1] * 3 // 2, found[-1] * 2]
    wanted = next((size for size in found if size >= most), MOST_ROWS)
    return tuple(size for size in found if size <= wanted)


def fill(arrays: dict[str, Array], padding: Padding, ids: Array, positions: Array, slots: Array, tables: Array, lengths: Array) -> None:  # fmt: skip
    """A step's numbers, and padding after them. ids (B,), positions (B,) or (axes, B), tables (B, up to width)."""
    count = len(ids)
    for name, values, rest in (
        ("ids", ids, 0),
        ("positions", positions, 0),
        ("slots", slots, padding.scrap * padding.block_size),
        ("lengths", lengths, 1),
    ):
        arrays[name][..., :count] = values
        arrays[name][..., count:] = rest
    arrays["tables"][:count, : tables.shape[1]] = tables
    arrays["tables"][count:, 0] = padding.scrap
