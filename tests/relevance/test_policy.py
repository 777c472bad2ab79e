"""Layouts of exactly as many tokens as were given, with a view of the whole wherever an image is large."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea.relevance.attending import POLICIES, thumbnail_tokens
from fovea.relevance.balancing import Ways
from fovea.relevance.policy import ENOUGH, attend, content, score
from fovea.relevance.realizing import shape_within, whole
from fovea.relevance.regions import FEW_TOKENS

sides = st.integers(1, 48)
ratios = st.floats(0.0, 1.0, exclude_max=True)


def maps(seed: int, rows: int, columns: int, filled: float) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.random((rows, columns)).astype(np.float32), draw.random((rows, columns)) < filled


@settings(max_examples=150)
@given(sides, sides, ratios, st.integers(0, 99), st.floats(0, 1), st.sampled_from(sorted(POLICIES)), st.sampled_from((None, 3, 8)))  # fmt: skip
def test_layouts_have_exactly_the_total(
    rows: int, columns: int, ratio: float, seed: int, filled: float, policy: str, side: int | None
) -> None:
    total = max(1, int(ratio * rows * columns))
    if total == rows * columns:
        return
    worth, held = maps(seed, rows, columns, filled)
    found = attend(worth, held, total, policy, side)
    layout = found.layout
    assert layout.tokens == total
    assert layout.grid == (rows, columns)
    places = layout.places()
    assert places.shape == (total, 2)
    assert (places >= 0).all()
    assert (places < [rows, columns]).all()
    for view in layout.views:
        assert list(view.kept) == sorted(set(view.kept))
        assert view.kept[0] >= 0
        assert view.kept[-1] < view.shape[0] * view.shape[1]
    budgets = [budget for budget in found.budgets if budget]
    large = side is not None or rows * columns >= FEW_TOKENS
    assert [view.tokens for view in layout.views[large:]] == budgets
    assert all(budget <= region.tokens for budget, region in zip(found.budgets, found.regions, strict=True))
    again = attend(worth.copy(), held.copy(), total, policy, side)
    assert again == found


@given(st.integers(16, 60), st.integers(32, 60), ratios, st.integers(0, 99))
def test_the_whole_comes_first_and_complete(rows: int, columns: int, ratio: float, seed: int) -> None:
    """At the shape that it was seen at for the question, so that nothing is encoded twice: a layout once began with
    another shape of about as many tokens."""
    total = max(1, int(ratio * rows * columns))
    first = attend(*maps(seed, rows, columns, 0.3), total).layout.views[0]
    assert first.region == whole(rows, columns)
    assert first.shape == shape_within(rows, columns, thumbnail_tokens(total))
    assert first.kept == tuple(range(first.shape[0] * first.shape[1]))
    assert first.tokens <= thumbnail_tokens(total)


@pytest.mark.parametrize("total", [0, -1, 100, 101])
def test_all_and_nothing_are_refused(total: int) -> None:
    """Keeping everything is the plain path."""
    with pytest.raises(ValueError, match=f"{total} of 100 tokens can not be chosen; accepted: 1 to 99"):
        attend(*maps(0, 10, 10, 0.5), total)


def test_small_images_lose_their_blank_cells_at_full_resolution() -> None:
    worth, held = maps(1, 10, 12, 0.0)
    held[2:5, 3:8] = True
    worth[held] += 1
    found = attend(worth, held, 20)
    [view] = found.layout.views
    assert view.native
    kept = np.zeros(120, bool)
    kept[list(view.kept)] = True
    assert kept.reshape(10, 12)[held].all()
    assert found.demands == (15,)


def test_small_images_that_are_too_full_are_shown_smaller() -> None:
    worth, held = maps(1, 10, 12, 1.0)
    limit = int(ENOUGH * 120)
    assert attend(worth, held, limit).layout.views[0].native
    [view] = attend(worth, held, 30).layout.views
    assert not view.native
    assert 30 <= view.shape[0] * view.shape[1] <= 40


def test_a_region_whose_content_fits_is_native_and_one_that_is_too_full_is_not() -> None:
    worth = np.full((32, 32), 0.1, np.float32)
    held = np.zeros((32, 32), bool)
    worth[0:8, 0:8], held[0:4, 0:8] = 0.95, True
    found = attend(worth, held, 200, "sharp")
    first = next(view for view in found.layout.views if view.region == found.regions[0])
    assert first.native
    assert first.tokens >= 32
    held[:] = True
    worth[0:8, 8:16] = 0.9
    crowded = attend(worth, held, 130, "thresholds")
    lower = [view for view in crowded.layout.views[1:] if view.tokens < view.region.tokens]
    assert lower
    assert not any(view.native for view in lower)


def test_the_most_relevant_region_gets_the_most() -> None:
    worth, held = np.full((32, 32), 0.05, np.float32), np.ones((32, 32), bool)
    worth[8:16, 16:24] = 1
    for policy in POLICIES:
        found = attend(worth, held, 256, policy)
        best = [(region.row, region.column) for region in found.regions].index((8, 16))
        assert found.budgets[best] == max(found.budgets) == 64
        assert found.scores[best] == 1


def test_a_small_thing_in_an_empty_region_counts() -> None:
    worth = np.zeros((8, 8), np.float32)
    worth[2:6, 2:6] = 1
    assert score(worth) == 1
    worth[2:6, 4:6] = 0
    assert score(worth) == 0.5
    assert score(np.array([[0.7]])) == pytest.approx(0.7)


def test_what_counts_as_content() -> None:
    known = Ways(*(np.array([values], np.float32) for values in ((0.0, 0.1, 0.0), (0.0, 0.0, 0.4), (1.0, 0, 0))))  # fmt: skip
    assert content(known).tolist() == [[False, True, True]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_another_image_changes_nothing(policy: str) -> None:
    one, other = maps(1, 32, 32, 0.4), maps(2, 40, 20, 0.9)
    alone = attend(*one, 300, policy)
    attend(*other, 200, policy)
    assert attend(*one, 300, policy) == alone
