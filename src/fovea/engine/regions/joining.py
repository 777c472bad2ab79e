"""Puts the tokens of an image's views together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.engine.vision.features import VisualFeatures
from fovea.relevance.realizing import Shape, View
from fovea.relevance.regions import Region
from fovea.relevance.texture import Mask


def full_grid(
    grid: Shape, regions: Sequence[Region], features: Sequence[VisualFeatures]
) -> tuple[NDArray[np.float32], Mask]:
    """The tokens of native regions in their places, (rows, columns, D), and which cells they fill."""
    held = np.zeros(grid, bool)
    table = np.zeros((*grid, features[0].embeds.shape[1] if features else 1), np.float32)
    for region, one in zip(regions, features, strict=True):
        held[region.cells] = True
        table[region.cells] = one.embeds.float().cpu().numpy().reshape(region.rows, region.columns, -1)
    return table, held


def join(
    views: Sequence[View], features: Sequence[VisualFeatures], places: NDArray[np.int64]
) -> VisualFeatures:
    """Concatenate the kept tokens of all views. places: rows and columns in the full grid, (tokens, 2)."""
    device = features[0].embeds.device
    kept_rows = [torch.tensor(view.token_indices, device=device) for view in views]
    embeds = torch.cat([one.embeds[rows] for one, rows in zip(features, kept_rows, strict=True)])
    deepstack = tuple(
        torch.cat([one.deepstack[level][rows] for one, rows in zip(features, kept_rows, strict=True)])
        for level in range(len(features[0].deepstack))
    )
    created_at = min(one.created_at for one in features)
    return VisualFeatures(embeds, deepstack, created_at, torch.from_numpy(places.astype(np.int32)).to(device))
