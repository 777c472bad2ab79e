"""The tower of GLM-4.1V, compared with transformers' class with the same random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.glm4v import modeling_glm4v

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.linear import checkpoint_targets
from fovea.engine.models.towers import glm4v_tower
from fovea.engine.reduce.probe import encoder_taps
from fovea.engine.vision.encoding import run_to_end
from fovea.engine.vision.glm4v import Glm4vTower
from fovea.relevance.realizing import Region, View, patch_fractions

GRIDS = [(1, 6, 10), (1, 2, 2), (1, 14, 4), (1, 26, 30), (3, 4, 6)]
SHAPE: dict[str, Any] = {
    "depth": 3, "hidden_size": 48, "num_heads": 4, "in_channels": 3, "image_size": 56, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 40, "intermediate_size": 72,
}  # fmt: skip


def pair(**changes: Any) -> tuple[Glm4vTower, Any]:
    """Our tower and transformers' one, with equal weights. Eager attention returns its weights."""
    config = hf.Glm4vVisionConfig(**SHAPE | changes)
    theirs = hf.Glm4vVisionModel._from_config(config, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.data = 0.15 * noise + (1.0 if parameter.ndim == 1 else 0.0)
    stored = theirs.state_dict()
    ours = Glm4vTower(glm4v_tower(config))
    targets = dict(checkpoint_targets(ours))
    assert targets.keys() == stored.keys()
    for name, target in targets.items():
        target.copy_(stored[name].view(target.shape))
    return ours, theirs


def pixels(grid: tuple[int, int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * 8 * 8, generator=generator)


@torch.inference_mode()
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "rms_norm_eps": 0.01}], ids=str)
def test_tokens_are_those_of_transformers(grid: tuple[int, int, int], changes: dict[str, Any]) -> None:
    ours, theirs = pair(**changes)
    patches = pixels(grid)
    tokens, levels = run_to_end(ours.slices(patches, grid))
    # In transformers, a video of t frames is t pictures, too.
    pictures = torch.tensor([(1, *grid[1:])] * grid[0])
    expected = theirs(patches, grid_thw=pictures).pooler_output
    assert levels == []
    assert tokens.shape == (grid[0] * grid[1] * grid[2] // 4, 40)
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_merge_of_three_patches_and_many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice holds whole tokens, also if the patches of a token do not divide its rows."""
    monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", 32)
    ours, theirs = pair(spatial_merge_size=3)
    grid = (1, 9, 12)
    tokens, _ = run_to_end(ours.slices(pixels(grid), grid))
    expected = theirs(pixels(grid), grid_thw=torch.tensor([grid])).pooler_output
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_taps_are_the_attention_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    grid, keys, weights = (1, 6, 10), [], []
    attend = modeling_glm4v.eager_attention_forward

    def record(*args: Any, **options: Any) -> Any:
        result = attend(*args, **options)
        weights.append(result[1])
        return result

    monkeypatch.setattr(modeling_glm4v, "eager_attention_forward", record)
    theirs.blocks[-1].attn.qkv.register_forward_hook(lambda _module, _inputs, output: keys.append(output))
    theirs(pixels(grid), grid_thw=torch.tensor([grid]))
    taps = encoder_taps(ours, pixels(grid), grid)
    plain = keys[0].view(60, 3, 4, -1)[:, 1].mean(1).view(15, 4, -1).mean(1)
    received = weights[-1].mean(dim=(0, 1, 2)).view(15, 4).mean(1)
    torch.testing.assert_close(taps.keys, plain, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(taps.attention, received, atol=1e-6, rtol=1e-3)


@torch.inference_mode()
def test_a_region_has_the_learned_positions_of_its_place() -> None:
    """A native region and the same patches of the whole image give the first block equal inputs."""
    ours, _ = pair()
    inputs: list[Tensor] = []
    first: Any = ours.blocks[0]
    first.norm1.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].clone()))
    patches, region = pixels((1, 10, 14)).view(5, 7, 4, -1), Region(1, 2, 3, 4)
    run_to_end(ours.slices(patches.view(140, -1), (1, 10, 14)))
    at = patch_fractions(View(region, (3, 4), ()), (5, 7), 2, corners=ours.corners)
    run_to_end(ours.slices(patches[1:4, 2:6].reshape(48, -1), (1, 6, 8), at))
    whole, part = inputs
    expected = whole.view(5, 7, 4, -1)[1:4, 2:6].reshape(part.shape)
    torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": [14, 14]}, r"patch_size is \[14, 14\]; accepted: an integer"),
        ({"num_heads": 8}, "heads of size 6: accepted are multiples of 4"),
    ],
    ids=str,
)
def test_what_the_tower_cannot_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        glm4v_tower(hf.Glm4vVisionConfig(**SHAPE | changes))
