"""How many visual tokens a question needs: the budget `auto`.

The number must be known before the prompt is laid out, so it follows from the question's words and from the
pixels, and not from the model's look. It is all tokens unless the question is known to be about one part of a
large image: then a small view of the whole, and room to show the parts with the most content at native
resolution, whichever of them the question is about. A page full of text so needs more than a photo of a
street.

The words are English. A question in another language keeps all tokens.
"""

from __future__ import annotations

import math
import re

import numpy as np

from fovea.relevance.attending import whole_tokens
from fovea.relevance.balancing import LEAST_COMPRESS, asks_for_all
from fovea.relevance.policy import LARGE_IMAGE, content_mask
from fovea.relevance.realizing import partition
from fovea.relevance.texture import Map

PARTS = 3
"""How many parts of the image the budget has room for, those with the most content."""
LEAST_SHARE = 1 / 16
"""Least share of the tokens: the view of the whole needs some to show what is where."""
_PART = re.compile(
    r"\b(?:read|written|text|says?|words?|letters?|digits?|codes?|labels?|signs?|titles?|captions?|names?|"
    r"prices?|dates?|colou?rs?|shapes?|position|where|which|whose|left|right|top|bottom|upper|lower|middle|"
    r"center|centre|corner)\b",
    re.IGNORECASE,
)
_ENGLISH = re.compile(r"\b(?:the|what|which|where|whose|read|name)\b", re.IGNORECASE)
"""A word of every English question about a part; "label" alone may be German."""


def enough_tokens(question: str, propositional: Map, perspectival: Map) -> int:
    """The number of tokens that a question about an image needs, at least 1 and at most one per cell.

    question: the user's words.
    propositional, perspectival: maps of the image's cells, (rows, columns), as in `knowing`.
    """
    cells = propositional.size
    if cells < LARGE_IMAGE or not asks_for_part(question):
        return cells
    content = content_mask(propositional, perspectival)
    held = np.sort([int(content[region.cells].sum()) for region in partition(content)])[::-1]
    parts = int(held[:PARTS].sum())
    # The view of the whole takes its share of the total, which is this for a question about a part.
    total = parts / (1 - whole_tokens(100, LEAST_COMPRESS) / 100)
    return min(cells, max(1, math.ceil(total), math.ceil(cells * LEAST_SHARE)))


def asks_for_part(question: str) -> bool:
    """Whether the words of a question in English are about one part of an image, and not about all of it."""
    english = _ENGLISH.search(question) is not None
    return english and _PART.search(question) is not None and not asks_for_all(question)
