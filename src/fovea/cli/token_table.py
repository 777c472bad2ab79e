"""The table of `fovea models --tokens`: visual tokens of known models for images of some sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.protocols import VisualTokenRule
from fovea.engine.vision.token_rules import all_settings, known_models, rule_for

_SIZE = re.compile(r"([1-9]\d{0,6})x([1-9]\d{0,6})")

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    model: the name as the caller wrote it.
    rule: name of the rule that counted; "": no rule is known.
    tokens: visual tokens for each size; None: the model refuses images of this size.
    problem: the first refusal, or why there is no rule; "": none.
    """

    model: str
    rule: str
    tokens: tuple[int | None, ...]
    problem: str = ""


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Read sizes as "1024x768,1920x1080", in pixels. Raises ConfigError."""
    found = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(
            f"--tokens is {text!r}; accepted: WIDTHxHEIGHT in pixels, or several, as 1024x768,1920x1080",
            param="tokens",
        )
    return tuple((int(match[1]), int(match[2])) for match in found if match)


def rows(models: Sequence[str], sizes: Sequence[Size]) -> list[Row]:
    """Count for each model, or for all known ones if none is named.

    Raises ModelError for a folder that cannot be used.
    """
    return [_row(model, sizes) for model in models or known_models()]


def _row(model: str, sizes: Sequence[Size]) -> Row:
    rule = rule_for(model)
    if rule is None:
        return Row(model, "", (None,) * len(sizes), "no known model has this name")
    counts = [_count(rule, width, height) for width, height in sizes]
    problem = next((count for count in counts if isinstance(count, str)), "")
    return Row(
        model, rule.name, tuple(count if isinstance(count, int) else None for count in counts), problem
    )


def _count(rule: VisualTokenRule, width: int, height: int) -> int | str:
    """The tokens of an image, or the message with which the model refuses it."""
    try:
        return rule.tokens(width, height)
    except InvalidRequest as error:
        return error.message


def table(found: Sequence[Row], sizes: Sequence[Size]) -> str:
    """Return one line per model: the tokens for each size, the model, and what was wrong."""
    titles = [f"{width}x{height}" for width, height in sizes]
    lines = [f"{'  '.join(f'{title:>9}' for title in titles)}  model"]
    for row in found:
        counts = "  ".join(f"{'-' if count is None else count:>9}" for count in row.tokens)
        lines.append(f"{counts}  {row.model}" + (f"  ({row.problem})" if row.problem else ""))
    return "\n".join(lines)


def as_json(found: Sequence[Row], sizes: Sequence[Size]) -> str:
    """Return a JSON list with an object per model and size."""
    return json.dumps(
        [
            {
                "model": row.model,
                "rule": row.rule or None,
                "width": width,
                "height": height,
                "tokens": tokens,
                "problem": row.problem if tokens is None else None,
            }
            for row in found
            for (width, height), tokens in zip(sizes, row.tokens, strict=True)
        ]
    )


def markdown(sizes: Sequence[Size]) -> str:
    """Return a table with one line for all known models of equal settings."""
    titles = " | ".join(f"{width} x {height}" for width, height in sizes)
    lines = [f"| models | {titles} |", "|---" * (len(sizes) + 1) + "|"]
    for entry in all_settings():
        counts = " | ".join(
            "-" if count is None else str(count) for count in _row(entry.models[0], sizes).tokens
        )
        lines.append(f"| {', '.join(entry.models)} | {counts} |")
    return "\n".join(lines)
