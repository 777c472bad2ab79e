"""Layouts have exactly the given total, begin with the first view, and show first what is asked about."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from fovea.relevance.attending import whole_tokens
from fovea.relevance.balancing import Ways
from fovea.relevance.policy import (
    ASKED,
    LARGE_IMAGE,
    LEAST_CUT,
    LOOK,
    LOOK_SHARE,
    ONE_REGION_COMPRESS,
    Allocation,
    Cells,
    attend,
    content_mask,
    first_view,
    look_shape,
    need,
    score,
)
from fovea.relevance.realizing import SIDE, Region, View, partition, shape_within, token_places, whole
from tests.relevance.division import assert_more_for_the_more_relevant, assert_needs_come_first
from tests.support.thorough import examples

sides = st.integers(1, 48)
large_sides = st.integers(23, 60)
ratios = st.floats(0.0, 1.0, exclude_max=True)
tensions = st.floats(0.0, 1.0)
low_tensions = st.floats(0.0, ONE_REGION_COMPRESS, exclude_max=True)
sizes = st.one_of(
    st.tuples(st.integers(1, 22), st.integers(1, 23)),
    st.tuples(sides, sides),
    st.tuples(large_sides, large_sides),
)
large_sizes = st.one_of(
    st.tuples(large_sides, large_sides),
    st.tuples(st.integers(1, 6), st.integers(512, 700)),
    st.tuples(st.integers(512, 700), st.integers(1, 6)),
)


def plain(relevance: np.ndarray, content: np.ndarray) -> Cells:
    """Cells that no question is about, and that need full resolution."""
    nothing = np.zeros(relevance.shape, np.float32)
    return Cells(relevance, content, nothing, np.ones(relevance.shape, np.float32))


def maps(seed: int, rows: int, columns: int, filled: float) -> Cells:
    draw = np.random.default_rng(seed)
    return plain(draw.random((rows, columns)).astype(np.float32), draw.random((rows, columns)) < filled)


def uneven_maps(seed: int, rows: int, columns: int, filled: float, places: int = 0) -> Cells:
    """Maps with a relevant place, at which there is more content than elsewhere.

    places: so many places are asked about, of different strengths; the first is the relevant one.
    """
    draw = np.random.default_rng(seed)
    down, across = np.mgrid[:rows, :columns]

    def bump() -> np.ndarray:
        row, column, reach = draw.integers(rows), draw.integers(columns), draw.uniform(1, 15)
        return np.exp(-((down - row) ** 2 + (across - column) ** 2) / (2 * reach**2))

    near = bump()
    cells = maps(seed, rows, columns, filled)
    asked = np.zeros((rows, columns))
    for place in range(places):
        asked = np.maximum(asked, draw.uniform(0.2, 1) * bump() if place else near)
    detail = np.where(draw.random((rows, columns)) < draw.random(), 1.0, 0.5)
    return Cells(
        (0.3 * cells.relevance + 0.7 * near).astype(np.float32),
        cells.content | (near > draw.uniform(0.2, 1)),
        asked.astype(np.float32),
        detail.astype(np.float32),
    )


def needs_of(result: Allocation, cells: Cells) -> list[int]:
    """The need of each region."""
    about = cells.asked >= ASKED
    places = [region.cells for region in result.regions]
    return [need(cells.content[place], about[place], cells.detail[place]) for place in places]


def native_cells(views: tuple[View, ...], grid: tuple[int, int]) -> np.ndarray:
    """The cells of which a token at native resolution is kept."""
    shown = np.zeros(grid, bool)
    for view in views:
        if view.native:
            places = token_places(view.region, view.shape)[list(view.token_indices)]
            shown[places[:, 0], places[:, 1]] = True
    return shown


@settings(max_examples=examples(200))
@given(
    sizes,
    ratios,
    tensions,
    st.integers(0, 99),
    st.floats(0, 1),
    st.integers(0, 3),
    st.sampled_from((SIDE, 3, 8, 100)),
)
def test_layouts_have_exactly_the_total(
    size: tuple[int, int], ratio: float, compress: float, seed: int, filled: float, places: int, side: int
) -> None:
    rows, columns = size
    total = max(1, int(ratio * rows * columns))
    if total == rows * columns:
        return
    cells = uneven_maps(seed, rows, columns, filled, places)
    result = attend(cells, total, compress, side)
    layout = result.layout
    assert layout.tokens == total
    assert layout.grid == (rows, columns)
    assert result.full == rows * columns
    assert layout.places().shape == (total, 2)
    assert (layout.places() >= 0).all()
    assert (layout.places() < [rows, columns]).all()
    for view in layout.views:
        assert list(view.token_indices) == sorted(set(view.token_indices))
        assert all(0 <= index < view.shape[0] * view.shape[1] for index in view.token_indices)
    one = len(layout.views) == 1
    budgets = [budget for budget in result.budgets if budget]
    assert [view.tokens for view in layout.views[0 if one else 1 :]] == budgets
    assert all(budget <= region.tokens for budget, region in zip(result.budgets, result.regions, strict=True))
    count = np.zeros((rows, columns), int)
    for region in result.regions:
        count[region.cells] += 1
    assert (count == 1).all()
    repeated = attend(replace(cells, relevance=cells.relevance.copy()), total, compress, side)
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
    cells = uneven_maps(seed, rows, columns, 0.3, seed % 3)
    first = attend(cells, total, compress, side).layout.views[0]
    assert first.region == whole(rows, columns)
    assert first.shape == first_view((rows, columns), total, compress, int(cells.content.sum()))


@given(large_sides, large_sides, ratios, low_tensions, st.integers(0, 99))
def test_the_whole_of_a_large_image_is_complete_and_takes_its_share(
    rows: int, columns: int, ratio: float, compress: float, seed: int
) -> None:
    """It is complete if nothing is asked about. It takes more only if there is room for all content, too."""
    total = max(1, int(ratio * rows * columns))
    cells = maps(seed, rows, columns, 0.3)
    result = attend(cells, total, compress)
    first = result.layout.views[0]
    share = whole_tokens(total, compress)
    assert first.token_indices == tuple(range(first.shape[0] * first.shape[1]))
    assert first.shape in (shape_within(rows, columns, share), look_shape((rows, columns)))
    assert first.tokens <= max(share, total - int(cells.content.sum()))
    assert share < 16 or first.tokens > 0.5 * share
    if first.tokens < total:
        assert sum(result.budgets) == total - first.tokens


@given(large_sides, large_sides, ratios, st.floats(ONE_REGION_COMPRESS, 1.0), st.integers(0, 99))
def test_an_image_that_is_needed_completely_is_one_view(
    rows: int, columns: int, ratio: float, compress: float, seed: int
) -> None:
    """On a smaller picture, a tenth of the counts was wrong that is right with native tokens."""
    total = max(1, int(ratio * rows * columns))
    result = attend(uneven_maps(seed, rows, columns, 0.3, 1), total, compress)
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
    [view] = attend(uneven_maps(seed, rows, columns, 0.3, 1), total, compress).layout.views
    assert view.region == whole(rows, columns)
    assert view.shape == (rows, columns)


def test_the_size_from_which_an_image_has_regions() -> None:
    assert LARGE_IMAGE == 512
    assert len(attend(maps(0, 22, 23, 0.5), 100, 0.2).layout.views) == 1
    assert len(attend(maps(0, 16, 32, 0.5), 100, 0.2).layout.views) > 1


def test_the_first_view_grows_with_the_compress_tension() -> None:
    shapes = [
        first_view((32, 32), 400, compress, 400)
        for compress in (0.0, 0.2, 0.4, 0.6, 0.69, ONE_REGION_COMPRESS, 1.0)
    ]
    tokens = [rows * columns for rows, columns in shapes]
    assert tokens == sorted(tokens)
    assert tokens[0] <= 40
    assert 230 < tokens[-3] <= 0.652 * 400
    assert tokens[-2] == tokens[-1] == 32 * 32


def test_the_view_that_the_model_looks_at_by_hand() -> None:
    assert (LOOK, LOOK_SHARE) == (192, 8)
    assert look_shape((32, 32)) == (13, 13)
    assert look_shape((64, 64)) == (22, 22)
    assert look_shape((22, 23)) == (22, 23), "a small image is looked at as it is"


@given(large_sides, large_sides)
def test_a_look_has_about_its_number_of_tokens(rows: int, columns: int) -> None:
    down, across = look_shape((rows, columns))
    wanted = max(LOOK, rows * columns // LOOK_SHARE)
    assert 0.7 * wanted <= down * across <= wanted


def test_with_room_for_all_content_the_first_view_is_the_one_that_was_looked_at() -> None:
    """That view is encoded already. A view that would be larger anyway stays."""
    looked = look_shape((32, 32))
    room = 400 - looked[0] * looked[1]
    assert first_view((32, 32), 400, 0.1, room) == looked
    assert first_view((32, 32), 400, 0.1, room + 1) == shape_within(32, 32, 72) != looked
    assert first_view((32, 32), 500, 0.69, 0) == shape_within(32, 32, whole_tokens(500, 0.69)) == (18, 18)


@pytest.mark.parametrize("total", [0, -1, 100, 101])
def test_totals_of_all_tokens_or_none_are_refused(total: int) -> None:
    """An image that keeps all tokens takes the plain path instead."""
    with pytest.raises(ValueError, match=f"{total} of 100 tokens cannot be chosen; accepted: 1 to 99"):
        attend(maps(0, 10, 10, 0.5), total)


def test_small_images_lose_their_blank_cells_at_full_resolution() -> None:
    cells = maps(1, 10, 12, 0.0)
    cells.content[2:5, 3:8] = True
    cells.relevance[cells.content] += 1
    result = attend(cells, 20, 0.1)
    [view] = result.layout.views
    assert view.native
    mask = np.zeros(120, bool)
    mask[list(view.token_indices)] = True
    assert mask.reshape(10, 12)[cells.content].all()
    assert result.demands == (15,)


def test_a_region_whose_content_fits_is_native() -> None:
    relevance = np.full((32, 32), 0.1, np.float32)
    content = np.zeros((32, 32), bool)
    relevance[0:8, 0:8], content[0:4, 0:8] = 0.95, True
    result = attend(plain(relevance, content), 200, 0.1)
    first = next(view for view in result.layout.views if view.region == result.regions[0])
    assert first.native
    assert first.tokens >= 32


@settings(max_examples=examples(300))
@given(
    large_sizes,
    st.one_of(ratios, st.floats(0.0, 0.1)),
    low_tensions,
    st.integers(0, 9999),
    st.floats(0, 1),
    st.integers(0, 3),
    st.sampled_from((SIDE, 3, 8)),
)
def test_what_is_asked_about_can_be_read_before_anything_else_is_shown(
    size: tuple[int, int], ratio: float, compress: float, seed: int, filled: float, places: int, side: int
) -> None:
    """The properties of `attending.allocate` hold for all regions, also for those that were cut.

    A region with its demand in tokens is native, and shows all of its content. Any other region is encoded at
    a resolution at which its content has as many tokens as it got.
    """
    rows, columns = size
    cells = uneven_maps(seed, rows, columns, filled, places)
    result = attend(cells, 1 + int(ratio * (rows * columns - 2)), compress, side)
    if len(result.layout.views) == 1:
        return
    natives, needs = [region.tokens for region in result.regions], needs_of(result, cells)
    assert_needs_come_first(result.demands, needs, result.budgets)
    assert_more_for_the_more_relevant(result.scores, natives, result.demands, needs, result.budgets)
    demands = dict(zip(result.regions, result.demands, strict=True))
    for view in result.layout.views[1:]:
        demand, area = demands[view.region], view.shape[0] * view.shape[1]
        assert view.native or view.tokens < demand
        if view.tokens < demand:
            assert area * demand >= view.tokens * view.region.tokens
        else:
            kept = token_places(view.region, view.shape)[list(view.token_indices)]
            assert cells.content[kept[:, 0], kept[:, 1]].sum() == demand


@settings(max_examples=examples(200))
@given(large_sizes, st.floats(0.02, 0.9), low_tensions, st.integers(0, 9999), st.floats(0, 1))
def test_the_asked_place_is_read_even_if_its_region_is_too_large(
    size: tuple[int, int], ratio: float, compress: float, seed: int, filled: float
) -> None:
    """The peak of the only place that is asked about is shown as well as it needs, by a part of its region.

    Regions are cut only if there are tokens for four cells.
    """
    rows, columns = size
    cells = uneven_maps(seed, rows, columns, filled, 1)
    result = attend(cells, 1 + int(ratio * (rows * columns - 2)), compress)
    if len(result.layout.views) == 1 or sum(result.budgets) < LEAST_CUT:
        return
    needs = needs_of(result, cells)
    if not any(needs):
        return
    best = min(
        (index for index, tokens in enumerate(needs) if tokens),
        key=lambda index: (-np.float32(result.scores[index]), index),
    )
    assert result.budgets[best] >= needs[best]


@settings(max_examples=examples(200))
@given(
    st.tuples(large_sides, large_sides),
    st.one_of(ratios, st.floats(0.0, 0.2)),
    low_tensions,
    st.integers(0, 9999),
    st.floats(0, 1),
    st.integers(1, 3),
)
def test_the_small_view_leaves_out_only_what_is_shown_natively(
    size: tuple[int, int], ratio: float, compress: float, seed: int, filled: float, places: int
) -> None:
    """A token of the view of the whole is left out only if its region shows all of its content natively."""
    rows, columns = size
    cells = uneven_maps(seed, rows, columns, filled, places)
    result = attend(cells, 1 + int(ratio * (rows * columns - 2)), compress)
    if len(result.layout.views) == 1:
        return
    first, *rest = result.layout.views
    shown = native_cells(tuple(rest), size)
    for region, demand in zip(result.regions, result.demands, strict=True):
        is_native = demand > 0 and bool(shown[region.cells][cells.content[region.cells]].all())
        if not is_native or not (cells.asked[region.cells] >= ASKED).any():
            assert missing(first)[region.cells].sum() == 0, region


def missing(first: View) -> np.ndarray:
    """The cells at the centres of tokens that a view leaves out, as a mask of its region."""
    places = token_places(first.region, first.shape)
    left = np.ones(len(places), bool)
    left[list(first.token_indices)] = False
    mask = np.zeros((first.region.rows, first.region.columns), bool)
    mask[tuple(places[left].T)] = True
    return mask


def asked_page(detail: float = 1.0) -> Cells:
    """28x28 cells full of text, of which one line is asked about."""
    relevance, asked = np.full((28, 28), 0.1, np.float32), np.zeros((28, 28), np.float32)
    relevance[18:20, 17:25], asked[18:20, 17:25] = 0.9, 1
    return Cells(relevance, np.ones((28, 28), bool), asked, np.full((28, 28), detail, np.float32))


def test_the_asked_region_is_not_shown_a_second_time_in_the_small_view() -> None:
    """By hand: the line's region is shown natively, so the view of the whole has no token there."""
    cells = asked_page()
    cells.content[:, :] = False
    cells.content[18:20, 17:25] = True
    result = attend(cells, 120, 0.0)
    first, region, *_ = result.layout.views
    [about] = [each for each in result.regions if (cells.asked[each.cells] >= ASKED).any()]
    assert missing(first)[about.cells].sum() == missing(first).sum() > 0
    assert not native_cells((first,), (28, 28)).any()
    assert native_cells(result.layout.views, (28, 28))[18:20, 17:25].all()
    assert result.layout.tokens == 120


