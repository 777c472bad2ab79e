"""Reads what backends answer: chunks of streams, complete chat completions, and errors of any engine.

Engines differ in small ways. What is accepted beside OpenAI's form, because an engine sends it:

- chunks without choices, with a role alone, with `null` in place of a text, with usage beside a choice;
- reasoning as `reasoning_content` or `reasoning`; content as a list of parts;
- tool calls without `index` or `id`, one call in place of a list, arguments as an object;
- a call whose name and id come again with each piece of its arguments;
- the stop string as `stop_reason` or `matched_stop`; no usage at all.

Unknown fields are ignored. What cannot be understood raises BackendError: a guess could end in a wrong call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.api.errors import LONGEST_MESSAGE, LONGEST_PARAM, clip, error_body
from fovea.api.reading import Ending, NewId
from fovea.core.errors import FoveaError
from fovea.core.types import Usage
from fovea.dialects.reader import Piece
from fovea.gateway.usage.prices import visual_tokens_of

OPENAI_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
"""Type of an error by HTTP status. Others: invalid_request_error below 500, and server_error."""
ANTHROPIC_KINDS = OPENAI_KINDS | {413: "request_too_large", 503: "overloaded_error", 529: "overloaded_error"}
"""Anthropic's types. Others: invalid_request_error below 500, and api_error."""
MOST_LEVELS = 100
"""Levels of nesting that a backend's answer may have. Writing deeper ones could exceed Python's stack."""
FAILED = ("error", "abort")
"""Finish reasons of engines for answers that are not whole."""


class ChatReader:
    """Reader of one answer.

    model: name of the model as the backend reports it; "": it has not.
    created: Unix time in seconds; 0: it has not been reported.
    usage: token counts so far; None: none arrived.
    reason: finish reason; None: the answer has not ended.
    """

    def __init__(self, stops: Sequence[str], ids: NewId) -> None:
        """stops: the stop strings of the request. ids: makes the ids of calls that have none."""
        self.model = ""
        self.created = 0
        self.usage: Usage | None = None
        self.reason: str | None = None
        self._stops = stops
        self._ids = ids
        self._stop: str | None = None
        self._extension: dict[str, Any] | None = None
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._last: _Call | None = None
        self._begun = 0
        self._used: set[str] = set()

    def read(self, body: dict[str, Any], part: str) -> tuple[list[Piece], list[Any]] | None:
        """Read a chunk or a complete body. Returns the pieces of its first choice, and log probabilities.

        None: it has no choice. part: "delta" for a chunk, and "message" for a complete body.
        Raises BackendError.
        """
        self._head(body)
        choice = _first_choice(body.get("choices"))
        if choice is None:
            return None
        message = choice.get(part)
        if message is None:
            message = {}
        if not isinstance(message, dict):
            raise BackendError(f"the backend's {part} is not an object")
        pieces = self._pieces(message, part == "message")
        self._finish(choice)
        logprobs = choice.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        return pieces, valid_json(entries) if isinstance(entries, list) else []

    def ending(self) -> Ending:
        """The ending of the answer. Raises BackendError if it has none, or if a call has no name."""
        if self.reason is None:
            raise BackendError("the backend's answer broke off: it has no finish reason")
        if any(call.number < 0 for call in self._calls):
            raise BackendError("the backend's answer has a tool call without a name")
        return Ending(self.reason, self._stop, self.usage, self._extension)

    def _head(self, body: dict[str, Any]) -> None:
        if not self.model and isinstance(body.get("model"), str):
            self.model = valid_text(body["model"])
        if not self.created:
            self.created = _count(body.get("created"))
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.usage = usage_of(usage)
        extension = body.get("fovea")
        if isinstance(extension, dict):
            self._extension = valid_json(extension)

    def _finish(self, choice: dict[str, Any]) -> None:
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            if reason in FAILED:
                raise BackendError(f"the backend ended the answer early, with the finish reason {reason!r}")
            self.reason = reason
        for name in ("stop_reason", "matched_stop"):
            stop = choice.get(name)
            if isinstance(stop, str) and stop in self._stops:
                self._stop = stop

    def _pieces(self, message: dict[str, Any], whole: bool) -> list[Piece]:
        """The pieces of a message, or of a part of one. whole: whether all its calls are whole."""
        pieces: list[Piece] = []
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            pieces.append(Piece("reasoning", valid_text(reasoning)))
        for name in ("content", "refusal"):
            content = message.get(name)
            if content:
                pieces += _content(content)
        calls = message.get("tool_calls")
        if calls:
            for call in calls if isinstance(calls, list) else [calls]:
                pieces += self._call(call, whole)
        return pieces

    def _call(self, body: Any, whole: bool) -> Iterator[Piece]:
        """Yield the pieces of an entry of `tool_calls`. whole: whether it is a whole call."""
        function = body.get("function") if isinstance(body, dict) else None
        if not isinstance(function, dict):
            raise BackendError("the backend's answer has a tool call without a function")
        name, own = _string(function.get("name")), _string(body.get("id"))
        call = None if whole else self._known(body.get("index"), own, name)
        if call is None:
            call = self._new(body.get("index"))
        call.id = call.id or own
        arguments = _arguments(function.get("arguments"))
        if call.number < 0:
            call.arguments += arguments
            if not name:
                return
            yield self._begin(call, name)
            arguments = call.arguments
        if arguments:
            if call is not self._last:
                raise BackendError("the backend continued a tool call after it had begun another one")
            yield Piece("arguments", arguments, call.number)

    def _known(self, index: Any, own: str, name: str) -> _Call | None:
        """The call that an entry continues; None: it begins a new one. own: the entry's id."""
        if type(index) is int:
            call = self._by_index.get(index)
            other = call is not None and name and own and call.id and own != call.id
            return None if other else call
        if not name:
            return self._last
        return next((call for call in self._calls if own and call.id == own), None)

    def _new(self, index: Any) -> _Call:
        call = _Call()
        self._calls.append(call)
        if type(index) is int:
            self._by_index[index] = call
        return call

    def _begin(self, call: _Call, name: str) -> Piece:
        """Begin a call. Some engines give all calls one id; results could not be told apart then."""
        call.number, self._begun = self._begun, self._begun + 1
        unique = call.id and call.id not in self._used
        known = call.id if unique else self._ids("call")
        self._used.add(known)
        self._last = call
        return Piece("call", name, call.number, known)


