"""Coupling by what was read, with weights made by hand so that the results are known."""

from __future__ import annotations

import numpy as np
import pytest

from fovea.relevance import reading
from fovea.relevance.reading import SPAN, couple_by_reading

WIDTH = 8
"""Values of a token; token number n has its value n set, like the word that it shows."""


def head() -> dict[str, np.ndarray]:
    """A head whose tokens light up by the match with a word, and by a lit token before them in their row."""
    depth = WIDTH
    weights = {}
    for layer, (rows, columns) in reading.shapes(WIDTH, depth).items():
        weights[f"{layer}.weight"] = np.zeros((rows, columns), np.float32)
        weights[f"{layer}.bias"] = np.zeros(rows, np.float32)
    one = np.eye(depth, dtype=np.float32)
    weights["span.weight"][:, :WIDTH] = one
    weights["key.weight"] = one
    weights["image.weight"] = one
    # The first of a token's states is its best match with a word, above what no match has.
    weights["token.weight"][0, -1] = 1.0
    weights["token.bias"][0] = -2.0
    # In the first round the second state is the highest first state before it in the row.
    weights["mix.0.weight"][1, depth] = 1.0
    weights["score.weight"][0, :2] = (4.0, 2.0)
    weights["score.bias"][0] = -1.0
    return weights


def shown(*tokens: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Features and held cells of a grid of 3 x 4. tokens: row, column and the word that stands there."""
    features, held = np.zeros((3, 4, WIDTH), np.float32), np.zeros((3, 4), bool)
    for row, column, word in tokens:
        features[row, column, word] = 1.0
        held[row, column] = True
    return features, held


def question(*words: int) -> np.ndarray:
    return np.eye(WIDTH, dtype=np.float32)[list(words)]


def test_the_label_and_what_follows_it_in_its_row_light_up() -> None:
    """The value (word 5) is not in the question. It stands to the right of the label (word 2)."""
    features, held = shown((0, 0, 1), (1, 0, 2), (1, 2, 5), (2, 0, 3), (2, 2, 6))
    result = couple_by_reading(head(), features, held, question(7, 2))
    assert result[1, 0] > 0.5
    assert result[1, 2] > 0.5
    assert max(result[0, 0], result[2, 0], result[2, 2]) < 0.5


def test_cells_that_were_not_encoded_have_no_coupling() -> None:
    features, held = shown((1, 0, 2))
    result = couple_by_reading(head(), features, held, question(2))
    assert result.shape == (3, 4)
    assert (result[~held] == 0).all()
    assert couple_by_reading(head(), features, np.zeros_like(held), question(2)).max() == 0


def test_the_question_of_one_word_is_enough() -> None:
    features, held = shown((0, 0, 4))
    assert couple_by_reading(head(), features, held, question(4))[0, 0] > 0.5


def test_letters_are_read_in_stretches() -> None:
    """The second word of a stretch counts through the weights for its place."""
    weights = head()
    weights["span.weight"][:, :WIDTH] = 0
    weights["span.weight"][:, WIDTH : 2 * WIDTH] = np.eye(WIDTH)
    features, held = shown((0, 0, 4))
    assert couple_by_reading(weights, features, held, question(1, 4))[0, 0] > 0.5
    assert couple_by_reading(weights, features, held, question(4, 1))[0, 0] < 0.5


@pytest.mark.parametrize("layer", reading.LAYERS)
def test_each_layer_has_a_shape(layer: str) -> None:
    assert len(reading.shapes(16, 4)[layer]) == 2
    assert reading.shapes(16, 4)["span"] == (4, 16 * SPAN)
