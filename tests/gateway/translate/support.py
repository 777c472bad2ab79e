"""Chat streams of engines, and checkers of the grammar of both APIs' events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from fovea.api import sse
from fovea.gateway.translate.translation import Api, ChatTranslation, to_chat

Json = dict[str, Any]
HELLO: dict[Api, Json] = {
    "messages": {
        "model": "m",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "x"}],
        "stop_sequences": ["END"],
    },
    "responses": {"model": "m", "input": "x"},
}
APIS: tuple[Api, ...] = ("messages", "responses")


def numbered() -> Callable[[str], str]:
    """A maker of ids that gives the same ids every time."""
    numbers = count()
    return lambda kind: f"{kind}_{next(numbers)}"


def translation(api: Api, **fields: Any) -> ChatTranslation:
    return to_chat(api, {**HELLO[api], **fields})


def translated(api: Api, parts: Sequence[bytes], error: str | None = None) -> bytes:
    """The bytes of the events for a stream that arrives in these parts."""
    translator = translation(api).translator(ids=numbered(), clock=lambda: 7.0)
    return b"".join([*(translator.feed(part) for part in parts), translator.close(error)])


def events(data: bytes) -> list[Json]:
    """The events of a stream. Checks that the name of each is its type."""
    found = [json.loads(payload) for payload in sse.Decoder().feed(data)]
    names = [line[7:] for line in data.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in found]
    return found


def chunk(delta: Any = None, reason: str | None = None, **fields: Any) -> Json:
    """A chunk with one choice."""
    choice = {"index": 0, "delta": {} if delta is None else delta, "finish_reason": reason}
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": [choice],
    } | fields


def call(index: int | None, text: str = "", **head: Any) -> Json:
    """The delta of a piece of a tool call. head: id, and name of the function."""
    function = {"arguments": text, **({"name": head.pop("name")} if "name" in head else {})}
    place = {} if index is None else {"index": index}
    return {"tool_calls": [{**place, **head, "type": "function", "function": function}]}


def line(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def stream(*chunks: Json, done: bool = True) -> bytes:
    return b"".join(map(line, chunks)) + (sse.DONE if done else b"")


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 2, "image_tokens": 3},
}
RICH = stream(
    chunk({"role": "assistant", "content": None}),
    chunk({"reasoning_content": "hm …"}),
    chunk({"content": "Ich schaue nach: 🌞"}),
    chunk(call(0, id="a", name="look")),
    chunk(call(0, '{"city": ')),
    chunk(call(0, '"Köln"}')),
    chunk(call(1, "{}", id="b", name="stop")),
    chunk({}, "tool_calls"),
    {"choices": [], "usage": USAGE},
)
"""Reasoning, text in several scripts, two calls, and the token counts in a chunk of their own."""


def check(api: Api, found: Sequence[Json], *, failed: bool = False) -> None:
    """Check the order of a stream's events, and that only the last one ends it."""
    (check_messages if api == "messages" else check_responses)(found, failed)


def check_messages(found: Sequence[Json], failed: bool) -> None:
    """Anthropic's grammar: message_start, blocks one after the other, message_delta, message_stop."""
    state, index, kind = "before", -1, ""
    for event in found:
        name = event["type"]
        if name == "error":
            assert {"type", "message"} <= event["error"].keys()
            state = "error"
        elif name == "message_start":
            assert state == "before"
            assert event["message"]["content"] == []
            assert event["message"]["stop_reason"] is None
            state = "between"
        elif name == "content_block_start":
            assert (state, event["index"]) == ("between", index + 1)
            state, index, kind = "block", event["index"], event["content_block"]["type"]
        elif name == "content_block_delta":
            wanted = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
            assert (state, event["index"], event["delta"]["type"]) == ("block", index, wanted[kind])
        elif name == "content_block_stop":
            assert (state, event["index"]) == ("block", index)
            state = "between"
        elif name == "message_delta":
            assert state == "between"
            assert index >= 0
            assert event["delta"]["stop_reason"]
            state = "ending"
        else:
            assert (name, state) == ("message_stop", "ending")
            state = "stopped"
    assert state == ("error" if failed else "stopped")
    assert [event["type"] for event in found].count("error") == failed


def check_responses(found: Sequence[Json], failed: bool) -> None:
    """OpenAI's grammar: created, in_progress, items one after the other, and one last event."""
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    names = [event["type"].removeprefix("response.") for event in found]
    if names[0] != "error":
        assert names[:2] == ["created", "in_progress"]
    item, done = None, []
    for event, name in zip(found[2:-1], names[2:-1], strict=True):
        if name == "output_item.added":
            assert (item, event["output_index"]) == (None, len(done))
            item = event["item"]
        elif name == "output_item.done":
            assert item is not None
            assert event["item"]["id"] == item["id"]
            done.append(event["item"])
            item = None
        else:
            assert item is not None
            assert (event["item_id"], event["output_index"]) == (item["id"], len(done))
    if failed:
        assert names[-1] == "error"
        assert {"completed", "incomplete"}.isdisjoint(names)
        return
    assert names[-1] in ("completed", "incomplete")
    assert item is None
    assert found[-1]["response"]["output"] == done