class BackendError(FoveaError):
    """A backend refused a request or failed, or it answered something that cannot be translated.

    status: HTTP status of the backend's answer; 502 if its status was not an error.
    """

    status = 502
    default_code = "bad_backend_answer"

    @classmethod
    def of(cls, status: int, body: Any) -> BackendError:
        """The error that a backend's answer describes, in one of the forms that engines have.

        OpenAI's `{"error": {...}}`, `{"error": "text"}`, and a body that is the error itself.
        status: HTTP status; 200: unknown, as within a stream.
        """
        fields: Any = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(fields, str):
            fields = {"message": fields}
        fields = fields if isinstance(fields, dict) else {}
        message, param, code = (fields.get(name) for name in ("message", "param", "code"))
        if not isinstance(message, str) or not message:
            message = f"the backend answered with an error that has no message (HTTP status {status})"
        error = cls(
            clip(valid_text(message), LONGEST_MESSAGE),
            param=valid_text(param) if isinstance(param, str) else None,
            code=valid_text(code) if isinstance(code, str) else "backend_error",
        )
        told = code if isinstance(code, int) and 400 <= code < 600 else None
        error.status = status if status >= 400 else told or cls.status
        error.kind = OPENAI_KINDS.get(
            error.status, "invalid_request_error" if error.status < 500 else "server_error"
        )
        return error


def valid_text(text: str) -> str:
    """A text whose halves of surrogate pairs became replacement characters, as no UTF-8 can hold them."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def valid_json(value: Any) -> Any:
    """A JSON value whose texts are valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    valid = valid_text(text)
    return value if valid == text else json.loads(valid)


def is_error(body: dict[str, Any]) -> bool:
    """Whether a body or a chunk of a backend describes an error."""
    return bool(body.get("error")) or body.get("object") == "error"


def error_fields(api: str, error: FoveaError) -> dict[str, Any]:
    """The fields type, message, param and code of an error, with the types of an API.

    Messages of backends are passed on, because the backend has decided what its clients may read.
    """
    fields: dict[str, Any] = error_body(error)["error"]
    if isinstance(error, BackendError):
        param = None if error.param is None else clip(error.param, LONGEST_PARAM)
        fields |= {"message": clip(error.message, LONGEST_MESSAGE), "param": param}
    if api == "messages":
        fields["type"] = ANTHROPIC_KINDS.get(
            error.status, "invalid_request_error" if error.status < 500 else "api_error"
        )
    return fields


@dataclass(slots=True)
class _Call:
    """A tool call of an answer.

    number: position among the calls that have begun; -1: its name has not arrived.
    arguments: JSON text that arrived before the name.
    """

    id: str = ""
    number: int = -1
    arguments: str = ""


def usage_of(body: dict[str, Any]) -> Usage:
    """The token counts of a backend's `usage`. What it leaves out, or has as no whole number, is 0."""
    prompt, answer = (body.get(f"{name}_tokens_details") for name in ("prompt", "completion"))
    of_prompt = prompt if isinstance(prompt, dict) else {}
    of_answer = answer if isinstance(answer, dict) else {}
    total = _count(body.get("prompt_tokens"))
    return Usage(
        prompt=total,
        completion=_count(body.get("completion_tokens")),
        cached=min(total, _count(of_prompt.get("cached_tokens"))),
        image=visual_tokens_of(of_prompt) or 0,
        reasoning=_count(of_answer.get("reasoning_tokens")),
        dropped=_count(of_prompt.get("dropped_tokens")),
        drafts=_count(of_answer.get("draft_tokens")),
        accepted_drafts=_count(of_answer.get("accepted_draft_tokens")),
        accepted_prediction=_count(of_answer.get("accepted_prediction_tokens")),
        rejected_prediction=_count(of_answer.get("rejected_prediction_tokens")),
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _string(value: Any) -> str:
    return valid_text(value) if isinstance(value, str) else ""


def _first_choice(choices: Any) -> dict[str, Any] | None:
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            raise BackendError("the backend's choice is not an object")
        if not choice.get("index"):
            return choice
    return None


def _content(content: Any) -> Iterator[Piece]:
    """Yield the pieces of a message's content: a text, or parts that are text or thinking."""
    if isinstance(content, str):
        yield Piece("content", valid_text(content))
        return
    if not isinstance(content, list):
        raise BackendError("the backend's content is neither a text nor a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and _string(part.get("text")):
            yield Piece("content", _string(part["text"]))
        elif kind == "thinking":
            inner = part.get("thinking")
            texts = inner if isinstance(inner, list) else [{"text": inner}]
            text = "".join(_string(entry.get("text")) for entry in texts if isinstance(entry, dict))
            if text:
                yield Piece("reasoning", text)
        elif kind != "text":
            raise BackendError(f"the backend's content has a part of the type {str(kind)[:50]!r}")


def _arguments(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(valid_json(value), ensure_ascii=False)
    return _string(value)
