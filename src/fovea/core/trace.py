"""Traces: lists of requests with their arrival times and sizes, and the JSON-lines files that store them.

A line is {"at": 0.25, "text": 40, "images": [["cat", 256]], "output": 64}. Fields for which `TraceRequest`
has a default may be left out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fovea.core.errors import ConfigError

TEXT_BITS = 24
"""A request's text, output, system and priority are less than two to this power."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: its arrival time and its sizes in tokens.

    at: arrival, seconds from the start of the trace.
    text: tokens of the user's text; no other request has the same ones.
    output: tokens of the answer.
    images: (key, visual tokens) of each image, between the system prompt and the text. Equal keys are equal
        images.
    system: tokens of the system prompt. All requests take them from the start of one common text.
    priority: smaller is served first, if the policy uses priorities.
    timeout: seconds after which the client gives up; null: never.

    Raises ConfigError for a value out of range.
    """

    at: float
    text: int
    output: int
    images: tuple[tuple[str, int], ...] = ()
    system: int = 0
    priority: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, low in (("text", 1), ("output", 1), ("system", 0), ("priority", -(2**31))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << TEXT_BITS:
                raise ConfigError(f"{name} is {value!r}; accepted: a whole number from {low} on", param=name)
        for name, number in (("at", self.at), ("timeout", 1 if self.timeout is None else self.timeout)):
            if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < 1e9:
                raise ConfigError(f"{name} is {number!r}; accepted: seconds from 0 on", param=name)
        object.__setattr__(self, "images", _images(self.images))

    @property
    def prompt_tokens(self) -> int:
        return self.system + sum(tokens for _, tokens in self.images) + self.text


Trace = tuple[TraceRequest, ...]


def read_trace(path: Path) -> Trace:
    """Read a trace file; return its requests in order of arrival.

    Raises ConfigError that names the line, the field and the accepted values.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="trace") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", param="trace") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(line))
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error.message}", param="trace") from error
    if not requests:
        raise ConfigError(f"{path} holds no request", param="trace")
    return tuple(sorted(requests, key=lambda request: request.at))


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Write a trace file. Raises ConfigError if that fails."""
    try:
        path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="save_trace") from error


def _request(line: str) -> TraceRequest:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("not a JSON object")
    known = [field.name for field in fields(TraceRequest)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown field {name!r}; {hint}")
    for name in ("at", "text", "output"):
        if name not in values:
            raise ConfigError(f"{name} is missing")
    return TraceRequest(**values)


def _images(value: Any) -> tuple[tuple[str, int], ...]:
    """Check and convert a JSON value to pairs of key and visual tokens. Raises ConfigError."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"images is {value!r}; accepted: a list of [key, visual tokens]", param="images")
    pairs = []
    for index, pair in enumerate(value):
        good = isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not good or not isinstance(pair[1], int) or isinstance(pair[1], bool) or pair[1] < 1:
            raise ConfigError(
                f"images[{index}] is {pair!r}; accepted: [key, visual tokens from 1 on]", param="images"
            )
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)
