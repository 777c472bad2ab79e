"""Writes the report of `fovea models --check` for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fovea.engine.check import Finding, Report

WIDTH = 80
LABEL = 28
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def _count(value: str | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else value


def _size(value: str | int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    if not isinstance(value, int):
        return value
    power = min(max(value.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{value:,} bytes" if not power else f"{value / (1 << 10 * power):,.1f} {UNITS[power]}"


FACTS: Mapping[str, tuple[str, Callable[[str | int], str]]] = {
    "architecture": ("architecture", _count),
    "model_type": ("model_type", _count),
    "parameters": ("parameters", _count),
    "dtype": ("type of the weights", _count),
    "weight_bytes": ("weights", _size),
    "files": ("weight files", _count),
    "tensors": ("tensors", _count),
    "unused_tensors": ("tensors that are not used", _count),
    "layers": ("layers of the decoder", _count),
    "experts": ("experts of a layer", _count),
    "vocabulary": ("vocabulary", _count),
    "context": ("context in tokens", _count),
    "kv_bytes_per_token": ("KV of a token", _size),
    "state_bytes_per_sequence": ("states of a sequence", _size),
    "image_tokens": ("tokens of a 1024x768 image", _count),
    "videos": ("videos", _count),
}
"""The label of each fact, and how its value is written."""


def table(report: Report) -> str:
    """Return the report as lines of at most 80 columns."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from _wrapped(report.name)
    for name, (label, write) in FACTS.items():
        value = report.facts.get(name)
        if value is not None and (value or name != "state_bytes_per_sequence"):
            yield from _wrapped(write(value), f"  {label:{LABEL}}")
    for word, findings in (
        ("error", report.errors),
        ("warning", report.warnings),
        ("not checked", report.unchecked),
    ):
        for finding in findings:
            yield from _finding(word, finding)
    yield ""
    yield from _wrapped(verdict(report))


def verdict(report: Report) -> str:
    """Say in one sentence whether the checkpoint loads."""
    if not report.loads:
        count = len(report.errors)
        return f"This checkpoint does not load: {count} error{'s' * (count > 1)}."
    if report.unchecked:
        return "No error was found, but not everything was checked."
    return "This checkpoint would load."


def _finding(word: str, finding: Finding) -> Iterator[str]:
    yield from _wrapped(finding.message, f"{word}, {finding.part}: ", "    ")


def _wrapped(text: str, first: str = "", later: str | None = None) -> list[str]:
    """Break a text into lines. Characters that a terminal would not print are replaced."""
    plain = "".join(char if char.isprintable() else "?" for char in text)
    return textwrap.wrap(
        plain,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first) if later is None else later,
        break_on_hyphens=False,
    ) or [first.rstrip()]
