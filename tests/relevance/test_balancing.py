"""Three tensions by hand; what a load, a question and weights do to them."""

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
"""Statistics of a picture, as `Survey.statistics` gives them."""


def ways(propositional: object, perspectival: object, participatory: object) -> Ways:
    return Ways(*(np.array(values, MAP, ndmin=2) for values in (propositional, perspectival, participatory)))


def random_ways(seed: int, rows: int = 5, columns: int = 7) -> Ways:
    return Ways(*np.random.default_rng(seed).random((3, rows, columns)).astype(MAP))


def remoteness(raw: np.ndarray) -> np.ndarray:
    """Distance of each cell to the nearest of the highest fifth (at most 50), of the largest such distance."""
    rows, columns = raw.shape
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    peaks = sorted(cells, key=lambda cell: -raw[cell])[: max(1, min(50, raw.size // 5))]
    far = np.array([min(math.hypot((y - v) / rows, (x - u) / columns) for v, u in peaks) for y, x in cells])
    return (far / max(far.max(), 1e-6)).reshape(raw.shape)


def unit(values: np.ndarray) -> np.ndarray:
    return (values - values.min()) / max(values.max() - values.min(), 1e-6)


def test_two_cells_by_hand() -> None:
    """One full of content, one asked for; nothing stands out."""
    known = ways([1, 0], [0, 0], [0, 1])
    # raw: (1/4, 2/4), so the second is the peak and the first is as far as can be.
    for compress, focus, first, second in (
        (1.0, 1.0, 0.4 + 0.3 / 4, 0.3 / 2),
        (0.0, 1.0, 0.3 / 4, 0.4 + 0.3 / 2),
        (0.5, 0.0, 0.2 + 0.3 / 4 + 0.3 * SPREAD, 0.2 + 0.3 / 2),
    ):
        found = Balancer().balance(known, Tensions(compress, 1.0, focus))
        assert found.tolist() == ([[1, 0]] if first > second else [[0, 1]])
    between = ways([1, 0, 0.5], [0, 0, 0], [0, 1, 0.5])
    found = Balancer().balance(between, Tensions(0.0, 1.0, 1.0))
    assert found[0] == pytest.approx([0, 1, 0.5], abs=1e-6)


def test_exploring_prefers_what_does_not_stand_out() -> None:
    known = ways([0, 0], [1, 0], [0, 0])
    assert Balancer().balance(known, Tensions(0.5, 1.0, 1.0)).tolist() == [[1, 0]]
    assert Balancer().balance(known, Tensions(0.5, 0.0, 1.0)).tolist() == [[0, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_formula(seed: int) -> None:
    known, rng = random_ways(seed), np.random.default_rng(seed + 9)
    compress, exploit, focus = (float(value) for value in rng.random(3))
    raw = (known.propositional + known.perspectival + 2 * known.participatory) / 4
    first = compress * known.propositional + (1 - compress) * known.participatory
    second = exploit * known.perspectival + (1 - exploit) * (1 - known.perspectival)
    third = focus * raw + (1 - focus) * (raw + 0.3 * remoteness(raw))
    expected = unit(0.4 * first + 0.3 * second + 0.3 * third)
    found = Balancer().balance(known, Tensions(compress, exploit, focus))
    assert found == pytest.approx(expected, abs=1e-5)
    assert found.dtype == np.float32


def test_each_image_has_its_own_measure() -> None:
    """Halving all contrasts of what is known changes nothing in the order and the ends."""
    known = random_ways(3)
    faint = Ways(known.propositional / 2, known.perspectival, known.participatory / 2)
    for each in (known, faint):
        found = Balancer().balance(each, Tensions(0.3, 0.7, 0.6))
        assert found.min() == 0
        assert found.max() == 1
    same = ways([0.4, 0.4], [0.1, 0.1], [1, 1])
    assert not Balancer().balance(same, Tensions(0.3, 0.7, 1.0)).any()


@given(st.integers(0, 10_000), st.integers(0, 34), shares, shares, shares)
def test_what_is_asked_for_more_is_never_less_relevant(
    seed: int, cell: int, more: float, compress: float, exploit: float
) -> None:
    """While diversity counts for nothing; rounding apart."""
    known = random_ways(seed)
    raised = known.participatory.copy()
    raised.flat[cell] = max(raised.flat[cell], more)
    tensions = Tensions(compress, exploit, 1.0)
    before = Balancer().balance(known, tensions)
    after = Balancer().balance(Ways(known.propositional, known.perspectival, raised), tensions)
    assert after.flat[cell] >= before.flat[cell] - 1e-5


def test_diversity_can_turn_that_round() -> None:
    """A cell that lay far from the most relevant one was interesting for that; having become it, it is not any more."""
    known = np.zeros((1, 9), MAP)
    known[0, 0], known[0, 4], known[0, 8] = 0.5, 0.45, 0.49
    raised = known.copy()
    raised[0, 8] = 0.51
    nothing = np.zeros_like(known)
    tensions = Tensions(1.0, 1.0, 0.0)
    before, after = (
        Balancer().balance(Ways(nothing, nothing, each), tensions)[0, 8] for each in (known, raised)
    )
    assert after < before


def test_load_ends_exploring_and_diversity() -> None:
    calm = Tensions(0.4, 0.6, 0.5)
    assert calm.under(0) == calm
    half = calm.under(0.5)
    assert (half.compress, half.exploit, half.focus) == pytest.approx((0.4, 0.8, 0.75))
    for load in (1, 1.0, 7.5):
        assert calm.under(load) == Tensions(0.4, 1.0, 1.0)
    assert calm.under(-3) == calm


@given(shares, shares, shares, st.floats(0, 1), st.floats(0, 1))
def test_more_load_never_looks_around_more(
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
    made: dict[str, np.ndarray] = {}
    for name, sizes in (("raw", (3, 4, 1)), ("context", (words + 10, 5, 4, 3))):
        for number, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False)):
            made[f"{name}.{number}.weight"], made[f"{name}.{number}.bias"] = layer(rng, out, into)
    return made


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
    table, known = weights(), random_ways(5)
    words, seen = np.array([0.5, -1, 2], MAP), np.linspace(-1, 1, 10).astype(MAP)
    balancer = Balancer(table)
    assert balancer.learns_tensions
    assert not Balancer().learns_tensions
    found = balancer.tensions("Read it", words, seen)
    maps = (known.propositional, known.perspectival, known.participatory)
    expected = network(table, "context", 3, np.array([*words, *seen]))
    assert balancer.tensions("Count them", words, seen) == found
    assert (found.compress, found.exploit, found.focus) == pytest.approx(expected, abs=1e-5)
    raw = np.array(
        [network(table, "raw", 2, np.array([each.flat[cell] for each in maps]))[0] for cell in range(35)]
    ).reshape(5, 7)
    first = found.compress * maps[0] + (1 - found.compress) * maps[2]
    second = found.exploit * maps[1] + (1 - found.exploit) * (1 - maps[1])
    third = raw + (1 - found.focus) * 0.3 * remoteness(raw)
    expected_map = unit(0.4 * first + 0.3 * second + 0.3 * third)
    assert balancer.balance(known, found) == pytest.approx(expected_map, abs=1e-5)


def test_without_weights_or_words_the_priors_hold() -> None:
    for question in ("Read it", "Count them", "What is it?"):
        assert Balancer(weights()).tensions(question, None, IMAGE) == prior(question, IMAGE)
        assert Balancer().tensions(question, np.ones(3, MAP), IMAGE) == prior(question, IMAGE)
        assert Balancer(weights()).tensions(question, np.ones(3, MAP), IMAGE) != prior(question, IMAGE)


def test_a_network_that_is_certain_says_so_quietly() -> None:
    table = weights()
    table["raw.1.bias"] = np.array([-1000], MAP)
    table["context.2.bias"] = np.array([-1000, 1000, -1000], MAP)
    balancer, known = Balancer(table), random_ways(7)
    assert balancer.tensions("", np.ones(3, MAP), IMAGE) == Tensions(0.0, 1.0, 0.0)
    assert np.isfinite(balancer.balance(known, Tensions(1.0, 1.0, 1.0))).all()
