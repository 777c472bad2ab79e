"""The participatory way of knowing: how strongly the model couples each cell to the question.

The inputs are `features`, the encoder's tokens of a view of the whole image (usually a small one), and
`words`, the decoder's embeddings of the question. A head that was trained for the model reads both. Without a
head, their cosine similarity is mixed with the map of the question's key words (`knowing.keywords`). Decoders
put words and visual tokens into one space, but the similarity alone is not dependable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.balancing import sigmoid
from fovea.relevance.knowing import stretch
from fovea.relevance.texture import Map

Array = NDArray[np.floating[Any]]


def couple(weights: Mapping[str, Array], features: Array, words: Array) -> Array:
    """The coupling of each token of the image to the question by a trained head, (n,) in [0, 1].

    The head comes from training/relevance.py. Token and mean of the question are projected into one space; a
    hidden layer reads both and their product.

    weights: the head's parameters, by name.
    features: (n, D).
    words: (Q, D).
    """
    image = _linear(weights, "image", normalize(features))
    query = np.maximum(_linear(weights, "words", normalize(words)), 0).mean(0)
    query = _linear(weights, "query", query)
    both = np.concatenate((image, np.broadcast_to(query, image.shape), image * query), axis=1)
    hidden = np.maximum(_linear(weights, "hidden", both), 0)
    return sigmoid(_linear(weights, "coupling", hidden)[:, 0])


def similarity(features: Array, words: Array) -> Array:
    """The highest cosine similarity of each token to any word, (n,).

    features: (n, D); their mean is subtracted first.
    words: (Q, D).
    """
    centred = features - features.mean(0)
    highest: Array = (_unit(centred) @ _unit(words).T).max(1).astype(np.float32)
    return highest


def resample(values: Array, shape: tuple[int, int], grid: tuple[int, int]) -> Map:
    """Interpolate values of the tokens of a view of the whole bilinearly to the cells of the full grid.

    values: (rows * columns,) of `shape`.
    shape: rows and columns of the view.
    grid: rows and columns of the full grid; the result has this shape.
    """
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


def couple_without_head(features: Array, words: Array, shape: tuple[int, int], keyword_map: Map) -> Map:
    """The coupling for a model without a head: similarity and key words, (rows, columns) of the full grid.

    features, words: as in `similarity`.
    shape: rows and columns of the view that features are tokens of.
    keyword_map: `knowing.keywords`, (rows, columns).
    """
    grid = keyword_map.shape[0], keyword_map.shape[1]
    similar = resample(stretch(similarity(features, words)), shape, grid)
    return (0.25 * similar + 0.75 * keyword_map).astype(np.float32)


def _linear(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Apply the linear layer `name`: x (..., in) to (..., out)."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    return unit


def normalize(rows: Array) -> Array:
    """Scale each row to a mean square of 1."""
    scaled: Array = rows / np.sqrt(np.square(rows).mean(1, keepdims=True) + 1e-6)
    return scaled
