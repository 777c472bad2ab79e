"""Reads answers of all three APIs, complete and as streams. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Answer:
    """The content of a body with status 200.

    text: the text so far. done: whether it ends with the mark of success.
    error: the error object that a stream ended with; None: there is none.
    answer_id: id of the answer. usage: as the body has it; None: it has none.
    damage: why the body cannot be read; empty: it can.
    pieces: events of a chat stream that hold text. Each is a token at least.
    """

    text: str = ""
    done: bool = False
    error: Mapping[str, Any] | None = None
    answer_id: str = ""
    usage: Mapping[str, Any] | None = None
    damage: str = ""
    pieces: int = 0


def read(api: str, body: bytes, *, stream: bool) -> Answer:
    """Return the answer that a body holds, complete or not."""
    answer = Answer()
    try:
        if stream:
            for name, data in _events(body):
                _READERS[api](answer, name, data)
        else:
            _complete(api, json.loads(body), answer)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        answer.damage = f"{type(error).__name__}: {error}"[:200]
    return answer


def _complete(api: str, value: Mapping[str, Any], answer: Answer) -> None:
    answer.answer_id, answer.usage = value["id"], value.get("usage")
    if api == "chat":
        choice = value["choices"][0]
        answer.text = choice["message"]["content"] or ""
        answer.done = choice["finish_reason"] in ("stop", "length")
    elif api == "messages":
        answer.text = "".join(part["text"] for part in value["content"] if part["type"] == "text")
        answer.done = value["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
    else:
        parts = [part for item in value["output"] if item["type"] == "message" for part in item["content"]]
        answer.text = "".join(part["text"] for part in parts if part["type"] == "output_text")
        answer.done = value["status"] in ("completed", "incomplete")


def _events(body: bytes) -> Iterator[tuple[str, str]]:
    """Yield name and data of every whole event. Raises ValueError for bytes that are not UTF-8."""
    whole, _, _ = body.replace(b"\r\n", b"\n").rpartition(b"\n\n")
    for event in whole.decode().split("\n\n"):
        name, data = "", []
        for line in event.split("\n"):
            field, _, value = line.partition(":")
            if field == "event":
                name = value.removeprefix(" ")
            elif field == "data":
                data.append(value.removeprefix(" "))
        if data:
            yield name, "\n".join(data)


def _chat_event(answer: Answer, name: str, data: str) -> None:
    if data == "[DONE]":
        answer.done = True
        return
    value = json.loads(data)
    if value.get("error") is not None:
        answer.error = value["error"]
        return
    answer.answer_id = value["id"]
    answer.usage = value.get("usage") or answer.usage
    for choice in value["choices"]:
        piece = choice["delta"].get("content") or ""
        answer.text += piece
        answer.pieces += bool(piece)


def _messages_event(answer: Answer, name: str, data: str) -> None:
    value = json.loads(data)
    match value["type"]:
        case "message_start":
            answer.answer_id = value["message"]["id"]
        case "content_block_delta":
            answer.text += value["delta"].get("text", "")
        case "message_delta":
            answer.usage = value.get("usage")
        case "message_stop":
            answer.done = True
        case "error":
            answer.error = value["error"]


def _responses_event(answer: Answer, name: str, data: str) -> None:
    if data == "[DONE]":
        return
    value = json.loads(data)
    match value["type"]:
        case "response.created":
            answer.answer_id = value["response"]["id"]
        case "response.output_text.delta":
            answer.text += value["delta"]
        case "response.completed" | "response.incomplete":
            answer.done, answer.usage = True, value["response"].get("usage")
        case "error" | "response.failed":
            answer.error = value.get("error") or value.get("response", {}).get("error") or value


_READERS = {"chat": _chat_event, "messages": _messages_event, "responses": _responses_event}
