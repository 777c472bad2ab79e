"""Fields of a body that the API does not declare: unsupported, misspelt, or unknown.

Clients send fields of other engines. These are ignored, and the answer names them in a header. A field that
would change the answer, and that this server cannot carry out, is accepted without a note while its value
asks for nothing (`audio: null`), and refused otherwise. A field that looks like a misspelt one of this API is
refused, too: the client would not notice that it had no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from fovea.api.bodies.errors import clip
from fovea.api.explain import LONGEST, LONGEST_PATH, misspelt, unknown_field
from fovea.api.unsupported import UNSUPPORTED
from fovea.core.errors import InvalidRequest

HEADER = "x-fovea-ignored-fields"
"""Header of an answer with the fields of the request that were ignored."""
MOST_NAMED = 16
MOST = 32
"""Most undeclared fields of a body: each is compared with all names of the API."""
SAFE = "[]._-"


def ignored_fields(body: BaseModel, known: Sequence[str], *, strict: bool) -> list[str]:
    """Remove undeclared fields from a validated body, and return the JSON paths of those that are ignored.

    known: names of declared fields, for hints.
    strict: refuse every unknown field.

    Raises InvalidRequest for a field that is refused.
    """
    ignored: list[str] = []
    for count, (location, value) in enumerate(_extras(body, ())):
        name, path = str(location[-1]), _path(location)
        if count == MOST:
            raise InvalidRequest(
                f"the body: more than {MOST} unknown fields, such as {path}", code="unknown_field"
            )
        if name in UNSUPPORTED:
            reason, neutral = UNSUPPORTED[name]
            if value not in neutral:
                accepted = " or ".join(map(json.dumps, neutral))
                raise InvalidRequest(
                    f"{path}: {reason}; accepted: {accepted}",
                    param=path,
                    code="unsupported_field",
                )
            continue
        if strict or misspelt(name, known):
            raise unknown_field(path, known)
        ignored.append(path)
    return ignored


def header(ignored: Sequence[str]) -> str:
    """The value of HEADER. What clients wrote is quoted, so that it cannot contain anything but ASCII."""
    names = [quote(path, safe=SAFE, errors="replace") for path in ignored[:MOST_NAMED]]
    more = len(ignored) - len(names)
    return ", ".join([*names, *([f"and {more} more"] if more else [])])


def _path(location: Sequence[Any]) -> str:
    """The JSON path of a location, with long names and long paths cut."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if len(part) <= LONGEST else f"{part[:LONGEST]}..."
            path += f".{name}" if path else name
    return clip(path, LONGEST_PATH)


def _extras(model: BaseModel, at: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the location and value of every undeclared field, and remove it from its model."""
    extras = model.__pydantic_extra__
    if extras:
        for name in list(extras):
            yield (*at, name), extras.pop(name)
    for name, value in model.__dict__.items():
        kind = type(value)
        if value is None or kind is str or kind is bool:  # most values; the check of a class takes longer
            continue
        if isinstance(value, BaseModel):
            yield from _extras(value, (*at, type(model).model_fields[name].alias or name))
        elif kind is list:
            path = (*at, type(model).model_fields[name].alias or name)
            for index, entry in enumerate(value):
                if isinstance(entry, BaseModel):
                    yield from _extras(entry, (*path, index))
