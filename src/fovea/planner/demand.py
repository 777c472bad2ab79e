"""The work of one request, in seconds of a replica that does nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.planner.composition import Composition
from fovea.planner.cost import CostModel
from fovea.planner.tokens import Tokens

CHUNK = 1024
"""Tokens of a prompt that one step computes when nothing decodes, at most."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Busy seconds of one request, and the tokens that they depend on.

    prepare: before the engine: reading the request, decoding and resizing its images.
    encode: the images that are not cached.
    prefill: the tokens without cached KV, in steps without decodes.
    tokens: tokens that are sampled one by one.
    context: tokens that a decode attends to, in the mean.
    prompt: the tokens without cached KV.
    pairs: pairs of such a token and a token that it attends to.
    """

    prepare: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    tokens: float = 0.0
    context: float = 0.0
    prompt: float = 0.0
    pairs: float = 0.0

    @property
    def first(self) -> float:
        """Busy seconds before the first token, without the preparation."""
        return self.encode + self.prefill

    @property
    def decodes(self) -> float:
        """Steps of decoding: the prompt's last step samples the first token."""
        return max(FEWEST_DECODES, self.tokens - 1)


FEWEST_DECODES = 1e-3
"""Decodes of a request whose answer is one token: not 0, because rates are found from decodes."""
Mix = list[tuple[float, Demand]]
"""Kinds of requests with their shares of all requests, which add up to 1."""


def demand(
    cost: CostModel, tokens: Tokens, *, pixels: float = 0.0, request_s: float = 0.0, pixel_s: float = 0.0
) -> Demand:
    """Return the busy seconds of a request.

    pixels: of its images. request_s, pixel_s: seconds of preparation per request and per pixel.
    """
    encode = tokens.encoded * sum(cost.image(rows) for rows in tokens.encoder_rows)
    start = max(0.0, tokens.prompt - tokens.computed)
    prefill, left, position = 0.0, tokens.computed, start
    while left > 0:
        chunk = min(left, CHUNK)
        pairs = _pairs(position, chunk)
        prefill += cost.step(Composition(0, 0, math.ceil(chunk), 1, round(pairs))) + cost.between_s
        left, position = left - chunk, position + chunk
    prepare = request_s + pixel_s * pixels * (tokens.encoded if tokens.images else 0.0)
    return Demand(
        prepare, encode, prefill, tokens.chosen, tokens.context, tokens.computed,
        _pairs(start, tokens.computed),
    )  # fmt: skip


def mean_demand(parts: Mix) -> Demand:
    """Return the mean of demands, weighted by shares that add up to 1. Contexts are weighted by tokens."""

    def mean(name: str) -> float:
        return sum(share * float(getattr(one, name)) for share, one in parts)

    context = sum(share * one.tokens * one.context for share, one in parts) / mean("tokens")
    names = ("prepare", "encode", "prefill", "tokens", "prompt", "pairs")
    return Demand(context=context, **{name: mean(name) for name in names})


def _pairs(start: float, count: float) -> float:
    return count * start + count * (count + 1) / 2
