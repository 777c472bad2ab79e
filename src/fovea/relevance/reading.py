"""Coupling for images that are full of text: which tokens help to answer a question about what is written.

A small picture of a page shows no letters, so nothing in it can be coupled to "What is the due date?". Here
the features are the encoder's tokens of all regions with content, at native resolution, and the words are
matched with what each token shows. What answers a question often stands beside or below what the question
names: the value right of its label, the cell where a row and a column meet. So each token also learns what
matched in its row before it and in its column above it.

The networks come from training/pages/relevance.py. Arrays by name, for D values per token and S per match:

- `span` reads SPAN word embeddings in a row, (SPAN * D,) to (S,); `key` and `value` follow it;
- `image` maps a token to (S,); `token` reads it beside the words that match it best;
- `mix.0`, `mix.1` read a token, its row, its column and its neighbours; `score` gives the coupling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.balancing import sigmoid
from fovea.relevance.coupling import linear, normalize
from fovea.relevance.texture import Map, Mask

Array = NDArray[np.floating[Any]]
SPAN = 6
"""Words, or letters where each is a token, that are read together."""
ROUNDS = 2
"""How often tokens learn from their rows and columns: one round finds the row and the column that a question
names, the second one where they meet."""
LAYERS = ("span", "key", "value", "image", "token", *(f"mix.{n}" for n in range(ROUNDS)), "score")
"""Layers of the head; each has a weight and a bias."""


def reads(head: Mapping[str, Array] | None) -> bool:
    """Whether a head has the networks of this file."""
    return head is not None and "span.weight" in head


def shapes(width: int, depth: int) -> dict[str, tuple[int, int]]:
    """The shape of each layer's weight. width, depth: D and S."""
    return {
        "span": (depth, SPAN * width),
        "key": (depth, depth),
        "value": (depth, depth),
        "image": (depth, width),
        "token": (depth, 2 * depth + 1),
        **{f"mix.{n}": (depth, 4 * depth) for n in range(ROUNDS)},
        "score": (1, depth),
    }


def couple_by_reading(weights: Mapping[str, Array], features: Array, held: Mask, words: Array) -> Map:
    """The coupling of each cell to the question, (rows, columns) in [0, 1]; 0 for cells that are not held.

    weights: the head's arrays, by name.
    features: tokens of the full grid at native resolution, (rows, columns, D).
    held: whether a cell was encoded, (rows, columns).
    words: the decoder's embeddings of the question, (Q, D) with at least one row.
    """
    keys, values = _spans(weights, words)
    image = linear(weights, "image", normalize(features[held]))
    matches = image @ keys.T / np.sqrt(keys.shape[1])
    peak = matches.max(1, keepdims=True)
    shares = np.exp(matches - peak)
    found = (shares / shares.sum(1, keepdims=True)) @ values
    tokens = np.maximum(linear(weights, "token", np.concatenate((image, found, peak), axis=1)), 0)
    states = np.zeros((*held.shape, tokens.shape[1]), np.float32)
    states[held] = tokens
    for layer in range(ROUNDS):
        mixed = np.maximum(linear(weights, f"mix.{layer}", _surroundings(states)[held]), 0)
        states[held] += mixed
    result = np.zeros(held.shape, np.float32)
    result[held] = sigmoid(linear(weights, "score", states[held])[:, 0])
    return result


def _spans(weights: Mapping[str, Array], words: Array) -> tuple[Array, Array]:
    """Keys and values of the stretches of the question that begin at each word, (Q, S) each."""
    padded = np.concatenate((normalize(words), np.zeros((SPAN - 1, words.shape[1]), words.dtype)))
    stretches = np.concatenate([padded[n : n + len(words)] for n in range(SPAN)], axis=1)
    spans = np.maximum(linear(weights, "span", stretches), 0)
    return linear(weights, "key", spans), linear(weights, "value", spans)


def _surroundings(states: Array) -> Array:
    """Each cell's state, and the highest values before it in its row, above it in its column, and around it.

    states: (rows, columns, S), none below 0; the result is (rows, columns, 4 S).
    """
    before = np.maximum.accumulate(states, axis=1)
    above = np.maximum.accumulate(states, axis=0)
    padded = np.pad(states, ((1, 1), (1, 1), (0, 0)))
    rows, columns = states.shape[:2]
    near = np.max([padded[y : y + rows, x : x + columns] for y in range(3) for x in range(3)], axis=0)
    return np.concatenate((states, before, above, near), axis=2)
