"""The methods of reducing visual tokens, and how many tokens are kept: names and arithmetic, no tensors.

The number of tokens that an image keeps follows from its shape and the ratio alone. So a prompt is laid out,
and its cost known, before any pixel is read. The pixels (and the question, if the method uses it) only decide
which tokens are kept. There are two exceptions, in which the pixels decide how many: relevance with the
budget `auto`, and images that share a budget (`views`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from fovea.core.errors import InvalidRequest
from fovea.core.media import AUTO, VisualTokens

PARAM = "visual_tokens"
"""The request's parameter, for error messages."""
Need = Literal["query", "attention", "keys", "probe"]


@dataclass(frozen=True, slots=True)
class Method:
    """One method of reducing visual tokens.

    query_aware: the result depends on the question. The question is then part of the image's key and of its
        KV's key. The exception is `views`, where the key is that of the picture at its size. No method of the
        kind "encoder" changes the encoder's whole output, which stays valid for every question.
    for_text: false for methods that are known to lose small text. No preset uses them, so a user must name
        them.
    kind: how the method works:
        "resize": the picture is made smaller, so the encoder also has less work.
        "encoder": tokens are left out of the encoder's output.
        "relevance": regions are chosen, and only these are encoded.
        "views": some of a request's images are made smaller, so that all share one budget. A single image
            keeps all tokens.
    needs: the inputs that the method reads beside the visual tokens (`reduce.base.ReductionInput`). Without a
        question, a method that needs a query works like its variant without one.
    merges: the tokens that are not kept are averaged into kept ones; otherwise they are dropped.
    """

    name: str
    query_aware: bool = False
    for_text: bool = True
    kind: Literal["resize", "encoder", "relevance", "views"] = "encoder"
    needs: frozenset[Need] = frozenset()
    merges: bool = False

    @property
    def by_region(self) -> bool:
        """Whether it chooses regions before they are encoded."""
        return self.kind == "relevance"

    @property
    def makes_smaller(self) -> bool:
        """Whether it makes pictures smaller and leaves out no tokens."""
        return self.kind in ("resize", "views")

    @property
    def looks_into_encoder(self) -> bool:
        """Whether it reads attention or keys inside the vision tower."""
        return bool(self.needs & {"attention", "keys"})


@dataclass(frozen=True, slots=True)
class Preset:
    """A method and its ratio under one name.

    method: None: every token is kept.
    keep: share of the tokens that is kept.
    fallback: the method for models whose images do not support `method`; None: there is no other.
    """

    name: str
    method: str | None
    keep: float
    fallback: str | None = None


def _table(*methods: Method) -> Mapping[str, Method]:
    return MappingProxyType({method.name: method for method in methods})


METHODS: Mapping[str, Method] = _table(
    Method("resize", kind="resize"),
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
    Method("relevance", query_aware=True, kind="relevance"),
    Method("views", query_aware=True, kind="views"),
)
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        # Every method loses small text first. For documents, a lower max_pixels is the better way to save
        # tokens.
        "document": Preset("document", None, 1.0),
        # Among the methods whose KV serves all questions about an image, dpp loses least (docs/relevance.md).
        "general": Preset("general", "dpp", 0.75),
        # relevance also saves the encoder's time, which is most of the time to first token.
        "fast": Preset("fast", "relevance", 0.5, fallback="dpp"),
    }
)


def find_method(name: str) -> Method:
    """The method of that name. Raises InvalidRequest for an unknown name."""
    if name not in METHODS:
        raise InvalidRequest(
            f"{PARAM}: there is no method {name!r}; accepted: {', '.join(METHODS)}", param=f"{PARAM}.method"
        )
    return METHODS[name]


def resolve_preset(wish: VisualTokens, accepted: Container[str] = METHODS) -> VisualTokens | None:
    """Replace a preset's name by its method and ratio. Returns None if all tokens are kept.

    wish: names a method, which is returned unchanged, or a preset.
    accepted: the methods that the model's images support. A preset uses its fallback if its method is not
        among them.

    Raises InvalidRequest for an unknown name, and for numbers beside a preset.
    """
    if wish.method not in PRESETS:
        method = find_method(wish.method)
        if wish.keep == AUTO and not method.by_region:
            raise InvalidRequest(
                f"{PARAM}: keep is {AUTO!r}, which {method.name} cannot find out; accepted: a share of more "
                f"than 0 and at most 1, or {AUTO!r} with the method relevance",
                param=f"{PARAM}.keep",
            )
        return wish
    if wish.keep is not None or wish.budget is not None:
        raise InvalidRequest(
            f"{PARAM}: the preset {wish.method} sets how much is kept; send neither keep nor budget with it",
            param=PARAM,
        )
    preset = PRESETS[wish.method]
    if preset.method is None:
        return None
    name = preset.method if preset.method in accepted else preset.fallback or preset.method
    return replace(wish, method=name, keep=preset.keep)


def parse_visual_tokens(text: str) -> VisualTokens | None:
    """Read a setting's value: "off", a preset, METHOD:SHARE ("relevance:0.5"), or "relevance:auto".

    Returns None if all tokens are kept. A preset is returned by name; `resolve_preset` replaces it when the
    model is known. Raises InvalidRequest.
    """
    if text == "off":
        return None
    if text in PRESETS:
        return None if PRESETS[text].method is None else VisualTokens(text)
    name, _, share = text.partition(":")
    if share == AUTO or (not share and find_method(name).by_region):
        return resolve_preset(VisualTokens(find_method(name).name, AUTO))
    try:
        return VisualTokens(find_method(name).name, keep=float(share or "0.5"))
    except ValueError:
        raise InvalidRequest(
            f"{PARAM}: {share!r} is not a share; accepted: more than 0, at most 1, or {AUTO} for relevance",
            param=PARAM,
        ) from None


def keep_count(tokens: int, ratio: float) -> int:
    """Number of an image's tokens that are kept: tokens * ratio, rounded up, so at least 1.

    The ratio is used as its decimal digits say: 0.07 of 100 tokens is 7. As a binary fraction, 0.07 is a
    little more, and the result would be 8. Raises InvalidRequest unless 0 < ratio <= 1.
    """
    if not 0 < ratio <= 1:
        raise InvalidRequest(f"{PARAM}: keep is {ratio!r}; accepted: more than 0, at most 1", param=PARAM)
    return max(1, math.ceil(tokens * Fraction(str(ratio))))
