"""Who asks what, and when: a list of requests, and the JSON-lines file that holds one.

A line is {"at": 0.25, "text": 40, "images": [["cat", 256]], "output": 64}; what `TraceRequest` has a default for may be
left out.
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
"""A text has fewer tokens than two to this power."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """at: seconds from the start of the trace.
    text: tokens that no other request has. output: tokens of the answer.
    images: (key, visual tokens) of each, between the system prompt and the text; equal keys are equal images.
    system: tokens of a system prompt that all requests begin with, as far as each has it.
    priority: smaller first, where the policy looks at it. timeout: seconds after which it is given up; null: never.
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
    """Requests in order of arrival. Raises ConfigError naming the line, the field and what is accepted."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}", param="trace") from error
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
    """Raises ConfigError when the file can not be written."""
    try:
        path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can not be written: {error.strerror}", param="save_trace") from error


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


def _images(said: Any) -> tuple[tuple[str, int], ...]:
    """Pairs of key and tokens, however JSON wrote them. Raises ConfigError."""
    if not isinstance(said, list | tuple):
        raise ConfigError(f"images is {said!r}; accepted: a list of [key, visual tokens]", param="images")
    found = []
    for index, pair in enumerate(said):
        good = isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not good or not isinstance(pair[1], int) or isinstance(pair[1], bool) or pair[1] < 1:
            raise ConfigError(
                f"images[{index}] is {pair!r}; accepted: [key, visual tokens from 1 on]", param="images"
            )
        found.append((pair[0], pair[1]))
    return tuple(found)
