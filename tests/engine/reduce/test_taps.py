"""Taps, compared with attention that is computed patch by patch, on towers with random weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.engine.reduce.base import ReductionInput
from fovea.engine.reduce.methods import reducer
from fovea.engine.reduce.probe import encoder_taps
from fovea.engine.vision.encoding import run_to_end
from fovea.engine.vision.qwen import QwenVisionConfig, QwenVisionTower

GENERATIONS: dict[str, dict[str, Any]] = {
    "2": {},
    "2.5": {"window": 2, "full": (1,)},
    "3": {"positions": 16, "deepstack": (0, 2)},
}
GRID = (1, 6, 10)


def tower(generation: str) -> QwenVisionTower:
    config = QwenVisionConfig(
        generation=generation, depth=3, hidden=32, heads=2, intermediate=48, out_hidden=24, activation="silu",
        channels=3, patch=2, temporal=2, merge=2, theta=10000.0, **GENERATIONS[generation],
    )  # fmt: skip
    model, random = QwenVisionTower(config), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=random)
    return model


def pixels(grid: tuple[int, int, int], seed: int = 0) -> Tensor:
    return torch.randn(math.prod(grid), 24, generator=torch.Generator().manual_seed(seed))


def attention_input(tower: QwenVisionTower, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Input of the attention of the tapped block while the tower encodes, in the tower's order of patches."""
    tapped, rows = 1 if tower.config.window else 2, []
    hook = tower.blocks[tapped].norm1.register_forward_hook(
        lambda _module, _inputs, output: rows.append(output)
    )
    try:
        run_to_end(tower.slices(patches, grid))
    finally:
        hook.remove()
    return torch.cat(rows)


def rotated(row: Tensor, place: Tensor) -> Tensor:
    """One head's row (d,), rotated by its patch's place (row, column), half of the frequencies by each."""
    quarter = len(row) // 4
    frequencies = [10000.0 ** (-i / quarter) for i in range(quarter)]
    angles = torch.tensor([float(axis) * f for axis in place for f in frequencies])
    low, high = row[: 2 * quarter], row[2 * quarter :]
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()))


def explicit(tower: QwenVisionTower, patches: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Attention received by each token of one frame, and its mean key, in raster order, row by row."""
    rows, heads = attention_input(tower, patches, grid), tower.config.heads
    down, across = grid[1] // 2, grid[2] // 2
    order = tower.geometry(grid).order
    numbers = range(down * across) if order is None else order.tolist()
    places = [
        torch.tensor((2 * (number // across) + i // 2, 2 * (number % across) + i % 2))
        for number in numbers
        for i in range(4)
    ]
    attention = tower.blocks[1 if tower.config.window else 2].attn
    qkv = (rows @ attention.qkv.weight.T + attention.qkv.bias).view(len(rows), 3, heads, -1)
    received = torch.zeros(len(rows))
    for head in range(heads):
        keys = torch.stack([rotated(qkv[i, 1, head], places[i]) for i in range(len(rows))])
        for i in range(len(rows)):
            products = keys @ rotated(qkv[i, 0, head], places[i]) / keys.shape[1] ** 0.5
            received += products.softmax(0) / (heads * len(rows))
    plain = qkv[:, 1].mean(1)
    scores, means = torch.zeros(down * across), torch.zeros(down * across, plain.shape[1])
    for position, number in enumerate(numbers):
        scores[number] = received[4 * position : 4 * position + 4].mean()
        means[number] = plain[4 * position : 4 * position + 4].mean(0)
    return scores, means


@torch.inference_mode()
@pytest.mark.parametrize("generation", sorted(GENERATIONS))
def test_taps_equal_the_explicit_attention(generation: str) -> None:
    model, patches = tower(generation), pixels(GRID)
    taps = encoder_taps(model, patches, GRID)
    scores, means = explicit(model, patches, GRID)
    torch.testing.assert_close(taps.attention, scores, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(taps.keys, means, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("generation", sorted(GENERATIONS))
def test_frames_are_independent(generation: str) -> None:
    model, one, other = tower(generation), pixels(GRID), pixels(GRID, 1)
    both = encoder_taps(model, torch.cat((one, other)), (2, 6, 10))
    alone = [encoder_taps(model, patches, GRID) for patches in (one, other)]
    torch.testing.assert_close(
        both.attention, torch.cat([taps.attention for taps in alone]), atol=1e-6, rtol=1e-3
    )
    torch.testing.assert_close(both.keys, torch.cat([taps.keys for taps in alone]), atol=1e-5, rtol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("generation", sorted(GENERATIONS))
def test_taps_do_not_change_the_encoder(generation: str) -> None:
    model, patches = tower(generation), pixels(GRID)
    before, copy = run_to_end(model.slices(patches, GRID))[0], patches.clone()
    taps = encoder_taps(model, patches, GRID)
    assert torch.equal(patches, copy)
    assert torch.equal(run_to_end(model.slices(patches, GRID))[0], before)
    assert float(taps.attention.sum()) == pytest.approx(1 / 4, abs=1e-5)
    image = ReductionInput(before, (3, 5), "", attention=taps.attention, keys=taps.keys)
    assert reducer("visionzip").reduce(image, 7).embeds.shape == (7, 24)
