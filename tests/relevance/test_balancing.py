"""Balancing of three maps under three tensions; the effects of load, question and learned weights."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.relevance import balancing
from fovea.relevance.balancing import SPREAD, Balancer, Tensions, Ways, prior

MAP = np.float32
shares = st.floats(0, 1, width=32)
IMAGE = np.full(10, 0.3, np.float32)
"""Statistics of an image, in the form of `Survey.statistics`."""


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
        result = Balancer().balance(maps, Tensions(compress, 1.0, focus))
        assert result.tolist() == ([[1, 0]] if first > second else [[0, 1]])
    between = ways([1, 0, 0.5], [0, 0, 0], [0, 1, 0.5])
    result = Balancer().balance(between, Tensions(0.0, 1.0, 1.0))
    assert result[0] == pytest.approx([0, 1, 0.5], abs=1e-6)


def test_exploration_prefers_cells_that_do_not_stand_out() -> None:
    maps = ways([0, 0], [1, 0], [0, 0])
    assert Balancer().balance(maps, Tensions(0.5, 1.0, 1.0)).tolist() == [[1, 0]]
    assert Balancer().balance(maps, Tensions(0.5, 0.0, 1.0)).tolist() == [[0, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_formula(seed: int) -> None:
    maps, rng = random_ways(seed), np.random.default_rng(seed + 9)
    compress, exploit, focus = (float(value) for value in rng.random(3))
    raw = (maps.propositional + maps.perspectival + 2 * maps.participatory) / 4
    first = compress * maps.propositional + (1 - compress) * maps.participatory
    second = exploit * maps.perspectival + (1 - exploit) * (1 - maps.perspectival)
    third = focus * raw + (1 - focus) * (raw + 0.3 * remoteness(raw))
    expected = unit(0.4 * first + 0.3 * second + 0.3 * third)
    result = Balancer().balance(maps, Tensions(compress, exploit, focus))
    assert result == pytest.approx(expected, abs=1e-5)
    assert result.dtype == np.float32


def test_relevance_is_scaled_within_each_image() -> None:
    """The lowest relevance is 0 and the highest 1, even if two of the maps have half the contrast."""
    maps = random_ways(3)
    faint = Ways(maps.propositional / 2, maps.perspectival, maps.participatory / 2)
    for each in (maps, faint):
        result = Balancer().balance(each, Tensions(0.3, 0.7, 0.6))
        assert result.min() == 0
        assert result.max() == 1
    same = ways([0.4, 0.4], [0.1, 0.1], [1, 1])
    assert not Balancer().balance(same, Tensions(0.3, 0.7, 1.0)).any()


@given(st.integers(0, 10_000), st.integers(0, 34), shares, shares, shares)
def test_a_stronger_coupling_never_lowers_relevance(
    seed: int, cell: int, more: float, compress: float, exploit: float
) -> None:
    """This holds without diversity, and up to rounding."""
    maps = random_ways(seed)
    raised = maps.participatory.copy()
    raised.flat[cell] = max(raised.flat[cell], more)
    tensions = Tensions(compress, exploit, 1.0)
    before = Balancer().balance(maps, tensions)
    after = Balancer().balance(Ways(maps.propositional, maps.perspectival, raised), tensions)
    assert after.flat[cell] >= before.flat[cell] - 1e-5


def test_with_diversity_a_stronger_coupling_can_lower_relevance() -> None:
    """A cell far from the most relevant one gains by its distance, until it is the most relevant itself."""
    maps = np.zeros((1, 9), MAP)
    maps[0, 0], maps[0, 4], maps[0, 8] = 0.5, 0.45, 0.49
    raised = maps.copy()
    raised[0, 8] = 0.51
    nothing = np.zeros_like(maps)
    tensions = Tensions(1.0, 1.0, 0.0)
    before, after = (
        Balancer().balance(Ways(nothing, nothing, each), tensions)[0, 8] for each in (maps, raised)
    )
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


def layer(rng: np.random.Generator, out: int, into: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(out, into)).astype(MAP), rng.normal(size=out).astype(MAP)


def weights(words: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, sizes in (("raw", (3, 4, 1)), ("context", (words + 10, 5, 4, 3))):
        for number, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False)):
            arrays[f"{name}.{number}.weight"], arrays[f"{name}.{number}.bias"] = layer(rng, out, into)
    return arrays


def network(table: dict[str, np.ndarray], name: str, layers: int, x: np.ndarray) -> list[float]:
    for number in range(layers):
        if number:
            x = np.array([max(0.0, value) for value in x])
        rows = zip(table[f"{name}.{number}.weight"], table[f"{name}.{number}.bias"], strict=True)
        x = np.array(
            [
                sum(float(a) * float(b) for a, b in zip(row, x, strict=True)) + float(bias)
                for row, bias in rows
            ]
        )
    return [1 / (1 + math.exp(-value)) for value in x]


def test_learned_weights_step_by_step() -> None:
    table, ways_of_image = weights(), random_ways(5)
    words, statistics = np.array([0.5, -1, 2], MAP), np.linspace(-1, 1, 10).astype(MAP)
    balancer = Balancer(table)
    assert balancer.learns_tensions
    assert not Balancer().learns_tensions
    result = balancer.tensions("Read it", words, statistics)
    maps = (ways_of_image.propositional, ways_of_image.perspectival, ways_of_image.participatory)
    expected = network(table, "context", 3, np.array([*words, *statistics]))
    assert balancer.tensions("Count them", words, statistics) == result
    assert (result.compress, result.exploit, result.focus) == pytest.approx(expected, abs=1e-5)
    raw = np.array(
        [network(table, "raw", 2, np.array([each.flat[cell] for each in maps]))[0] for cell in range(35)]
    ).reshape(5, 7)
    first = result.compress * maps[0] + (1 - result.compress) * maps[2]
    second = result.exploit * maps[1] + (1 - result.exploit) * (1 - maps[1])
    third = raw + (1 - result.focus) * 0.3 * remoteness(raw)
    expected_map = unit(0.4 * first + 0.3 * second + 0.3 * third)
    assert balancer.balance(ways_of_image, result) == pytest.approx(expected_map, abs=1e-5)


def test_without_weights_or_words_the_priors_are_used() -> None:
    for question in ("Read it", "Count them", "What is it?"):
        assert Balancer(weights()).tensions(question, None, IMAGE) == prior(question, IMAGE)
        assert Balancer().tensions(question, np.ones(3, MAP), IMAGE) == prior(question, IMAGE)
        assert Balancer(weights()).tensions(question, np.ones(3, MAP), IMAGE) != prior(question, IMAGE)


def test_large_logits_cause_no_overflow_warning() -> None:
    table = weights()
    table["raw.1.bias"] = np.array([-1000], MAP)
    table["context.2.bias"] = np.array([-1000, 1000, -1000], MAP)
    balancer, maps = Balancer(table), random_ways(7)
    assert balancer.tensions("", np.ones(3, MAP), IMAGE) == Tensions(0.0, 1.0, 0.0)
    assert np.isfinite(balancer.balance(maps, Tensions(1.0, 1.0, 1.0))).all()
