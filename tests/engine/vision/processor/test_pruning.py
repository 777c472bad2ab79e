"""Tests of pruning: shapes decide how many tokens are kept, and motion decides which."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from tests.support.thorough import examples

from fovea.engine.vision.processor.video import first_cells, kept_count, moving_cells

CELL = 4


def naive(frames: list[np.ndarray], group_frames: int, count: int) -> tuple[tuple[int, ...], ...]:
    """The naive twin of `moving_cells`: one cell at a time."""
    down, across = frames[0].shape[0] // CELL, frames[0].shape[1] // CELL
    groups = len(frames) // group_frames
    ranked = []
    for group in range(groups):
        for y in range(down):
            for x in range(across):
                change = 0
                for time in range(group * group_frames, (group + 1) * group_frames):
                    here = np.s_[y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL]
                    if time:
                        change += int(np.abs(frames[time][here].astype(int) - frames[time - 1][here]).sum())
                place = group * down * across + y * across + x
                ranked.append((0 if group == 0 else 1, -change, place))
    cells = {place for _, _, place in sorted(ranked)[:count]}
    size = down * across
    return tuple(tuple(i for i in range(size) if group * size + i in cells) for group in range(groups))


@settings(max_examples=examples(60), deadline=None)
@given(
    groups=st.integers(1, 5), down=st.integers(1, 3), across=st.integers(1, 3), rate=st.floats(0, 0.95),
    levels=st.sampled_from([2, 256]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_count_follows_from_shapes_and_the_cells_from_motion(
    groups: int, down: int, across: int, rate: float, levels: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (groups * 2, down * CELL, across * CELL, 3)
    frames = list(rng.integers(0, levels, shape, dtype=np.uint8))
    count = kept_count(groups, down * across, rate)
    cells = moving_cells(frames, 2, CELL, count)
    assert cells == naive(frames, 2, count)
    assert sum(map(len, cells)) == count == sum(map(len, first_cells(groups, down * across, count)))
    assert cells[0] == tuple(range(down * across)), "the first group is kept whole"


def test_cells_without_motion_are_left_out() -> None:
    frames = [np.zeros((8, 8, 3), np.uint8) for _ in range(6)]
    frames[4][4:, :4] = 255
    assert moving_cells(frames, 2, CELL, 5) == ((0, 1, 2, 3), (), (2,))


def test_counts() -> None:
    assert kept_count(8, 16, 0.0) == 128
    assert kept_count(8, 16, 0.5) == 64
    assert kept_count(8, 16, 0.95) == 16, "never less than one group"
    assert kept_count(1, 16, 0.5) == 16
