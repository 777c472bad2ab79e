"""Counts the visual tokens of a request's images in the model that will answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fovea.core.errors import FoveaError
from fovea.core.media import DETAILS
from fovea.core.protocols import VisualTokenRule
from fovea.gateway.config import ModelConfig
from fovea.gateway.inspect.images import RequestImage
from fovea.media.token_rules import estimate_rule

UNKNOWN_SIDE = 1024
"""Assumed side in pixels of an image behind a URL, whose size is not known."""
VIDEO_TOKENS = 2048
"""Assumed tokens of a video: which frames a model takes is not known from the outside."""
log = logging.getLogger("fovea.gateway")
FindRule = Callable[[str], VisualTokenRule | None]
"""Returns the rule of a model's name or of a checkpoint's folder; None: it is not known."""


class VisualCounter:
    """Counts visual tokens by the rules of models. A model without a known rule is estimated by area."""

    def __init__(self, find: FindRule) -> None:
        self._find = find
        self._estimate = estimate_rule()
        self._rules: dict[str, VisualTokenRule] = {}

    def rule(self, model: ModelConfig) -> VisualTokenRule:
        """Return the rule of a model, or the estimate by area, with a warning, if no rule is known."""
        name = model.visual_rule or model.served or model.name
        if name not in self._rules:
            found = self._find(name)
            if found is None:
                log.warning(
                    "model %s: no rule for visual tokens is known, so they are estimated by area; "
                    "set visual_rule",
                    model.name,
                )
            self._rules[name] = found or self._estimate
        return self._rules[name]

    def count(self, model: ModelConfig, images: Sequence[RequestImage]) -> int:
        """Return the visual tokens of some images together. Raises InvalidRequest and InvalidImage."""
        if not images:
            return 0
        rule, number = self.rule(model), len(images)
        return sum(
            VIDEO_TOKENS if image.is_video else _tokens(rule, image, number, index)
            for index, image in enumerate(images)
        )


def _tokens(rule: VisualTokenRule, image: RequestImage, number: int, index: int) -> int:
    own: dict[str, Any] = image.part.owner if image.part.key == "url" else image.part.part
    detail = "high" if own.get("detail") == "original" else own.get("detail")
    try:
        return rule.tokens(
            image.width or UNKNOWN_SIDE,
            image.height or UNKNOWN_SIDE,
            detail=detail if detail in DETAILS else "auto",
            images=number,
            min_pixels=_pixels(own.get("min_pixels")),
            max_pixels=_pixels(own.get("max_pixels")),
        )
    except FoveaError as error:
        error.message = f"image {index}: {error.message}"
        error.param = image.part.param
        raise


def _pixels(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