def test_a_blank_region_that_is_asked_about_stays_in_the_small_view() -> None:
    """It counted as shown natively, with no tokens at all."""
    cells = asked_page()
    cells.content[:, :] = False
    cells.content[2:6, 2:6] = True
    first = attend(cells, 120, 0.0).layout.views[0]
    assert not missing(first).any()


@pytest.mark.parametrize("total", [60, 120, 180])
def test_a_region_that_is_too_large_is_cut_around_its_peak(total: int) -> None:
    """On a page full of text, the region of the question's line was too large, and shown at 64 tokens."""
    cells = asked_page()
    result = attend(cells, total, 0.0)
    assert native_cells(result.layout.views, (28, 28))[18:20, 17:25].all()
    assert len(result.regions) > len(partition(cells.content))
    assert sum(region.tokens for region in result.regions) == 28 * 28


def test_large_letters_need_a_quarter_of_the_tokens() -> None:
    """They can be read at half the resolution per side, so their region fits and is not cut."""
    total = 28 * 28 // 8
    small, large = (attend(asked_page(detail), total, 0.0) for detail in (1.0, 0.5))
    regions = partition(asked_page().content)
    assert large.regions == regions != small.regions
    best = large.regions.index(Region(14, 14, 14, 14))
    assert large.budgets[best] >= 14 * 14 // 4


