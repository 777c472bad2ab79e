"""Balancing of three maps under three tensions, and the tensions by question, image, look and load."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.relevance import balancing
from fovea.relevance.balancing import SPREAD, Tensions, Ways, balance, spread_of, tensions_for

MAP = np.float32
shares = st.floats(0, 1, width=32)


def ways(propositional: object, perspectival: object, participatory: object) -> Ways:
    return Ways(*(np.array(values, MAP, ndmin=2) for values in (propositional, perspectival, participatory)))


def random_ways(seed: int, rows: int = 5, columns: int = 7) -> Ways:
    return Ways(*np.random.default_rng(seed).random((3, rows, columns)).astype(MAP))


def remoteness(raw: np.ndarray) -> np.ndarray:
    """Distance of each cell to the nearest of the highest fifth (at most 50), divided by the largest."""
    rows, columns = raw.shape
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    peaks = sorted(cells, key=lambda cell: -raw[cell])[: max(1, min(50, raw.size // 5))]
    far = np.array([min(math.hypot((y - v) / rows, (x - u) / columns) for v, u in peaks) for y, x in cells])
    return (far / max(far.max(), 1e-6)).reshape(raw.shape)


def unit(values: np.ndarray) -> np.ndarray:
    return (values - values.min()) / max(values.max() - values.min(), 1e-6)


def test_two_cells_by_hand() -> None:
    """One cell has content, the other is coupled to the question, and neither stands out."""
    maps = ways([1, 0], [0, 0], [0, 1])
    # raw is (1/4, 2/4), so the second cell is the peak, and the first has the largest distance.
    for compress, focus, first, second in (
        (1.0, 1.0, 0.4 + 0.3 / 4, 0.3 / 2),
        (0.0, 1.0, 0.3 / 4, 0.4 + 0.3 / 2),
        (0.5, 0.0, 0.2 + 0.3 / 4 + 0.3 * SPREAD, 0.2 + 0.3 / 2),
    ):
        result = balance(maps, Tensions(compress, 1.0, focus))
        assert result.tolist() == ([[1, 0]] if first > second else [[0, 1]])
    between = ways([1, 0, 0.5], [0, 0, 0], [0, 1, 0.5])
    result = balance(between, Tensions(0.0, 1.0, 1.0))
    assert result[0] == pytest.approx([0, 1, 0.5], abs=1e-6)


def test_exploration_prefers_cells_that_do_not_stand_out() -> None:
    maps = ways([0, 0], [1, 0], [0, 0])
    assert balance(maps, Tensions(0.5, 1.0, 1.0)).tolist() == [[1, 0]]
    assert balance(maps, Tensions(0.5, 0.0, 1.0)).tolist() == [[0, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_formula(seed: int) -> None:
    maps, rng = random_ways(seed), np.random.default_rng(seed + 9)
    compress, exploit, focus = (float(value) for value in rng.random(3))
    raw = (maps.propositional + maps.perspectival + 2 * maps.participatory) / 4
    first = compress * maps.propositional + (1 - compress) * maps.participatory
    second = exploit * maps.perspectival + (1 - exploit) * (1 - maps.perspectival)
    third = focus * raw + (1 - focus) * (raw + 0.3 * remoteness(raw))
    expected = unit(0.4 * first + 0.3 * second + 0.3 * third)
    result = balance(maps, Tensions(compress, exploit, focus))
    assert result == pytest.approx(expected, abs=1e-5)
    assert result.dtype == np.float32


def test_relevance_is_scaled_within_each_image() -> None:
    """The lowest relevance is 0 and the highest 1, even if two of the maps have half the contrast."""
    maps = random_ways(3)
    faint = Ways(maps.propositional / 2, maps.perspectival, maps.participatory / 2)
    for each in (maps, faint):
        result = balance(each, Tensions(0.3, 0.7, 0.6))
        assert result.min() == 0
        assert result.max() == 1
    same = ways([0.4, 0.4], [0.1, 0.1], [1, 1])
    assert not balance(same, Tensions(0.3, 0.7, 1.0)).any()


@given(st.integers(0, 10_000), st.integers(0, 34), shares, shares, shares)
def test_a_stronger_coupling_never_lowers_relevance(
    seed: int, cell: int, more: float, compress: float, exploit: float
) -> None:
    """This holds without diversity, and up to rounding."""
    maps = random_ways(seed)
    raised = maps.participatory.copy()
    raised.flat[cell] = max(raised.flat[cell], more)
    tensions = Tensions(compress, exploit, 1.0)
    before = balance(maps, tensions)
    after = balance(Ways(maps.propositional, maps.perspectival, raised), tensions)
    assert after.flat[cell] >= before.flat[cell] - 1e-5


def test_with_diversity_a_stronger_coupling_can_lower_relevance() -> None:
    """A cell far from the most relevant one gains by its distance, until it is the most relevant itself."""
    maps = np.zeros((1, 9), MAP)
    maps[0, 0], maps[0, 4], maps[0, 8] = 0.5, 0.45, 0.49
    raised = maps.copy()
    raised[0, 8] = 0.51
    nothing = np.zeros_like(maps)
    tensions = Tensions(1.0, 1.0, 0.0)
    before, after = (balance(Ways(nothing, nothing, each), tensions)[0, 8] for each in (maps, raised))
    assert after < before


def test_load_ends_exploration_and_diversity() -> None:
    calm = Tensions(0.4, 0.6, 0.5)
    assert calm.under(0) == calm
    half = calm.under(0.5)
    assert (half.compress, half.exploit, half.focus) == pytest.approx((0.4, 0.8, 0.75))
    for load in (1, 1.0, 7.5):
        assert calm.under(load) == Tensions(0.4, 1.0, 1.0)
    assert calm.under(-3) == calm


@given(shares, shares, shares, st.floats(0, 1), st.floats(0, 1))
def test_more_load_never_means_more_exploration_or_diversity(
    compress: float, exploit: float, focus: float, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    calm, busy = (Tensions(compress, exploit, focus).under(load) for load in (low, high))
    assert busy.compress == calm.compress == compress
    assert calm.exploit <= busy.exploit + 1e-12
    assert calm.focus <= busy.focus + 1e-12
    assert busy.exploit <= 1
    assert busy.focus <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_remoteness_is_the_distance_to_the_nearest_peak(rows: int, columns: int, seed: int) -> None:
    raw = np.random.default_rng(seed).random((rows, columns)).astype(MAP)
    assert balancing.remoteness(raw) == pytest.approx(remoteness(raw), abs=1e-5)


@given(st.text(max_size=40), shares, st.one_of(st.none(), st.floats(0, 1)))
def test_tensions_lie_in_their_ranges(question: str, busy: float, spread: float | None) -> None:
    result = tensions_for(question, busy, spread)
    assert 0.1 <= result.compress <= 0.85 + 1e-9
    assert result.exploit == 0.8
    assert 0.4 <= result.focus <= 0.9


def test_a_question_about_a_small_part_needs_detail() -> None:
    """Up to a tenth of the image it needs the most, from four tenths on the least.

    A look that is spread over the image does not make it one region: a model that does not know where to look
    would encode all of it.
    """
    result = [tensions_for("", 0.3, spread).compress for spread in (0.0, 0.1, 0.25, 0.4, 1.0)]
    assert result == pytest.approx([0.1, 0.1, 0.375, 0.65, 0.65])
    assert tensions_for("", 0.3, None).compress == 0.5, "there is no question"


WHOLE = (
    "How many circles are there?", "count them", "Counting?", "List the things", "Describe the picture.",
    "Is everything blue?", "Are all of them red?", "every one", "Compare both", "What scene is this?",
    "overall?",
)  # fmt: skip
NEITHER = ("What is in the red circle?", "", "Is the bread on the wall?", "an account, a recount, a context")


def test_words_about_the_whole_image_need_the_whole() -> None:
    """Only whole words have this effect, whatever the look says."""
    for question in WHOLE:
        assert tensions_for(question, 0.3, 0.05).compress == 0.85, question
        assert tensions_for(question, 0.3, None).compress == 0.85, question
        assert tensions_for(question, 0.3, 0.9).compress == 0.85, question
    for question in NEITHER:
        assert tensions_for(question, 0.3, 0.05).compress == 0.1, question


@given(shares, shares)
def test_a_busy_image_has_a_lower_focus(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert tensions_for("", high, 0.2).focus <= tensions_for("", low, 0.2).focus
    result = [tensions_for("", busy, 0.2).focus for busy in (0.0, 0.25, 0.6, 1.0)]
    assert result == pytest.approx([0.9, 0.7, 0.42, 0.4], abs=1e-6)


def test_spread_by_hand() -> None:
    """Shares of 1/2, 1/4 and 1/4 have an entropy of 1.5 bits: 2.83 of four cells."""
    assert spread_of(np.array([[2, 1], [1, 0]], MAP)) == pytest.approx(2**1.5 / 4)
    assert spread_of(np.array([[0, 0], [5, 0]], MAP)) == 0.25
    assert spread_of(np.zeros((3, 3), MAP)) == 1, "no cell stands out"


@given(st.integers(1, 40), st.integers(1, 40), st.floats(1 / 64, 8, width=32))
def test_attention_that_is_even_is_spread_over_all_cells_with_it(
    cells: int, blank: int, value: float
) -> None:
    values = np.array([[value] * cells + [0.0] * blank], MAP)
    assert spread_of(values) == pytest.approx(cells / (cells + blank))


@given(st.lists(shares, min_size=1, max_size=30), st.sampled_from((0.125, 0.5, 4.0)))
def test_spread_depends_on_no_scale_and_lies_between_one_cell_and_all(
    values: list[float], scale: float
) -> None:
    table = np.array([values], MAP)
    result = spread_of(table)
    assert 1 / len(values) - 1e-9 <= result <= 1 + 1e-9
    assert spread_of(table * scale) == pytest.approx(result, abs=1e-4)
