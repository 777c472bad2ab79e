"""Uniform and random: what any other method is compared with."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fovea.engine.reduce.registry import reducer
from fovea.engine.reduce.uniform import spread
from tests.support.seen import seen


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_a_spread_is_exact(rows: int, columns: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, rows * columns))
    cells = spread(rows, columns, keep)
    assert cells == sorted(set(cells))
    assert len(cells) == keep
    assert 0 <= cells[0] <= cells[-1] < rows * columns


def test_a_quarter_is_the_middle_of_every_second_row_and_column() -> None:
    assert spread(4, 6, 6) == [7, 9, 11, 19, 21, 23]


@pytest.mark.parametrize("keep", [147, 294, 588])
def test_no_token_is_far_from_a_kept_one(keep: int) -> None:
    """42x28 tokens are those of 1,344x896 pixels. A square lattice of that density leaves nobody farther than this."""
    cells = torch.tensor(spread(42, 28, keep))
    everywhere = torch.cartesian_prod(torch.arange(42), torch.arange(28)).float()
    kept = torch.stack((cells // 28, cells % 28), 1).float()
    farthest = torch.cdist(everywhere, kept).min(1).values.max()
    assert farthest <= (2 * 42 * 28 / keep) ** 0.5


def test_chance_is_the_seeds_alone() -> None:
    method, image = reducer("random"), seen(6, 7)
    drawn = method.reduce(image, 10).index
    torch.manual_seed(5)
    other = replace(seen(6, 7, seed=9), seed=image.seed)
    assert torch.equal(method.reduce(other, 10).index, drawn)
    assert not torch.equal(method.reduce(replace(image, seed="another"), 10).index, drawn)


def test_every_token_is_drawn_as_often() -> None:
    method, image = reducer("random"), seen(2, 5)
    counts = torch.zeros(10)
    for number in range(400):
        counts[method.reduce(replace(image, seed=str(number)), 5).index] += 1
    assert counts.sum() == 2000
    assert (counts - 200).abs().max() < 50
