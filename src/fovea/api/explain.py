"""Explanation of pydantic's errors: one sentence about one field of the body that the client sent.

Pydantic tries every branch of a union, reports an error for each, and names the branches in its paths. A
client needs to know which field is wrong, why, and which values are accepted.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from fovea.api import schema
from fovea.api.answer_format import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from fovea.api.content import ChatMessage, ImageURL, VideoURL
from fovea.api.errors import clip
from fovea.api.wire import Wire
from fovea.core.errors import InvalidRequest

CAUSES = ("json_invalid", "string_unicode", "literal_error", "union_tag_invalid", "missing", "too_long")
"""Kinds of errors from which others follow. The first of them that is present is explained."""
UNION_TAGS = (
    "text", "refusal", "image_url", "video_url", "message", "function_call", "function_call_output",
    "input_text", "input_image", "output_text", "image", "tool_use", "tool_result", "thinking",
)  # fmt: skip
UNTAGGED = ("messages", "prediction.content")
"""Lists whose entries have no tag, but a field that is called like one: refusal, text."""
OBJECT = ("model_type", "model_attributes_type", "dict_type")
EXPECTED = "Input should be ", "Value error, must be "
"""Beginnings of pydantic's messages, and of those of our own checks, which what is accepted follows."""
SHORTEST, SIMILAR = 5, 0.8
"""A name with as many letters and as similar to a field's name (difflib's ratio) counts as misspelt."""
ELSEWHERE = ("models", "add_special_tokens", "prompts", "input")
"""Fields of other servers' APIs that resemble those of this one."""
LONGEST = 64
"""Longest text from a request that is repeated in a message, in characters."""
LONGEST_PATH = 200
"""Longest JSON path in a message, in characters. The middle of a longer one is left out."""

Problem = Mapping[str, Any]
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST
_SHORT.maxlevel = _SHORT.maxlist = _SHORT.maxdict = 3


def explain(problems: Sequence[Problem]) -> InvalidRequest:
    """The error to send for a body that is not valid. It explains the problem from which the others follow.

    problems: pydantic's errors.
    """
    if not problems:
        return InvalidRequest("the body is not valid")
    first = _main_problem(problems)
    path = path_of(first["loc"])
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return InvalidRequest(f"the body is not JSON: {reason}", code="invalid_json")
    if kind == "union_tag_invalid" and "discriminator" in (context := first.get("ctx", {})):
        path = f"{path}.type"
        tags = f"must be one of {context['expected_tags']}"
        return InvalidRequest(f"{path}: {tags}, got {shorten(context['tag'])}", param=path or None)
    if kind == "union_tag_not_found":
        kind, path = "missing", f"{path}.type"
    if kind == "missing":
        return InvalidRequest(f"{path or 'the body'} is required", param=path or None, code="missing_field")
    if isinstance(first.get("input"), bytes) and not path:
        return InvalidRequest(
            "the body must be JSON, sent as Content-Type: application/json", code="invalid_json"
        )
    reason = _reason(first, [p for p in problems if path_of(p["loc"]) == path])
    value = shorten(first.get("input"))
    return InvalidRequest(f"{path or 'the body'}: {reason}, got {value}", param=path or None)


@contextmanager
def explained() -> Iterator[None]:
    """Raise the error that a client can read in place of pydantic's ValidationError."""
    try:
        yield
    except ValidationError as error:
        raise explain(error.errors(include_url=False)) from None


def path_of(location: Sequence[Any]) -> str:
    """The JSON path of a pydantic location, without the names of union branches.

    ("body", "messages", 0, "content", "list[...]", 1, "text", "text") becomes messages[0].content[1].text.
    """
    path = ""
    tagged = False
    for part in location[1:] if location[:1] in (("body",), ("query",), ("path",)) else location:
        if isinstance(part, int):
            tagged = path not in UNTAGGED
            path += f"[{part}]"
        elif (tagged and part in UNION_TAGS) or _is_type_name(part):
            tagged = False
        else:
            path += _step(part, path)
            tagged = False
    return clip(path, LONGEST_PATH)


def path_of_extra(location: Sequence[Any]) -> str:
    """The JSON path of an undeclared field. Long names and long paths are cut."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else _step(part, path)
    return clip(path, LONGEST_PATH)


def _step(name: str, path: str) -> str:
    """The name of a field as it follows a path."""
    name = name if len(name) <= LONGEST else f"{name[:LONGEST]}..."
    return f".{name}" if path else name


def fields_of(model: type[Wire]) -> tuple[str, ...]:
    """The names of all fields of a body and of its messages, for hints at misspelled ones."""
    inner = (
        ChatMessage, ImageURL, VideoURL, schema.StreamOptions, schema.VisualTokensBody,
        ResponseFormat, JsonSchemaFormat, StructuredOutputs,
    )  # fmt: skip
    models = (model, *inner) if issubclass(model, schema.Sampling | schema.TokenizeRequest) else (model,)
    return tuple(field.alias or name for each in models for name, field in each.model_fields.items())


def shorten(value: Any) -> str:
    """A short form of a sent value for a message, limited in length and in depth."""
    return _SHORT.repr(value)


def _main_problem(problems: Sequence[Problem]) -> Problem:
    for kind in CAUSES:
        for problem in problems:
            if problem["type"] == kind:
                return problem
    return max(problems, key=lambda p: path_of(p["loc"]).count(".") + path_of(p["loc"]).count("["))


def _reason(first: Problem, same: Sequence[Problem]) -> str:
    """The reason why the value is wrong. For a union it lists what each branch accepts.

    same: all problems of this field, with `first` among them.
    """
    if first["type"] == "string_unicode":
        return "the text holds half of a surrogate pair, which is not valid Unicode"
    expected = dict.fromkeys(text for p in same if (text := _expected(p)) is not None)
    if _expected(first) is not None:
        return f"must be {' or '.join(expected)}"
    message = str(first["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _expected(problem: Problem) -> str | None:
    if problem["type"] in OBJECT:
        return "an object"
    message = str(problem["msg"])
    prefix = next((prefix for prefix in EXPECTED if message.startswith(prefix)), None)
    return None if prefix is None else message.removeprefix(prefix)


def unknown_field(path: str, fields: Sequence[str]) -> InvalidRequest:
    """The error for a field that is not known. fields: known names; it may be a misspelling of one."""
    near = difflib.get_close_matches(path.rpartition(".")[2], fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidRequest(f"unknown field {path!r}{hint}", param=path, code="unknown_field")


def misspelt(name: str, fields: Sequence[str]) -> bool:
    """Whether a name looks like a misspelt field. Short names resemble too many others to tell."""
    return (
        len(name) >= SHORTEST
        and name not in ELSEWHERE
        and bool(difflib.get_close_matches(name[:LONGEST], fields, n=1, cutoff=SIMILAR))
    )


def _is_type_name(part: str) -> bool:
    """Whether a part of a path is the name of a union's branch. No field of the API has such a name."""
    return part in ("str", "int", "bool", "constrained-str") or "[" in part
