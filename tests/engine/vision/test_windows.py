"""Order and attention windows of patches, compared with transformers."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers import vision_utils

from fovea.engine.vision.windows import bilinear_taps, patch_coordinates, window_order

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


@settings(deadline=None)
@given(GRIDS, st.integers(2, 12))
def test_learned_positions_are_resampled_like_transformers(grid: tuple[int, int, int], side: int) -> None:
    """The values are compared, not the taps: a tap whose weight is zero may be any entry."""
    taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        tensor(grid), side, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
    )
    table = np.random.default_rng(side).normal(size=(side * side, 3))
    index, weight = bilinear_taps(grid, MERGE, side)
    assert index.min() >= 0
    assert index.max() < side * side
    ours = (table[index] * weight[:, :, None]).sum(1)
    theirs = (table[taps.numpy()] * weights.numpy()[:, :, None]).sum(1)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("side", [3, 8])
def test_a_grid_of_the_tables_own_size_reads_it_unchanged(side: int) -> None:
    size = side if side % MERGE == 0 else side + 1
    index, weight = bilinear_taps((1, size, size), MERGE, size)
    rows = np.arange(size * size)
    coordinates = patch_coordinates((1, size, size), MERGE)
    ours = (rows[index] * weight).sum(1)
    np.testing.assert_allclose(ours, coordinates[:, 0] * size + coordinates[:, 1], atol=1e-4)
