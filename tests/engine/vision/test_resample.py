"""Resampling of learned positions, compared with transformers and torch."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional
from transformers import vision_utils

from fovea.engine.vision.any_size import PositionTable
from fovea.engine.vision.processor.sizes import patch_coordinates
from fovea.relevance.realizing import Region, View, patch_fractions

MERGE = 2
GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)).map(
    lambda g: (g[0], g[1] * MERGE, g[2] * MERGE)
)
KINDS = pytest.mark.parametrize(("corners", "cubic"), [(True, False), (False, False), (False, True)])


def read(table: np.ndarray, taps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Values that a table (entries, width) has at taps with weights, both (patches, n)."""
    return np.asarray((table[taps] * weights[:, :, None]).sum(1))


@KINDS
@settings(deadline=None)
@given(grid=GRIDS, side=st.integers(2, 12))
def test_learned_positions_are_resampled_like_transformers(
    grid: tuple[int, int, int], side: int, corners: bool, cubic: bool
) -> None:
    """The values are compared, not the taps: a tap whose weight is zero may be any entry."""
    taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]),
        side,
        mode="bicubic" if cubic else "bilinear",
        align_corners=corners,
        spatial_merge_size=MERGE,
    )
    table = np.random.default_rng(side).normal(size=(side * side, 3))
    index, weight = PositionTable(side, corners, cubic).taps(grid, MERGE)
    assert index.min() >= 0
    assert index.max() < side * side
    assert index.shape == weight.shape == (np.prod(grid), 16 if cubic else 4)
    np.testing.assert_allclose(weight.sum(1), 1, atol=1e-5)
    theirs = read(table, taps.numpy(), weights.numpy())
    np.testing.assert_allclose(read(table, index, weight), theirs, atol=1e-5)


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("size", [(4, 6), (14, 10), (2, 2)], ids=str)
def test_a_table_of_edges_is_read_as_torch_resizes_a_picture(size: tuple[int, int], cubic: bool) -> None:
    side = 7
    table = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    mode = "bicubic" if cubic else "bilinear"
    theirs = functional.interpolate(table, size, mode=mode, align_corners=False)[0].flatten(1).T
    index, weight = PositionTable(side, corners=False, cubic=cubic).taps((1, *size), 1)
    ours = read(table[0].flatten(1).T.numpy(), index, weight)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


@KINDS
@pytest.mark.parametrize("side", [4, 8])
def test_a_grid_of_the_tables_own_size_reads_it_unchanged(side: int, corners: bool, cubic: bool) -> None:
    index, weight = PositionTable(side, corners, cubic).taps((1, side, side), MERGE)
    ours = read(np.arange(side * side)[:, None], index, weight)[:, 0]
    coordinates = patch_coordinates((1, side, side), MERGE)
    np.testing.assert_allclose(ours, coordinates[:, 0] * side + coordinates[:, 1], atol=1e-4)


@KINDS
def test_fractions_of_a_native_region_are_the_places_of_its_patches(corners: bool, cubic: bool) -> None:
    """The patches of a region read what the same patches of the whole image read."""
    grid, region = (5, 7), Region(1, 2, 3, 4)
    table = PositionTable(9, corners, cubic)
    entries = np.random.default_rng(0).normal(size=(81, 3))
    whole = read(entries, *table.taps((1, grid[0] * MERGE, grid[1] * MERGE), MERGE))
    whole = whole.reshape(*grid, MERGE**2, 3)
    fractions = patch_fractions(View(region, (3, 4), ()), grid, MERGE, corners=corners)
    assert fractions.min() >= 0
    assert fractions.max() <= 1
    ours = read(entries, *table.taps_at(fractions))
    expected = whole[1:4, 2:6].reshape(-1, 3)
    np.testing.assert_allclose(ours, expected, atol=1e-4)
