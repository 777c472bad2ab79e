"""Precisions as users write them: a value of `quantization`, or a format for each part of a model."""

from __future__ import annotations

import difflib
from dataclasses import replace

from fovea.core.errors import ConfigError
from fovea.planner.precision import RECIPES, Precision

PARTS = ("decoder", "encoder", "head", "kv")
"""Parts that a text can name. Those that it does not name keep the model's type."""


def parse_precision(text: str) -> Precision:
    """Return the precision that a text means.

    text: a value of the setting `quantization`, such as "int8", or formats of parts, such as
        "decoder=int4,encoder=int8,kv=fp8".

    Raises ConfigError, which names the part, the nearest name, and the accepted values.
    """
    if "=" not in text:
        if text not in RECIPES:
            near = difflib.get_close_matches(text, RECIPES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"precision {text!r} is not known; {hint}accepted: {', '.join(RECIPES)}, or formats of "
                "parts, such as decoder=int4,encoder=int8,kv=fp8",
                param="precision",
            )
        return RECIPES[text]
    formats: dict[str, str] = {}
    for item in text.split(","):
        part, equals, format = (piece.strip() for piece in item.partition("="))
        if not equals or not format:
            raise ConfigError(
                f"precision {text!r}: {item.strip()!r} names no format; accepted: part=format, such as "
                "decoder=int4",
                param="precision",
            )
        if part not in PARTS:
            near = difflib.get_close_matches(part, PARTS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"precision {text!r}: there is no part {part!r}; {hint}accepted: {', '.join(PARTS)}",
                param="precision",
            )
        if part in formats:
            raise ConfigError(f"precision {text!r} names {part!r} twice", param="precision")
        formats[part] = format
    try:
        return replace(Precision(), **formats)
    except ConfigError as error:
        raise ConfigError(f"precision {text!r}: {error.message}", param="precision") from error
