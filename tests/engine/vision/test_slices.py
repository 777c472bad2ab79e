"""Slices cover all rows, whatever the sizes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fovea.engine.vision.encoding import CPU_ROWS, cuts, run_to_end
from fovea.engine.vision.vit import VisionTransformer, ViTConfig


@given(st.integers(0, 50), st.integers(0, 60))
def test_cuts_cover_everything_once(count: int, size: int) -> None:
    covered = [i for rows in cuts(count, size) for i in range(rows.start, rows.stop)]
    assert covered == list(range(count))


@pytest.mark.parametrize("masked", [False, True])
def test_a_tile_of_more_rows_than_a_slice(masked: bool) -> None:
    """A tile that is larger than a slice is encoded as a slice of its own.

    CLIP at 336 pixels has 577 rows per tile, SigLIP at 384 has 729. The number of tiles per slice was rounded
    down to zero, so every slice was empty.
    """
    side, patch = 28, 2
    assert (side // patch) ** 2 <= CPU_ROWS < (2 * side // patch) ** 2
    config = ViTConfig(
        hidden=16, depth=2, heads=2, intermediate=32, activation="gelu", eps=1e-6, image_size=2 * side,
        patch_size=patch, channels=3, class_token=False, patch_bias=True, pre_norm=False, post_norm=False,
        taps=(1, 2),
    )  # fmt: skip
    tower = VisionTransformer(config)
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    pixels = torch.randn(3, 3, 2 * side, 2 * side)
    mask = torch.ones(3, side, side, dtype=torch.bool)
    mask[2, side // 2 :] = False
    with torch.inference_mode():
        together = run_to_end(tower.slices(pixels, mask if masked else None))
        for tile in range(3):
            alone = run_to_end(
                tower.slices(pixels[tile : tile + 1], mask[tile : tile + 1] if masked else None)
            )
            torch.testing.assert_close(together[tile], alone[0], atol=1e-5, rtol=1e-4)
    assert together.shape == (3, side * side, 32)
