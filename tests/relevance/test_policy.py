"""Layouts have exactly the given number of tokens, and begin with the first view of the whole."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from fovea.relevance.attending import POLICIES, whole_tokens
from fovea.relevance.balancing import Ways
from fovea.relevance.policy import (
    LARGE_IMAGE,
    LEAST_CUT,
    ONE_REGION_COMPRESS,
    attend,
    content_mask,
    first_view,
    score,
)
from fovea.relevance.realizing import SIDE, partition, shape_within, token_places, whole
from tests.relevance.division import assert_more_for_the_more_relevant
from tests.support.thorough import examples

sides = st.integers(1, 48)
large_sides = st.integers(23, 60)
ratios = st.floats(0.0, 1.0, exclude_max=True)
tensions = st.floats(0.0, 1.0)
sizes = st.one_of(
    st.tuples(st.integers(1, 22), st.integers(1, 23)),
    st.tuples(sides, sides),
    st.tuples(large_sides, large_sides),
)


def maps(seed: int, rows: int, columns: int, filled: float) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.random((rows, columns)).astype(np.float32), draw.random((rows, columns)) < filled


@settings(max_examples=examples(200))
@given(
    sizes,
    ratios,
    tensions,
    st.integers(0, 99),
    st.floats(0, 1),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from((SIDE, 3, 8, 100)),
)
def test_layouts_have_exactly_the_total(
    size: tuple[int, int],
    ratio: float,
    compress: float,
    seed: int,
    filled: float,
    policy: str,
    side: int,
) -> None:
    rows, columns = size
    total = max(1, int(ratio * rows * columns))
    if total == rows * columns:
        return
    relevance, content = maps(seed, rows, columns, filled)
    result = attend(relevance, content, total, compress, policy, side)
    layout = result.layout
    assert layout.tokens == total
    assert layout.grid == (rows, columns)
    assert result.full == rows * columns
    places = layout.places()
    assert places.shape == (total, 2)
    assert (places >= 0).all()
    assert (places < [rows, columns]).all()
    for view in layout.views:
        assert list(view.token_indices) == sorted(set(view.token_indices))
        assert view.token_indices[0] >= 0
        assert view.token_indices[-1] < view.shape[0] * view.shape[1]
    budgets = [budget for budget in result.budgets if budget]
    beside = sum(budgets) < total
    assert [view.tokens for view in layout.views[beside:]] == budgets
    assert all(budget <= region.tokens for budget, region in zip(result.budgets, result.regions, strict=True))
    repeated = attend(relevance.copy(), content.copy(), total, compress, policy, side)
    assert repeated == result


@settings(max_examples=examples(200))
@given(
    sizes,
    st.one_of(ratios, st.sampled_from((1, 2, 3, 4, 5))),
    tensions,
    st.integers(0, 99),
    st.sampled_from((SIDE, 4, 100)),
)
@example((20, 16), 2, 0.85, 0, SIDE)
@example((16, 16), 3, 0.95, 0, SIDE)
def test_the_whole_comes_first_in_the_shape_of_the_first_view(
    size: tuple[int, int], ratio: float, compress: float, seed: int, side: int
) -> None:
    """Otherwise it would be encoded twice. A layout once began with another shape of similar size."""
    rows, columns = size
    total = ratio if isinstance(ratio, int) else max(1, int(ratio * rows * columns))
    if total >= rows * columns:
        return
    first = attend(*maps(seed, rows, columns, 0.3), total, compress, side=side).layout.views[0]
    assert first.region == whole(rows, columns)
    assert first.shape == first_view((rows, columns), total, compress)


@given(
    large_sides,
    large_sides,
    ratios,
    st.floats(0.0, ONE_REGION_COMPRESS, exclude_max=True),
    st.integers(0, 99),
)
def test_the_whole_of_a_large_image_is_complete_and_takes_its_share(
    rows: int, columns: int, ratio: float, compress: float, seed: int
) -> None:
    total = max(1, int(ratio * rows * columns))
    result = attend(*maps(seed, rows, columns, 0.3), total, compress)
    first = result.layout.views[0]
    share = whole_tokens(total, compress)
    assert first.shape == shape_within(rows, columns, share)
    assert first.token_indices == tuple(range(first.shape[0] * first.shape[1]))
    assert first.tokens <= share
    assert share < 16 or first.tokens > 0.5 * share
    if first.tokens < total:
        assert sum(result.budgets) == total - first.tokens


@given(large_sides, large_sides, ratios, st.floats(ONE_REGION_COMPRESS, 1.0), st.integers(0, 99))
def test_an_image_that_is_needed_completely_is_one_view(
    rows: int, columns: int, ratio: float, compress: float, seed: int
) -> None:
    """On a smaller picture, a tenth of the counts was wrong that is right with native tokens."""
    total = max(1, int(ratio * rows * columns))
    result = attend(*maps(seed, rows, columns, 0.3), total, compress)
    [view] = result.layout.views
    assert view.native
    assert view.tokens == total
    assert result.regions == (whole(rows, columns),)
    assert result.budgets == (total,)


@given(st.integers(1, 22), st.integers(1, 23), ratios, tensions, st.integers(0, 99))
def test_a_small_image_is_one_view(rows: int, columns: int, ratio: float, compress: float, seed: int) -> None:
    """It is encoded at native resolution under every tension, because a lower one costs more accuracy."""
    total = max(1, int(ratio * rows * columns))
    if total == rows * columns:
        return
    [view] = attend(*maps(seed, rows, columns, 0.3), total, compress).layout.views
    assert view.region == whole(rows, columns)
    assert view.shape == (rows, columns)


def test_the_size_from_which_an_image_has_regions() -> None:
    assert LARGE_IMAGE == 512
    assert len(attend(*maps(0, 22, 23, 0.5), 100, 0.2).layout.views) == 1
    assert len(attend(*maps(0, 16, 32, 0.5), 100, 0.2).layout.views) > 1


def test_the_first_view_grows_with_the_compress_tension() -> None:
    shapes = [
        first_view((32, 32), 400, compress)
        for compress in (0.0, 0.2, 0.4, 0.6, 0.69, ONE_REGION_COMPRESS, 1.0)
    ]
    tokens = [rows * columns for rows, columns in shapes]
    assert tokens == sorted(tokens)
    assert tokens[0] <= 40
    assert 230 < tokens[-3] <= 0.652 * 400
    assert tokens[-2] == tokens[-1] == 32 * 32


@pytest.mark.parametrize("total", [0, -1, 100, 101])
def test_totals_of_all_tokens_or_none_are_refused(total: int) -> None:
    """An image that keeps all tokens takes the plain path instead."""
    with pytest.raises(ValueError, match=f"{total} of 100 tokens cannot be chosen; accepted: 1 to 99"):
        attend(*maps(0, 10, 10, 0.5), total)


def test_small_images_lose_their_blank_cells_at_full_resolution() -> None:
    relevance, content = maps(1, 10, 12, 0.0)
    content[2:5, 3:8] = True
    relevance[content] += 1
    result = attend(relevance, content, 20, 0.1)
    [view] = result.layout.views
    assert view.native
    mask = np.zeros(120, bool)
    mask[list(view.token_indices)] = True
    assert mask.reshape(10, 12)[content].all()
    assert result.demands == (15,)


def test_a_region_whose_content_fits_is_native() -> None:
    relevance = np.full((32, 32), 0.1, np.float32)
    content = np.zeros((32, 32), bool)
    relevance[0:8, 0:8], content[0:4, 0:8] = 0.95, True
    result = attend(relevance, content, 200, 0.1, "sharp")
    first = next(view for view in result.layout.views if view.region == result.regions[0])
    assert first.native
    assert first.tokens >= 32


@settings(max_examples=examples(300))
@given(
    st.one_of(
        st.tuples(large_sides, large_sides),
        st.tuples(st.integers(1, 6), st.integers(512, 700)),
        st.tuples(st.integers(512, 700), st.integers(1, 6)),
    ),
    st.one_of(ratios, st.floats(0.0, 0.1)),
    st.floats(0.0, ONE_REGION_COMPRESS, exclude_max=True),
    st.integers(0, 9999),
    st.floats(0, 1),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from((SIDE, 3, 8)),
)
def test_a_more_relevant_region_is_shown_at_least_as_well(
    size: tuple[int, int],
    ratio: float,
    compress: float,
    seed: int,
    filled: float,
    policy: str,
    side: int,
) -> None:
    """The property of `attending.allocate` holds for all regions, also for those that were cut.

    A region with its demand in tokens is native, and shows all of its content. Any other region is encoded at
    a resolution at which its content has as many tokens as it got. The most relevant region is native,
    because it is cut if it is too large.
    """
    rows, columns = size
    relevance, content = uneven_maps(seed, rows, columns, filled)
    result = attend(relevance, content, 1 + int(ratio * (rows * columns - 2)), compress, policy, side)
    divided = sum(result.budgets)
    if divided == result.layout.tokens:
        return
    natives = [region.tokens for region in result.regions]
    assert_more_for_the_more_relevant(result.scores, natives, result.demands, result.budgets)
    best = min(range(len(natives)), key=lambda index: (-np.float32(result.scores[index]), index))
    assert result.budgets[best] >= result.demands[best] or divided < LEAST_CUT
    demands = dict(zip(result.regions, result.demands, strict=True))
    for view in result.layout.views[1:]:
        demand, cells = demands[view.region], view.shape[0] * view.shape[1]
        assert view.native or view.tokens < demand
        if view.tokens < demand:
            assert cells * demand >= view.tokens * view.region.tokens
        else:
            places = token_places(view.region, view.shape)[list(view.token_indices)]
            assert content[places[:, 0], places[:, 1]].sum() == demand


def uneven_maps(seed: int, rows: int, columns: int, filled: float) -> tuple[np.ndarray, np.ndarray]:
    """Maps with a relevant place, at which there is more content than elsewhere."""
    draw = np.random.default_rng(seed)
    down, across = np.mgrid[:rows, :columns]
    row, column, reach = draw.integers(rows), draw.integers(columns), draw.uniform(1, 15)
    near = np.exp(-((down - row) ** 2 + (across - column) ** 2) / (2 * reach**2))
    relevance, content = maps(seed, rows, columns, filled)
    return (0.3 * relevance + 0.7 * near).astype(np.float32), content | (near > draw.uniform(0.2, 1))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("total", [60, 120, 180])
def test_a_region_that_is_too_large_is_cut_around_its_peak(policy: str, total: int) -> None:
    """On a page full of text, the region of the question's line was too large, and shown at 64 tokens."""
    relevance, content = np.full((28, 28), 0.1, np.float32), np.ones((28, 28), bool)
    relevance[18:20, 17:25] = 0.9
    result = attend(relevance, content, total, 0.0, policy)
    native = np.zeros((28, 28), bool)
    for view in result.layout.views[1:]:
        if view.native and view.tokens == view.region.tokens:
            native[view.region.cells] = True
    assert native[18:20, 17:25].all()
    assert len(result.regions) > len(partition(content))
    assert sum(region.tokens for region in result.regions) == 28 * 28


