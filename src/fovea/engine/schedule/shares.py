"""Which decodes of a step begin with the same KV blocks, so that one read of those serves all of them.

A block has one content, and the same block in the same place means the same tokens before it. Reading together is worth
a launch of its own when several rows share at least an image's worth of tokens (ten questions about one picture).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Share:
    """rows of the step, ascending, whose tables begin with the same `blocks` blocks."""

    rows: tuple[int, ...]
    blocks: int


def shares(
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    block_size: int,
    most_rows: int,
    *,
    least_rows: int,
    least_tokens: int = LEAST_TOKENS,
) -> list[Share]:
    """tables (B, W) block tables, lengths (B,) tokens of each context. At most B // least_rows shares, none of more than
    `most_rows` rows: larger crowds are several shares. Blocks that a row has not filled are never shared."""
    first = -(-least_tokens // block_size) - 1
    if most_rows < least_rows or len(tables) < least_rows or tables.shape[1] <= first:
        return []
    full = lengths // block_size
    crowds: dict[int, list[int]] = {}
    for row in np.nonzero(full > first)[0].tolist():
        crowds.setdefault(int(tables[row, first]), []).append(row)
    found = []
    for crowd in crowds.values():
        for begin in range(0, len(crowd), most_rows):
            rows = crowd[begin : begin + most_rows]
            if len(rows) >= least_rows:
                found.append(Share(tuple(rows), _common(tables[rows], int(full[rows].min()))))
    return found


def write_shares(
    found: Sequence[Share],
    block_size: int,
    starts: NDArray[np.int64],
    members: NDArray[np.int64],
    prefixes: NDArray[np.int64],
) -> None:
    """starts (B,) gets the tokens that a share reads for each row, members (G, R) the rows of each, prefixes (G,) its tokens.
    What is left is padding: no tokens, and rows of -1."""
    starts[:] = prefixes[:] = 0
    members[:] = -1
    for number, share in enumerate(found):
        members[number, : len(share.rows)] = share.rows
        starts[list(share.rows)] = prefixes[number] = share.blocks * block_size


def _common(tables: NDArray[np.int64], most: int) -> int:
    equal = (tables[:, :most] == tables[0, :most]).all(0)
    return most if equal.all() else int(equal.argmin())
