"""Order and attention windows of patches, compared with transformers."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from transformers import vision_utils

from fovea.engine.vision.processor.sizes import patch_coordinates, window_order

MERGE = 2
GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)).map(
    lambda g: (g[0], g[1] * MERGE, g[2] * MERGE)
)


def tensor(grid: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([grid])


@given(GRIDS)
def test_coordinates_come_in_merge_order(grid: tuple[int, int, int]) -> None:
    theirs = vision_utils.get_vision_position_ids(tensor(grid), MERGE)
    np.testing.assert_array_equal(patch_coordinates(grid, MERGE), theirs.numpy())


@settings(deadline=None)
@given(GRIDS, st.integers(1, 5))
def test_windows_hold_the_same_patches(grid: tuple[int, int, int], window: int) -> None:
    """Windows must have equal members. Their order is free: all patches of a window attend to each other."""
    index, bounds = vision_utils.get_vision_window_index(tensor(grid), MERGE, window * MERGE * 14, 14)
    patches = (index[:, None] * MERGE**2 + torch.arange(MERGE**2)).flatten().tolist()
    edges = bounds.tolist()
    theirs = {frozenset(patches[a:b]) for a, b in zip(edges, edges[1:], strict=False)}
    order, runs = window_order(grid, MERGE, window)
    ours, first = [], 0
    for windows, size in runs:
        for _ in range(windows):
            tokens = order[first : first + size // MERGE**2]
            ours.append(frozenset((tokens[:, None] * MERGE**2 + np.arange(MERGE**2)).ravel().tolist()))
            first += len(tokens)
    assert set(ours) == theirs
    assert len(ours) == len(theirs)
    assert sorted(order.tolist()) == list(range(len(order))), "a token is in no window, or in two"
    assert len(runs) <= 4 * grid[0]