def test_a_region_that_nothing_is_asked_about_is_not_cut() -> None:
    cells = asked_page()
    cells.asked[:] = 0
    assert attend(cells, 120, 0.0).regions == partition(cells.content)


def test_a_region_that_fits_is_not_cut() -> None:
    cells = asked_page()
    cells.content[:] = False
    cells.content[16:22, 16:26] = True
    result = attend(cells, 28 * 28 // 4, 0.0)
    assert result.regions == partition(cells.content)
    assert max(result.budgets) >= max(result.demands) == 6 * 10


@given(large_sides, large_sides, st.integers(0, 99), st.integers(0, 99))
def test_all_questions_get_the_same_regions_unless_one_is_cut(
    rows: int, columns: int, one: int, other: int
) -> None:
    """So a second question finds regions in the cache. With enough tokens for its needs, none is cut."""
    cells = uneven_maps(one, rows, columns, 0.2, 2)
    second = uneven_maps(other, rows, columns, 0.2, 2)
    second = replace(second, content=cells.content)
    regions, total = partition(cells.content), int(0.95 * rows * columns)
    down, across = first_view((rows, columns), total, 0.1, int(cells.content.sum()))
    for each in (cells, second):
        result = attend(each, total, 0.1)
        needs = needs_of(replace(result, regions=regions), each)
        assert result.regions == regions or sum(needs) > total - down * across


def test_the_most_relevant_region_gets_the_most() -> None:
    relevance, content = np.full((32, 32), 0.05, np.float32), np.ones((32, 32), bool)
    relevance[8:16, 16:24] = 1
    for compress in (0.0, 0.5):
        result = attend(plain(relevance, content), 256, compress, side=8)
        best = [(region.row, region.column) for region in result.regions].index((8, 16))
        assert result.budgets[best] == max(result.budgets) == 64
        assert result.scores[best] == 1


def test_need_by_hand() -> None:
    """All content, at the resolution of the finest cell that is asked about and has content."""
    content, about = np.zeros((4, 5), bool), np.zeros((4, 5), bool)
    level = np.full((4, 5), 0.5, np.float32)
    content[0, :] = content[1, :3] = True
    assert need(content, about, level) == 0, "not asked about"
    about[3] = True
    assert need(content, about, level) == 0, "only blank cells are asked about"
    about[0, 0] = True
    assert need(content, about, level) == 2, "a quarter of 8 cells"
    content[1, 3] = True
    assert need(content, about, level) == 3, "a quarter of 9 cells"
    level[1, 1] = level[3, 0] = 1
    assert need(content, about, level) == 3, "small letters elsewhere in the region do not count"
    level[0, 0] = 1
    assert need(content, about, level) == 9


def test_a_region_counts_by_the_cells_that_are_asked_about() -> None:
    """A line of text that is a small part of its region once counted less than a large thing elsewhere."""
    relevance = np.full((8, 8), 0.1, np.float32)
    relevance[3, :2] = 0.8
    about = relevance > 0.5
    assert score(relevance) == pytest.approx((2 * 0.8 + 14 * 0.1) / 16)
    assert score(relevance, about) == pytest.approx(0.8)
    assert score(relevance, ~about & (relevance < 0)) == score(relevance)
    about[5, 5] = True
    assert score(relevance, about) == pytest.approx((2 * 0.8 + 0.1) / 3)
    assert score(1 - relevance, about) == pytest.approx(0.9), "not less than without the question"


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


def test_a_layout_does_not_depend_on_other_images() -> None:
    one, other = uneven_maps(1, 32, 32, 0.4, 1), uneven_maps(2, 40, 20, 0.9, 1)
    alone = attend(one, 300, 0.3)
    attend(other, 200, 0.3)
    assert attend(one, 300, 0.3) == alone


@pytest.mark.parametrize("total", [300, 400, 500])
def test_a_view_of_the_whole_remains_if_everything_is_asked_about(total: int) -> None:
    """On a banner with one line of text every region was native, and the small view lost all tokens."""
    grid = 12, 44
    even = np.ones(grid, np.float32)
    everything = Cells(even, even > 0, even, even / 2)
    result = attend(everything, total, 0.1)
    first = result.layout.views[0]
    assert 2 * first.tokens >= first.shape[0] * first.shape[1]
    assert result.layout.tokens == total
