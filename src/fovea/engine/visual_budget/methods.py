"""Which ways there are to spend fewer visual tokens, and how many are kept: names and arithmetic, no tensors.

How many tokens an image keeps follows from its shape and the ratio alone, so that a prompt is laid out, and its cost known,
before a pixel is seen; pixels (and, where a method is query-aware, words) only say which. But of several images that share a
budget (views) they say how many each gets.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from fovea.core.errors import InvalidRequest
from fovea.core.image import VisualTokens

PARAM = "visual_tokens"
Need = Literal["query", "attention", "keys", "probe"]


@dataclass(frozen=True, slots=True)
class Method:
    """One way to spend fewer visual tokens.

    query_aware: which tokens are kept depends on the user's words, which are then part of the KV's key (but of views, where
        the key is that of the picture as it is shown). The encoder's output is not changed by any method after it and stays
        good for every question.
    for_text: false where fine print is known to get lost, so that a user has to ask for it by name.
    after: what has to be done first. "resize": the picture is made smaller, and the encoder's work with it. "encoder": tokens
        are left out of the encoder's output. "relevance": regions are chosen before the encoder sees them. "views": some
        of a request's images are made smaller, which share one budget; a request with one image keeps all of it.
    needs: what it looks at beside the visual tokens; see `base.ReductionInput`. Without a query (there are no words, or none yet) a
        method that needs one does what its query-agnostic twin does.
    merges: tokens that are not kept are averaged into kept ones instead of being dropped.
    """

    name: str
    query_aware: bool = False
    for_text: bool = True
    after: Literal["resize", "encoder", "relevance", "views"] = "encoder"
    needs: frozenset[Need] = frozenset()
    merges: bool = False

    @property
    def by_region(self) -> bool:
        """Whether it chooses before the encoder, region by region."""
        return self.after == "relevance"

    @property
    def makes_smaller(self) -> bool:
        """Whether it makes pictures smaller instead of leaving out tokens."""
        return self.after in ("resize", "views")

    @property
    def looks_into_encoder(self) -> bool:
        """Whether it needs attention or keys from inside the vision tower."""
        return bool(self.needs & {"attention", "keys"})


@dataclass(frozen=True, slots=True)
class Preset:
    """A method and its ratio under one name. method: None where every token is kept. otherwise: the method for models whose
    images cannot follow it."""

    name: str
    method: str | None
    keep: float
    otherwise: str | None = None


def _table(*methods: Method) -> Mapping[str, Method]:
    return MappingProxyType({method.name: method for method in methods})


METHODS: Mapping[str, Method] = _table(
    Method("resize", after="resize"),
    Method("uniform"),
    Method("random"),
    Method("dart"),
    Method("dart_query", query_aware=True, needs=frozenset({"query"})),
    Method("dart_k", query_aware=True, needs=frozenset({"probe"})),
    Method("dpp"),
    Method("dpp_query", query_aware=True, needs=frozenset({"query"})),
    Method("visionzip", needs=frozenset({"attention", "keys"}), merges=True),
    Method("tome", merges=True),
    Method("fastv", query_aware=True, for_text=False, needs=frozenset({"probe"})),
    Method("relevance", query_aware=True, after="relevance"),
    Method("views", query_aware=True, after="views"),
)
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        # Fine print suffers first from every method, so whoever reads documents lowers max_pixels instead.
        "document": Preset("document", None, 1.0),
        # Of methods that leave the KV to all questions about an image, this one loses least (docs/relevance.md).
        "general": Preset("general", "dpp", 0.75),
        # The one that saves the encoder's time, too, and most of the first token's is that.
        "fast": Preset("fast", "relevance", 0.5, otherwise="dpp"),
    }
)


def method(name: str) -> Method:
    """Raises InvalidRequest for a name that there is not."""
    if name not in METHODS:
        raise InvalidRequest(
            f"{PARAM}: there is no method {name!r}; accepted: {', '.join(METHODS)}", param=PARAM
        )
    return METHODS[name]


def settled(wish: VisualTokens, accepted: Container[str] = METHODS) -> VisualTokens | None:
    """A wish with a method's name in place of a preset's; None: all tokens stay. accepted: methods for this model's images.

    Raises InvalidRequest."""
    if wish.method not in PRESETS:
        method(wish.method)
        return wish
    if wish.keep is not None or wish.budget is not None:
        raise InvalidRequest(
            f"{PARAM}: the preset {wish.method} says how much is kept; send neither keep nor budget beside it",
            param=PARAM,
        )
    chosen = PRESETS[wish.method]
    if chosen.method is None:
        return None
    name = chosen.method if chosen.method in accepted else chosen.otherwise or chosen.method
    return replace(wish, method=name, keep=chosen.keep)


def policy(text: str) -> VisualTokens | None:
    """What an operator writes: "off", a preset, or METHOD:SHARE ("relevance:0.5"); None: all tokens stay. A preset is still
    to be settled, for a model.

    Raises InvalidRequest.
    """
    if text == "off":
        return None
    if text in PRESETS:
        return None if PRESETS[text].method is None else VisualTokens(text)
    name, _, share = text.partition(":")
    try:
        return VisualTokens(method(name).name, keep=float(share or "0.5"))
    except ValueError:
        raise InvalidRequest(
            f"{PARAM}: {share!r} is no share; accepted: more than 0, at most 1", param=PARAM
        ) from None


def keep_count(tokens: int, ratio: float) -> int:
    """How many of an image's tokens are kept: tokens * ratio, rounded up, at least 1, so that no image of several starves.

    The ratio is taken as it is written: 0.07 of 100 tokens is 7, not the 8 of binary fractions.
    Raises InvalidRequest unless 0 < ratio <= 1.
    """
    if not 0 < ratio <= 1:
        raise InvalidRequest(f"{PARAM}: keep is {ratio!r}; accepted: more than 0, at most 1", param=PARAM)
    return max(1, math.ceil(tokens * Fraction(str(ratio))))
