"""Who sees whom inside an image, against transformers' own arithmetic."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers import vision_utils

from fovea.engine.vision.windows import bilinear_taps, frame_groups, patch_coordinates, window_groups

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
    """Order within a window is free, since every patch of it sees every other; membership is not."""
    index, bounds = vision_utils.get_vision_window_index(tensor(grid), MERGE, window * MERGE * 14, 14)
    patches = (index[:, None] * MERGE**2 + torch.arange(MERGE**2)).flatten().tolist()
    edges = bounds.tolist()
    theirs = {frozenset(patches[a:b]) for a, b in zip(edges, edges[1:], strict=False)}
    groups = window_groups(grid, MERGE, window)
    ours = [frozenset(row.tolist()) for group in groups for row in group]
    assert set(ours) == theirs
    assert len(ours) == len(theirs)
    assert sum(map(len, ours)) == grid[0] * grid[1] * grid[2], "a patch is in no window, or in two"
    assert len(groups) <= 4


@given(GRIDS)
def test_full_attention_stays_within_a_frame(grid: tuple[int, int, int]) -> None:
    bounds = vision_utils.get_vision_cu_seqlens(tensor(grid)).tolist()
    (group,) = frame_groups(grid)
    assert [row.tolist() for row in group] == [
        list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)
    ]


@settings(deadline=None)
@given(GRIDS, st.integers(2, 12))
def test_learned_positions_are_resampled_alike(grid: tuple[int, int, int], side: int) -> None:
    """Equal values, not equal taps: where a weight is zero the tap it belongs to may be any."""
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
