"""Attention and keys of an image's visual tokens in its tower, for the methods that need them.

There is no class token, and most blocks of Qwen2.5-VL attend only inside windows. So the attention is taken
from the last block in which all patches of a frame attend to each other. The tower runs again up to that
block, which costs about as much as encoding the image. The encoder's output does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.engine.vision.any_size import AnySizeTower
from fovea.engine.vision.slices import cuts

QUERY_ROWS = 512
"""Queries whose attention is computed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Attention and keys of visual tokens, in raster order and float32.

    attention: (N,), attention that a token's patches received, mean over the patches. For a patch it is the
        mean over heads and over all queries of the frame, so that the patches of a frame sum to 1.
    keys: (N, head_dim), mean over heads and over a token's patches. They are not rotated, so that tokens that
        look similar have similar keys, whatever their places.
    """

    attention: Tensor
    keys: Tensor


@torch.inference_mode()
def encoder_taps(tower: AnySizeTower, patches: Tensor, grid: tuple[int, int, int]) -> Taps:
    """Compute the taps of one image. patches, grid: as for `AnySizeTower.slices`."""
    tapped = tower.tap(patches, grid)
    frames = zip(tapped.query.chunk(grid[0]), tapped.key.chunk(grid[0]), strict=True)
    by_patch = torch.cat([_attention(query, key) for query, key in frames])
    # Whatever the tower's order of tokens is, the patches of a token are neighbours.
    attention, keys = (
        rows.view(-1, tower.merge**2, *rows.shape[1:]).mean(1) for rows in (by_patch, tapped.plain_key)
    )
    if tapped.back is not None:
        attention, keys = attention[tapped.back], keys[tapped.back]
    return Taps(attention, keys)


def _attention(query: Tensor, key: Tensor) -> Tensor:
    """Mean attention that each key of one frame receives from all queries, over all heads, (T,) float32.

    It is computed for some rows of one head at a time, since the whole table of a large image does not fit
    into memory.

    query, key: (T, heads, d).
    """
    count, heads, dim = query.shape
    total = torch.zeros(count, device=query.device)
    for head in range(heads):
        keys = key[:, head].float().T * dim**-0.5
        for rows in cuts(count, QUERY_ROWS):
            total += (query[rows, head].float() @ keys).softmax(-1).sum(0)
    return total / (count * heads)