def test_a_region_that_fits_is_not_cut() -> None:
    relevance, content = np.full((28, 28), 0.1, np.float32), np.zeros((28, 28), bool)
    relevance[18:20, 17:25], content[16:22, 14:28] = 0.9, True
    result = attend(relevance, content, 28 * 28 // 4, 0.0)
    assert result.regions == partition(content)
    assert max(result.budgets) >= max(result.demands) == 6 * 14


def test_the_most_relevant_region_gets_the_most() -> None:
    relevance, content = np.full((32, 32), 0.05, np.float32), np.ones((32, 32), bool)
    relevance[8:16, 16:24] = 1
    for policy, compress in product(POLICIES, (0.0, 0.5)):
        result = attend(relevance, content, 256, compress, policy, side=8)
        best = [(region.row, region.column) for region in result.regions].index((8, 16))
        assert result.budgets[best] == max(result.budgets) == 64
        assert result.scores[best] == 1


def test_a_small_thing_in_an_empty_region_counts() -> None:
    relevance = np.zeros((8, 8), np.float32)
    relevance[2:6, 2:6] = 1
    assert score(relevance) == 1
    relevance[2:6, 4:6] = 0
    assert score(relevance) == 0.5
    assert score(np.array([[0.7]])) == pytest.approx(0.7)


def test_content_by_propositional_or_perspectival_value() -> None:
    known = Ways(
        *(np.array([values], np.float32) for values in ((0.0, 0.1, 0.0), (0.0, 0.0, 0.4), (1.0, 0, 0)))
    )
    assert content_mask(known.propositional, known.perspectival).tolist() == [[False, True, True]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_layout_does_not_depend_on_other_images(policy: str) -> None:
    one, other = maps(1, 32, 32, 0.4), maps(2, 40, 20, 0.9)
    alone = attend(*one, 300, 0.3, policy)
    attend(*other, 200, 0.3, policy)
    assert attend(*one, 300, 0.3, policy) == alone
