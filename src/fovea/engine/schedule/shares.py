"""Find decodes of a step that begin with the same KV blocks, so that one read of them serves them all.

A full block has one content: if two block tables hold the same block at the same place, the tokens before it
are the same. A shared read needs a kernel launch of its own, which pays off when several rows share about as
many tokens as an image has (for example ten questions about one picture).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_TOKENS = 256
"""Fewest tokens that rows must share."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of a step whose block tables begin with the same blocks.

    rows: the rows, ascending.
    blocks: number of common blocks.
    """

    rows: tuple[int, ...]
    blocks: int


def find_shares(
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    block_size: int,
    most_rows: int,
    *,
    least_rows: int,
    least_tokens: int = LEAST_TOKENS,
) -> list[Share]:
    """Group the rows whose contexts begin with the same full blocks; at most B // least_rows shares.

    tables: (B, W) block tables.
    lengths: (B,) tokens of each context. Blocks that a row has not filled are never shared.
    block_size: tokens per block.
    most_rows: most rows of one share; a larger group becomes several shares.
    least_rows: fewest rows of one share.
    least_tokens: fewest tokens that the rows of a share have in common.
    """
    first = -(-least_tokens // block_size) - 1
    if most_rows < least_rows or len(tables) < least_rows or tables.shape[1] <= first:
        return []
    full = lengths // block_size
    groups: dict[int, list[int]] = {}
    for row in np.nonzero(full > first)[0].tolist():
        groups.setdefault(int(tables[row, first]), []).append(row)
    shares = []
    for group in groups.values():
        for begin in range(0, len(group), most_rows):
            rows = group[begin : begin + most_rows]
            if len(rows) >= least_rows:
                shares.append(Share(tuple(rows), _common(tables[rows], int(full[rows].min()))))
    return shares


def write_shares(
    shares: Sequence[Share],
    block_size: int,
    starts: NDArray[np.int64],
    members: NDArray[np.int64],
    prefixes: NDArray[np.int64],
) -> None:
    """Write the shares into arrays for the kernels. Unused entries are padding: 0 tokens, and -1 for rows.

    starts: (B,) gets for each row the number of tokens that its share reads.
    members: (G, R) gets the rows of each share.
    prefixes: (G,) gets the number of tokens of each share.
    """
    starts[:] = prefixes[:] = 0
    members[:] = -1
    for number, share in enumerate(shares):
        members[number, : len(share.rows)] = share.rows
        starts[list(share.rows)] = prefixes[number] = share.blocks * block_size


def _common(tables: NDArray[np.int64], most: int) -> int:
    equal = (tables[:, :most] == tables[0, :most]).all(0)
    return most if equal.all() else int(equal.argmin())
