"""Cuts the contexts of decodes into pieces of about equal size, which a GPU computes side by side.

A piece is a run of tokens of one row's context, or of the prefix that the rows of a group share. Each piece
gives a result, and the results of a row are merged. How a context is cut depends on its own length alone, so
sums are added in the same order whichever rows are in the batch. There is one exception: if the pieces
of a step have more results than there is room for, all pieces become longer.

The arrays have fixed sizes, and the numbers in them say how much of them is used. So launches have the same
shape in every step, and a CUDA graph can replay them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
MOST_RESULTS = 8192
"""Room for results in a step, in which those of 128 contexts of any length fit if each has 64 pieces."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How contexts are cut.

    tile: tokens that a program reads at once. Pieces are whole tiles, except for the end of a context.
    least: fewest tokens of a piece, if its context has so many.
    most: most pieces of a context.
    """

    tile: int
    least: int
    most: int

    def most_pieces(self, longest: int) -> int:
        """Return the most pieces of a context of at most `longest` tokens."""
        return min(self.most, -(-longest // self.least))

    def room(self, rows: int, longest: int, *, shared: bool = False) -> int:
        """Return the number of results for which a batch of so many rows has room.

        longest: tokens of the longest context.
        shared: rows may also read a prefix with others, which is cut like a context.
        """
        return min(rows * self.most_pieces(longest) * (1 + shared), max(MOST_RESULTS, 4 * rows))

    def shapes(self, rows: int, longest: int, groups: int, least_rows: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays that `Cut.write` fills, by name, see `attention.Pieces`.

        rows, longest: see `room`.
        groups: number of prefix groups at most. least_rows: fewest rows of one.
        """
        room, most = self.room(rows, longest, shared=groups > 0), self.most_pieces(longest)
        shapes: dict[str, tuple[int, ...]] = {
            "counts": (2,), "bounds": (rows + 1,), "own": (min(room, rows * most), 4)
        }  # fmt: skip
        return shapes | ({"together": (min(room // least_rows, groups * most), 4)} if groups else {})

    def divide(self, tokens: Array, factor: int) -> tuple[Array, Array]:
        """Return for contexts of so many tokens the number of pieces, and tokens of each but the last.

        factor: factor of the least size of a piece; 1, unless room is short.
        """
        tiles = -(-tokens // self.tile)
        size = np.maximum(self.least // self.tile, -(-tiles // self.most)) * factor
        even = np.maximum(-(-tiles // np.maximum(-(-tiles // size), 1)), 1)
        return -(-tiles // even), even * self.tile


@dataclass(frozen=True, slots=True)
class Cut:
    """The pieces of a step, see `attention.Pieces`. together: (0, 4) without prefix groups."""

    bounds: Array
    own: Array
    together: Array

    @property
    def results(self) -> int:
        return int(self.bounds[-1])

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, each as long as what it holds."""
        counts = np.array([len(self.own), len(self.together)])
        found = {"counts": counts, "bounds": self.bounds, "own": self.own}
        return found | ({"together": self.together} if len(self.together) else {})

    def write(self, arrays: dict[str, Array]) -> None:
        """Write the pieces into arrays of the shapes that `Cutting.shapes` returns.

        The rows after those of the step get no results.
        """
        arrays["counts"][:] = len(self.own), len(self.together)
        arrays["bounds"][: len(self.bounds)] = self.bounds
        arrays["bounds"][len(self.bounds) :] = self.bounds[-1]
        arrays["own"][: len(self.own)] = self.own
        if len(self.together):
            arrays["together"][: len(self.together)] = self.together


def cut(
    rule: Cutting,
    starts: Array,
    lengths: Array,
    room: int,
    members: Array | None = None,
    prefixes: Array | None = None,
) -> Cut:
    """Cut the contexts of a step, and the prefixes of its groups.

    starts, lengths: (B,), each row reads the tokens from `starts` on until `lengths` itself.
    room: most results of the step; at least 2 * B.
    members, prefixes: (G, R) and (G,), see `attention.PrefixGroups`; None: there are no groups.
    """
    factor = 1
    while True:
        counts, sizes = rule.divide(lengths - starts, factor)
        results = counts
        if members is not None and prefixes is not None:
            group_counts, group_sizes = rule.divide(prefixes, factor)
            inside = members >= 0
            results = counts.copy()
            results[members[inside]] += group_counts[:, None].repeat(members.shape[1], 1)[inside]
        bounds = np.concatenate((np.zeros(1, dtype=np.int64), results.cumsum()))
        if bounds[-1] <= room:
            break
        factor *= 2
    own = _pieces(counts, sizes, starts, lengths, bounds[:-1])
    if members is None or prefixes is None:
        return Cut(bounds, own, own[:0])
    together = _pieces(group_counts, group_sizes, np.zeros_like(prefixes), prefixes, -group_counts)
    return Cut(bounds, own, together)


def _pieces(counts: Array, sizes: Array, starts: Array, ends: Array, results: Array) -> Array:
    """Return the pieces of contexts: number of the context, begin, end, result.

    A GPU starts programs in order, so contexts with long pieces come first, and the last ones are short.

    results: number of the first result of each context.
    """
    order = np.argsort(-np.minimum(sizes, ends - starts), kind="stable")
    ordered = counts[order]
    of = np.repeat(order, ordered)
    numbers = np.arange(len(of)) - np.repeat(ordered.cumsum() - ordered, ordered)
    pieces: Array = np.empty((len(of), 4), dtype=np.int64)
    pieces[:, 0] = of
    pieces[:, 1] = starts[of] + numbers * sizes[of]
    pieces[:, 2] = np.minimum(pieces[:, 1] + sizes[of], ends[of])
    pieces[:, 3] = results[of] + numbers
    return pieces
