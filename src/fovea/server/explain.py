"""Pydantic's complaints about a body, as one sentence about one field, in the words of the wire.

Pydantic tries every branch of a union and complains about all of them, and names the branches in its paths. What a
client can use is the field that it sent, what was wrong with it, and what would be accepted there.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fovea.api import schema
from fovea.core.errors import InvalidRequest

# The first kind that is present is what the others follow from.
TELLING = (
    "json_invalid",
    "string_unicode",
    "literal_error",
    "union_tag_invalid",
    "extra_forbidden",
    "missing",
    "too_long",
)
UNION_TAGS = ("text", "image_url", "video_url")
OBJECT = ("model_type", "model_attributes_type", "dict_type")
WANTED = "Input should be "
LONGEST = 64

Problem = Mapping[str, Any]
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST
_SHORT.maxlevel = _SHORT.maxlist = _SHORT.maxdict = 3


def explain(problems: Sequence[Problem], fields: Sequence[str]) -> InvalidRequest:
    """The most telling problem. `fields`: the names that an unknown one may be a misspelling of."""
    if not problems:
        return InvalidRequest("the body is not valid")
    first = _most_telling(problems)
    path = path_of(first["loc"])
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return InvalidRequest(f"the body is not JSON: {reason}", code="invalid_json")
    if kind == "extra_forbidden":
        return _unknown_field(path, fields)
    if kind == "union_tag_not_found":
        kind, path = "missing", f"{path}.type"
    if kind == "missing":
        return InvalidRequest(f"{path or 'the body'} is required", param=path or None, code="missing_field")
    if isinstance(first.get("input"), bytes) and not path:
        return InvalidRequest(
            "the body must be JSON, sent as Content-Type: application/json", code="invalid_json"
        )
    reason = _reason(first, [p for p in problems if path_of(p["loc"]) == path])
    got = shorten(first.get("input"))
    return InvalidRequest(f"{path or 'the body'}: {reason}, got {got}", param=path or None)


def path_of(location: Sequence[Any]) -> str:
    """("body", "messages", 0, "content", "list[...]", 1, "text", "text") is messages[0].content[1].text."""
    path = ""
    tagged = False
    for part in location[1:] if location[:1] == ("body",) else location:
        if isinstance(part, int):
            path += f"[{part}]"
            tagged = True
        elif (tagged and part in UNION_TAGS) or _is_type_name(part):
            tagged = False
        else:
            name = part if len(part) <= LONGEST else f"{part[:LONGEST]}..."
            path += f".{name}" if path else name
            tagged = False
    return path


def shorten(value: Any) -> str:
    """What was sent, for a message: neither megabytes nor a thousand levels of it."""
    return _SHORT.repr(value)


def _most_telling(problems: Sequence[Problem]) -> Problem:
    for kind in TELLING:
        for problem in problems:
            if problem["type"] == kind:
                return problem
    return max(problems, key=lambda p: path_of(p["loc"]).count(".") + path_of(p["loc"]).count("["))


def _reason(first: Problem, same: Sequence[Problem]) -> str:
    """What is accepted: by any branch of a union, if that is what the problems are about."""
    if first["type"] == "string_unicode":
        return "the text holds half of a surrogate pair, which is not valid Unicode"
    wanted = dict.fromkeys(w for p in same if (w := _wanted(p)) is not None)
    if _wanted(first) is not None:
        return f"must be {' or '.join(wanted)}"
    message = str(first["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _wanted(problem: Problem) -> str | None:
    if problem["type"] in OBJECT:
        return "an object"
    message = str(problem["msg"])
    return message.removeprefix(WANTED) if message.startswith(WANTED) else None


def _unknown_field(path: str, fields: Sequence[str]) -> InvalidRequest:
    name = path.rpartition(".")[2]
    if name in schema.UNSUPPORTED:
        return InvalidRequest(
            f"{path}: {schema.UNSUPPORTED[name]} by this server", param=path, code="unsupported_field"
        )
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidRequest(f"unknown field {path!r}{hint}", param=path, code="unknown_field")


def _is_type_name(part: str) -> bool:
    """Pydantic names the branch of a union in the path; no field of ours looks like that."""
    return part in ("str", "int", "constrained-str") or "[" in part
