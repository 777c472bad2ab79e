"""The tower and projector of Gemma 4, compared with transformers' classes with the same random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.linear import checkpoint_targets
from fovea.engine.models.towers import gemma4_tower
from fovea.engine.vision.calls import apply_by_rows
from fovea.engine.vision.encoding import one_by_one, run_to_end
from fovea.engine.vision.gemma4 import Gemma4Projector, Gemma4Tower

GRIDS = [(3, 3), (6, 9), (3, 30), (24, 3), (12, 15)]
SHAPE: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 12, "patch_size": 4, "position_embedding_size": 30,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"use_clipped_linears": True},
    "standardized": {"standardize": True},
    "both": {"use_clipped_linears": True, "standardize": True, "rms_norm_eps": 0.01},
}
TEXT_WIDTH = 40


class Vision(nn.Module):
    """Tower and projector under the attribute names of `VisionLanguageModel`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = Gemma4Tower(gemma4_tower(config))
        self.embed_vision = Gemma4Projector(config.hidden_size, TEXT_WIDTH, config.rms_norm_eps)


class Theirs(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = Gemma4VisionModel._from_config(config, attn_implementation="eager")
        text = hf.Gemma4TextConfig(hidden_size=TEXT_WIDTH)
        self.embed_vision = Gemma4MultimodalEmbedder(config, text)


def bound(name: str, random: torch.Generator) -> Tensor:
    """A bound that some numbers exceed. It differs between the maps."""
    size = 0.6 + torch.rand((), generator=random)
    return -size if name.endswith("min") else size


def pair(**changes: Any) -> tuple[Vision, Theirs]:
    """Our modules and transformers', with equal weights under equal names."""
    config = hf.Gemma4VisionConfig(**SHAPE | changes)
    theirs = Theirs(config).eval()
    random = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.data = 0.15 * noise + (1.0 if parameter.ndim == 1 else 0.0)
    for name, buffer in theirs.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.copy_(bound(name, random))
        elif ".std_" in name:
            buffer.copy_(torch.randn(buffer.shape, generator=random))
    stored = theirs.state_dict()
    ours = Vision(config)
    targets = dict(checkpoint_targets(ours))
    assert targets.keys() == stored.keys()
    for name, target in targets.items():
        assert target.shape == stored[name].shape
        target.copy_(stored[name])
    return ours, theirs


def pixels(grid: tuple[int, int]) -> Tensor:
    return torch.rand(grid[0] * grid[1], 48, generator=torch.Generator().manual_seed(1))


def encode(ours: Vision, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rows = run_to_end(ours.vision_tower.slices(patches, grid))
    return rows, run_to_end(apply_by_rows(ours.embed_vision, rows))


def expected(theirs: Theirs, patches: Tensor, grid: tuple[int, int], padding: int) -> tuple[Tensor, Tensor]:
    """Their rows and embeddings of one image with padded patches behind its own."""
    down, across = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    positions = torch.stack((across, down), dim=-1).view(-1, 2)
    positions = nn.functional.pad(positions, (0, 0, 0, padding), value=-1)
    padded = nn.functional.pad(patches, (0, 0, 0, padding))
    rows = theirs.vision_tower(padded[None], pixel_position_ids=positions[None]).last_hidden_state
    return rows, theirs.embed_vision(rows)


@torch.inference_mode()
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, grid: tuple[int, int]) -> None:
    ours, theirs = pair(**KINDS[kind])
    found = encode(ours, pixels(grid), grid)
    for mine, other in zip(found, expected(theirs, pixels(grid), grid, 36), strict=True):
        assert mine.shape[0] == grid[0] * grid[1] // 9
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_averages_of_other_squares() -> None:
    ours, theirs = pair(pooling_kernel_size=2)
    found = encode(ours, pixels((6, 10)), (6, 10))
    for mine, other in zip(found, expected(theirs, pixels((6, 10)), (6, 10), 12), strict=True):
        assert mine.shape[0] == 15
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["input_min", "input_max", "output_min", "output_max"])
def test_every_bound_has_an_effect(name: str) -> None:
    """The random bounds clip some numbers, so that equal results mean equal use of all bounds."""
    ours, _ = pair(use_clipped_linears=True)
    _, before = encode(ours, pixels((6, 9)), (6, 9))
    for part in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        linear = ours.get_submodule(f"vision_tower.encoder.layers.0.{part}")
        value = getattr(linear, name).data
        old = value.clone()
        value.fill_(0.1 if name.endswith("max") else -0.1)
        _, after = encode(ours, pixels((6, 9)), (6, 9))
        assert not torch.allclose(before, after, atol=1e-4)
        value.copy_(old)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["plain", "both"])
def test_slices_change_no_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(**KINDS[kind])
    _, whole = encode(ours, pixels((12, 15)), (12, 15))
    monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", 7)
    pauses = sum(1 for _ in one_by_one(ours.vision_tower.slices(pixels((12, 15)), (12, 15))))
    assert pauses > 3 * 2 * 180 // 7
    _, sliced = encode(ours, pixels((12, 15)), (12, 15))
    torch.testing.assert_close(sliced, whole, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["plain", "both"])
def test_bfloat16_is_as_near_to_float32_as_transformers(kind: str) -> None:
    """Norms, averages and pixels have one rounding each, as in transformers."""
    ours, theirs = pair(**KINDS[kind])
    _, exact = expected(theirs, pixels((12, 15)), (12, 15), 0)
    ours, theirs = ours.bfloat16(), theirs.bfloat16()
    _, mine = encode(ours, pixels((12, 15)), (12, 15))
    _, other = expected(theirs, pixels((12, 15)), (12, 15), 0)
    assert mine.dtype is torch.bfloat16
    assert (mine.float() - exact).norm() <= 1.1 * (other.float() - exact).norm()


def test_the_shape_counts_rows_and_pairs() -> None:
    shape = Gemma4Tower(gemma4_tower(hf.Gemma4VisionConfig(**SHAPE))).shape((6, 9))
    assert (shape.patches, shape.rows, shape.projector_rows) == (54, 54, 6)
    assert (shape.hidden, shape.pairs) == (48, 3 * 54**2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "4 heads, 2 of keys and values"),
        ({"head_dim": 16}, "of size 16, and hidden_size 48"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 6}, "accepted are multiples of 4"),
    ],
    ids=str,
)
def test_what_the_tower_cannot_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        gemma4_tower(hf.Gemma4VisionConfig(**SHAPE | changes))
