"""Which of a request's pictures to look at closely: views are chosen before the encoder, as LiteVLM does (arXiv 2506.07416).

There a small model of its own reads the question; here a view's low-resolution visual tokens are compared with the words.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fovea.core.errors import EngineError
from fovea.engine.reduce.base import unit_rows


def coupling(embeds: Tensor, query: Tensor) -> float:
    """How well a view (N, D) answers the words (Q, D): each word's nearest token counts, mean over words; in [-1, 1]."""
    return float((unit_rows(query) @ unit_rows(embeds).T).amax(1).mean())


def choose_views(scores: Sequence[float], keep: int) -> tuple[int, ...]:
    """Numbers of the `keep` best views, in the order of the request; of equal ones the earlier."""
    if not 1 <= keep <= len(scores):
        raise EngineError(f"{keep} of {len(scores)} views were to be kept")
    ranked = sorted(range(len(scores)), key=lambda view: -scores[view])
    return tuple(sorted(ranked[:keep]))
