"""Coupling of question and image, compared with explicit loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fovea.relevance import knowing
from fovea.relevance.knowing import couple, couple_without_head, resample, similarity
from tests.relevance import naive


def head(image: int, words: int, space: int, hidden: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = {
        "image": (space, image), "words": (2 * space, words), "query": (space, 2 * space),
        "hidden": (hidden, 3 * space), "coupling": (1, hidden),
    }  # fmt: skip
    weights = {f"{name}.weight": draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return weights | {
        f"{name}.bias": draw.normal(size=shape[0]).astype(np.float32) for name, shape in shapes.items()
    }


def linear(weights: dict[str, np.ndarray], name: str, x: list[float]) -> list[float]:
    table, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return [float(bias[i]) + sum(float(table[i, j]) * x[j] for j in range(len(x))) for i in range(len(table))]


def normalize_row(row: np.ndarray) -> list[float]:
    size = math.sqrt(sum(float(value) ** 2 for value in row) / len(row) + 1e-6)
    return [float(value) / size for value in row]


def test_the_learned_head_step_by_step() -> None:
    weights = head(6, 5, 4, 7)
    draw = np.random.default_rng(1)
    features, words = draw.normal(size=(9, 6)).astype(np.float32), draw.normal(size=(3, 5)).astype(np.float32)
    each = [[max(0.0, value) for value in linear(weights, "words", normalize_row(word))] for word in words]
    mean = [sum(column) / len(each) for column in zip(*each, strict=True)]
    query = linear(weights, "query", mean)
    expected = []
    for feature in features:
        image = linear(weights, "image", normalize_row(feature))
        both = [*image, *query, *(a * b for a, b in zip(image, query, strict=True))]
        hidden = [max(0.0, value) for value in linear(weights, "hidden", both)]
        expected.append(1 / (1 + math.exp(-linear(weights, "coupling", hidden)[0])))
    result = couple(weights, features, words)
    assert result.dtype == np.float32
    assert result == pytest.approx(expected, abs=1e-5)


def test_normal_rows_have_a_mean_square_of_one() -> None:
    rows = np.random.default_rng(9).normal(size=(4, 6)) * np.array([[1e-1], [1], [5], [1e3]])
    result = knowing.normalize(rows)
    assert np.square(result).mean(1) == pytest.approx(1, abs=1e-3)
    assert result == pytest.approx(np.array([normalize_row(row) for row in rows]), abs=1e-9)
    assert not knowing.normalize(np.zeros((2, 3))).any()


def test_large_logits_cause_no_overflow_warning() -> None:
    """Logits of 1000 and -1000 give exactly 1 and 0."""
    weights = head(6, 5, 4, 7)
    weights["coupling.weight"] = weights["coupling.weight"] * 0
    for bias, expected in ((1000.0, 1.0), (-1000.0, 0.0)):
        weights["coupling.bias"] = np.array([bias], np.float32)
        assert (
            couple(weights, np.ones((2, 6), np.float32), np.ones((1, 5), np.float32)).tolist()
            == [expected] * 2
        )


def test_the_scale_of_features_and_words_has_no_effect() -> None:
    weights = head(6, 5, 4, 7)
    draw = np.random.default_rng(2)
    features, words = draw.normal(size=(4, 6)), draw.normal(size=(2, 5))
    assert couple(weights, 9 * features, 0.5 * words) == pytest.approx(
        couple(weights, features, words), abs=1e-5
    )


def test_a_token_does_not_depend_on_the_others() -> None:
    weights = head(6, 5, 4, 7)
    draw = np.random.default_rng(3)
    features, words = draw.normal(size=(8, 6)), draw.normal(size=(2, 5))
    assert couple(weights, features[:3], words) == pytest.approx(
        couple(weights, features, words)[:3], abs=1e-6
    )


def test_similarity_is_the_highest_cosine() -> None:
    draw = np.random.default_rng(4)
    features, words = draw.normal(size=(7, 5)), draw.normal(size=(3, 5))
    mean = features.mean(0)
    for token, result in zip(features, similarity(features, words), strict=True):
        off = token - mean
        cosines = [float(off @ word) / math.hypot(*off) / math.hypot(*word) for word in words]
        assert result == pytest.approx(max(cosines), abs=1e-6)
    assert not similarity(np.ones((4, 5)), words).any()


@pytest.mark.parametrize(
    ("shape", "grid"),
    [((1, 1), (3, 4)), ((2, 3), (7, 5)), ((4, 5), (4, 5)), ((3, 8), (30, 41)), ((5, 6), (2, 3))],
)
def test_resampling_is_bilinear(shape: tuple[int, int], grid: tuple[int, int]) -> None:
    values = np.random.default_rng(5).random(shape[0] * shape[1]).astype(np.float32)
    result = resample(values, shape, grid)
    assert result.shape == grid
    assert result.dtype == np.float32
    for row in range(grid[0]):
        for column in range(grid[1]):
            y = (row + 0.5) * shape[0] / grid[0] - 0.5
            x = (column + 0.5) * shape[1] / grid[1] - 0.5
            expected = naive.bilinear(values.reshape(shape), y, x)
            assert result[row, column] == pytest.approx(expected, abs=1e-5)


def test_without_a_head_key_words_count_three_times_as_much_as_similarity() -> None:
    keyword_map = np.zeros((4, 6), np.float32)
    keyword_map[1, 2] = 1
    same = np.ones((6, 5), np.float32)
    assert np.array_equal(
        couple_without_head(same, np.ones((2, 5), np.float32), (2, 3), keyword_map), 0.75 * keyword_map
    )
    draw = np.random.default_rng(6)
    values = couple_without_head(
        draw.normal(size=(6, 5)), draw.normal(size=(2, 5)), (2, 3), np.ones((4, 6), np.float32)
    )
    assert values.min() >= 0.75
    assert values.max() == pytest.approx(1, abs=1e-2)
