"""Batches of decodes: padded to a few sizes for CUDA graphs, and rows that share a prefix.

A replay repeats the recorded launches on the same memory. The inputs that change from step to step (ids,
positions, block tables) are integers. All of them are in one buffer, so one copy brings them to the device.
Rows after the last sequence are padding: they compute a token that is not used, and they read and write a
scrap block.

Rows whose block tables hold the same block at the same place share all tokens before it, because a full block
has one content. One read of these blocks serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 256
"""Larger batches are not padded: they keep the device busy for longer than their launches take."""
Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padding:
    """The batch sizes to which decodes are padded, and the shapes of their inputs.

    sizes: batch sizes, ascending.
    width: blocks of the longest context, the width of the block table.
    axes: coordinates of a position (M-RoPE); 0 for plain positions.
    shared_rows: most rows of one group; 0 for kernels that cannot share prefixes.
    least_rows: fewest rows of one group.
    block_size: tokens per block.
    scrap: number of the block that padded rows read and write.
    launch_only: never record graphs, even on CUDA.
    """

    sizes: tuple[int, ...]
    width: int
    axes: int
    shared_rows: int
    least_rows: int
    block_size: int
    scrap: int
    launch_only: bool = False

    def fit(self, blocks: int, context: int) -> Padding:
        """Return the same padding for a pool and a longest context.

        blocks: of the pool. The block after them takes the KV of padded rows.
        """
        return replace(self, scrap=blocks, width=-(-context // self.block_size))

    def size(self, rows: int) -> int | None:
        """The batch size for a step that decodes so many rows; None if there are too many."""
        return next((size for size in self.sizes if size >= rows), None)

    def batches(self) -> list[tuple[int, bool]]:
        """Every batch as (rows, whether rows share prefixes), the largest first."""
        return [
            (rows, shared)
            for rows in reversed(self.sizes)
            for shared in (False, True)
            if not shared or (self.shared_rows and rows >= self.least_rows)
        ]

    def layout(self, rows: int, *, shared: bool) -> Layout:
        axes = (self.axes, rows) if self.axes else (rows,)
        shapes: dict[str, tuple[int, ...]] = {
            "ids": (rows,),
            "positions": axes,
            "slots": (rows,),
            "lengths": (rows,),
            "tables": (rows, self.width),
        }
        if shared:
            count = rows // self.least_rows
            shapes |= {"starts": (rows,), "members": (count, self.shared_rows), "prefixes": (count,)}
        return Layout(shapes)


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes of arrays that lie one after the other in a flat buffer of `total` numbers.

    shapes: shape of each array by its name, in the order of the buffer.
    """

    shapes: dict[str, tuple[int, ...]]

    @property
    def total(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def parts(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """The slice of the buffer and the shape of each array, by name."""
        parts, at = {}, 0
        for name, shape in self.shapes.items():
            parts[name] = (slice(at, at + math.prod(shape)), shape)
            at += math.prod(shape)
        return parts

    def arrays(self, buffer: Array) -> dict[str, Array]:
        return {name: buffer[where].reshape(shape) for name, (where, shape) in self.parts().items()}


def padded_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes for at most `most` rows: 1, 2, 4, 8, 16, 24, 32, 48, 64, ...

    The largest one holds `most` rows, or is MOST_ROWS. From 16 rows on, at most a third of a batch is
    padding.
    """
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < MOST_ROWS:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    largest = next((size for size in sizes if size >= most), MOST_ROWS)
    return tuple(size for size in sizes if size <= largest)


def fill(
    arrays: dict[str, Array],
    padding: Padding,
    ids: Array,
    positions: Array,
    slots: Array,
    tables: Array,
    lengths: Array,
) -> None:
    """Write a step's numbers into the arrays, and padding after them.

    ids: (B,) token ids.
    positions: (B,), or (axes, B).
    slots: (B,) slots that the tokens' KV is written to.
    tables: (B, up to width) block tables.
    lengths: (B,) context lengths in tokens.
    """
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


LEAST_TOKENS = 256
"""Fewest tokens that the rows of a group have in common."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows of a step whose block tables begin with the same blocks.

    rows: the rows, ascending.
    blocks: number of common blocks.
    """

    rows: tuple[int, ...]
    blocks: int


def find_prefix_groups(
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    block_size: int,
    most_rows: int,
    *,
    least_rows: int,
    least_tokens: int = LEAST_TOKENS,
) -> list[PrefixGroup]:
    """Group the rows whose contexts begin with the same full blocks; at most B // least_rows groups.

    tables: (B, W) block tables.
    lengths: (B,) tokens of each context. Blocks that a row has not filled are never shared.
    block_size: tokens per block.
    most_rows: most rows of one group; more rows become several of them.
    least_rows: fewest rows of one group.
    least_tokens: fewest tokens that the rows of a group have in common.
    """
    first = -(-least_tokens // block_size) - 1
    if most_rows < least_rows or len(tables) < least_rows or tables.shape[1] <= first:
        return []
    full = lengths // block_size
    candidates: dict[int, list[int]] = {}
    for row in np.nonzero(full > first)[0].tolist():
        candidates.setdefault(int(tables[row, first]), []).append(row)
    groups = []
    for candidate in candidates.values():
        for begin in range(0, len(candidate), most_rows):
            rows = candidate[begin : begin + most_rows]
            if len(rows) >= least_rows:
                groups.append(PrefixGroup(tuple(rows), _common(tables[rows], int(full[rows].min()))))
    return groups


def write_prefix_groups(
    groups: Sequence[PrefixGroup],
    block_size: int,
    starts: NDArray[np.int64],
    members: NDArray[np.int64],
    prefixes: NDArray[np.int64],
) -> None:
    """Write the groups into arrays for the kernels. Unused entries are padding: 0 tokens, and -1 for rows.

    starts: (B,) gets for each row the number of tokens that its group reads together.
    members: (G, R) gets the rows of each group.
    prefixes: (G,) gets the number of tokens of each group.
    """
    starts[:] = prefixes[:] = 0
    members[:] = -1
    for number, group in enumerate(groups):
        members[number, : len(group.rows)] = group.rows
        starts[list(group.rows)] = prefixes[number] = group.blocks * block_size


def _common(tables: NDArray[np.int64], most: int) -> int:
    equal = (tables[:, :most] == tables[0, :most]).all(0)
    return most if equal.all() else int(equal.argmin())
