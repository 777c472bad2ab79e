"""The baselines of token reduction: uniform and random."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fovea.engine.reduce.methods import reducer, spread_cells
from tests.support.reduction import reduction_input


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_spread_cells_are_exact(rows: int, columns: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, rows * columns))
    cells = spread_cells(rows, columns, keep)
    assert cells == sorted(set(cells))
    assert len(cells) == keep
    assert 0 <= cells[0] <= cells[-1] < rows * columns


def test_a_quarter_is_the_middle_of_every_second_row_and_column() -> None:
    assert spread_cells(4, 6, 6) == [7, 9, 11, 19, 21, 23]


@pytest.mark.parametrize("keep", [147, 294, 588])
def test_no_token_is_far_from_a_kept_one(keep: int) -> None:
    """42x28 tokens are 1,344x896 pixels. The bound is the largest distance in a square lattice as dense."""
    cells = torch.tensor(spread_cells(42, 28, keep))
    everywhere = torch.cartesian_prod(torch.arange(42), torch.arange(28)).float()
    kept = torch.stack((cells // 28, cells % 28), 1).float()
    farthest = torch.cdist(everywhere, kept).min(1).values.max()
    assert farthest <= (2 * 42 * 28 / keep) ** 0.5


def test_random_choices_depend_on_the_seed_alone() -> None:
    method, image = reducer("random"), reduction_input(6, 7)
    index = method.reduce(image, 10).index
    torch.manual_seed(5)
    other = replace(reduction_input(6, 7, seed=9), seed=image.seed)
    assert torch.equal(method.reduce(other, 10).index, index)
    assert not torch.equal(method.reduce(replace(image, seed="another"), 10).index, index)


def test_all_tokens_are_drawn_equally_often() -> None:
    method, image = reducer("random"), reduction_input(2, 5)
    counts = torch.zeros(10)
    for number in range(400):
        counts[method.reduce(replace(image, seed=str(number)), 5).index] += 1
    assert counts.sum() == 2000
    assert (counts - 200).abs().max() < 50
