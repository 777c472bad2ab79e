"""Counts how evenly the work of decodes is divided among programs of a GPU, on the host.

    python -m tests.support.balance      # a table: fixed splits, and pieces by lengths

The heads are those of Qwen2.5-VL-7B, the GPU has as many processors as an H100. The work of a program is its
number of tiles. "Largest" is the largest program against the mean of those that have work. "Busiest" is the
place with the most work against the mean of all places, if each takes the next program when it ends one. A
processor has a place for each program that it runs at once: three, by the registers that they use.
"""

from __future__ import annotations

import heapq
import os

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np

from fovea.core.markdown import markdown_table
from fovea.kernels.attention import Heads
from fovea.kernels.pieces import cut
from fovea.kernels.triton import decode as triton_decode

PROCESSORS = 132
LONGEST = 32_768
"""Longest context for which a batch that a graph replays has room."""
HEADS = Heads(28, 4, 128)
CASES = {
    "256 rows of 1,000 tokens": [1000] * 256,
    "one of 30,000 among 31 of 500": [500] * 20 + [30_000] + [500] * 11,
    "1 row of 8,000 tokens": [8000],
    "1 row of 500 tokens": [500],
    "64 rows of 200 to 12,800 tokens": [200 * n for n in range(1, 65)],
}


def fixed_splits(lengths: list[int]) -> list[int]:
    """Return the tiles of every program with equally many splits for all rows, as until 2026-11-27."""
    wanted = 2 * PROCESSORS // (len(lengths) * HEADS.kv)
    splits = min(32, 1 << (max(1, wanted) - 1).bit_length())
    tiles = -(-np.array(lengths) // 64)
    span = -(-tiles // splits)
    parts = [np.clip(tiles - split * span, 0, span) for split in range(splits)]
    return [int(count) for part in parts for _ in range(HEADS.kv) for count in part]


def pieces(lengths: list[int]) -> list[int]:
    """Return the tiles of every program if contexts are cut by their lengths, as Triton's kernels do."""
    rule, rows = triton_decode.cutting(HEADS, PROCESSORS), len(lengths)
    room = rule.room(rows, LONGEST)
    found = cut(rule, np.zeros(rows, dtype=np.int64), np.array(lengths), room)
    tiles = -(-(found.own[:, 2] - found.own[:, 1]) // rule.tile)
    programs = triton_decode.programs(rule.shapes(rows, LONGEST, 0, 1)["own"][0], HEADS.kv, PROCESSORS)
    shares = [int(tiles[first::programs].sum()) for first in range(programs)]
    return [share for share in shares for _ in range(HEADS.kv)]


def largest(programs: list[int]) -> float:
    return max(programs) / float(np.mean([count for count in programs if count]))


def busiest(programs: list[int], at_once: int) -> float:
    free = [0] * (PROCESSORS * at_once)
    for count in programs:
        heapq.heapreplace(free, free[0] + count)
    return max(free) / (sum(programs) / len(free))


def figures(lengths: list[int]) -> list[tuple[float, float]]:
    """Return with fixed splits and with pieces: largest, and busiest with one and three programs at once."""
    before, after = fixed_splits(lengths), pieces(lengths)
    pairs = [(largest(before), largest(after))]
    return pairs + [(busiest(before, at_once), busiest(after, at_once)) for at_once in (1, 3)]


def main() -> None:
    rows = [
        (name, *(f"{before:.2f}, now {after:.2f}" for before, after in figures(lengths)))
        for name, lengths in CASES.items()
    ]
    print(markdown_table(("contexts", "largest", "busiest, 1 at once", "busiest, 3 at once"), rows))


if __name__ == "__main__":
    main()
