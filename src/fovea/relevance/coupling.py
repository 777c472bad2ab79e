"""The participatory way of knowing: what question and image make of each other, by the model's own representation.

features are the encoder's tokens of a view of the whole (usually a small one), words the decoder's embeddings of the question.
Where a head was trained for the model, it reads both. Where not, likeness of the two is taken as it is, beside what the
words ask for by themselves (`knowing.keywords`): decoders put words and visual tokens into one space, but not so that
likeness is dependable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.balancing import sigmoid
from fovea.relevance.knowing import stretched
from fovea.relevance.texture import Map

Array = NDArray[np.floating[Any]]


def learned(weights: Mapping[str, Array], features: Array, words: Array) -> Array:
    """features (n, D), words (Q, D) to coupling (n,) in [0, 1], by the head of training/relevance.py.

    A hidden layer per token of the image sees it, the question's mean and their product in a space of their own.
    """
    image = _linear(weights, "image", normal(features))
    query = np.maximum(_linear(weights, "words", normal(words)), 0).mean(0)
    query = _linear(weights, "query", query)
    both = np.concatenate((image, np.broadcast_to(query, image.shape), image * query), axis=1)
    hidden = np.maximum(_linear(weights, "hidden", both), 0)
    return sigmoid(_linear(weights, "coupling", hidden)[:, 0])


def likeness(features: Array, words: Array) -> Array:
    """features (n, D), words (Q, D): the highest cosine of each token to any word, (n,)."""
    centred = features - features.mean(0)
    found: Array = (_unit(centred) @ _unit(words).T).max(1).astype(np.float32)
    return found


def spread(values: Array, shape: tuple[int, int], grid: tuple[int, int]) -> Map:
    """Of a view of the whole, (rows * columns,) of `shape`, to the cells of the full grid, bilinearly."""
    table = values.reshape(shape)
    for axis, size in enumerate(grid):
        count = table.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * (count / size) - 0.5, 0, count - 1)
        low = np.floor(at).astype(np.int64)
        high = np.minimum(low + 1, count - 1)
        part = (at - low).astype(np.float32)
        part = part[:, None] if axis == 0 else part[None]
        table = table.take(low, axis) * (1 - part) + table.take(high, axis) * part
    return table.astype(np.float32)


def unlearned(features: Array, words: Array, shape: tuple[int, int], asked: Map) -> Map:
    """For models without a head: likeness and what the words ask for, (rows, columns) of the full grid."""
    alike = spread(stretched(likeness(features, words)), shape, (asked.shape[0], asked.shape[1]))
    return (0.25 * alike + 0.75 * asked).astype(np.float32)


def _linear(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _unit(rows: Array) -> Array:
    found: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    return found


def normal(rows: Array) -> Array:
    """Of unit mean square."""
    found: Array = rows / np.sqrt(np.square(rows).mean(1, keepdims=True) + 1e-6)
    return found
