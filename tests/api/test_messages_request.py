"""Anthropic's Messages API: requests become chat requests, and answers its blocks and events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from fovea.api.convert import chat_prompt, image_references, sampling
from fovea.api.messages_answer import MessagesBodies
from fovea.api.messages_request import CountRequest, MessagesRequest, chat_request, messages_names
from fovea.api.reading import Reading
from fovea.api.unknown import ignored_fields
from fovea.core.constraints import ToolCall
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload
from fovea.core.types import Delta, FinishReason, Message, TextPart, Usage
from tests.api.test_reading import ANSWERS, LOOK, READING, completion, deltas

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}


def request(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    given = messages or ({"role": "user", "content": "hi"},)
    return MessagesRequest.model_validate({"messages": given, "max_tokens": 9, **fields})


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def tool_use(call_id: str, **values: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "look", "input": values}


def tool_result(call_id: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_a_conversation_with_calls() -> None:
    """Results of tools are blocks of the user's message here, and messages of their own in chat requests."""
    body = request(
        {"role": "user", "content": [text("hi")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                text("So:"),
                tool_use("1", city="Köln"),
                tool_use("2"),
            ],
        },
        {
            "role": "user",
            "content": [tool_result("2", [text("b")]), tool_result("1", "a", is_error=True), text("go on")],
        },
        {"role": "assistant", "content": "Yes."},
        system=[text("Be brief."), text(" Please.")],
    )
    chat, conversation = chat_request(body)
    calls = (ToolCall("look", '{"city": "Köln"}', "1"), ToolCall("look", "{}", "2"))
    assert chat_prompt(chat, []).messages == (
        Message("system", (TextPart("Be brief."), TextPart(" Please."))),
        Message("user", (TextPart("hi"),)),
        Message("assistant", (TextPart("So:"),), calls, reasoning="hm"),
        Message("tool", (TextPart("a"),), call_id="1", name="look"),
        Message("tool", (TextPart("b"),), call_id="2", name="look"),
        Message("user", (TextPart("go on"),)),
        Message("assistant", (TextPart("Yes."),)),
    )
    assert conversation.places == [
        "system", "messages[0]", "messages[1]", "messages[2].content[0]", "messages[2].content[1]",
        "messages[2]", "messages[3]",
    ]  # fmt: skip


def test_an_answer_is_sent_back_as_a_whole() -> None:
    """Some clients do not take the content alone. A refusal of Anthropic's models may have none at all."""
    rest = {"id": "msg_1", "type": "message", "model": "m", "stop_sequence": None, "container": None,
            "usage": {"input_tokens": 1}, "stop_details": {"type": "refusal", "category": None}}  # fmt: skip
    for content in ([], [text("No.")]):
        refusal = {"role": "assistant", "content": content, "stop_reason": "refusal", **rest}
        body = request({"role": "user", "content": "hi"}, refusal, {"role": "user", "content": "why?"})
        assert ignored_fields(body, ("stop_sequences",), strict=True) == []
        prompt = chat_prompt(chat_request(body)[0], [])
        assert [message.role for message in prompt.messages] == ["user", "assistant", "user"]
    with pytest.raises(InvalidRequest, match="needs content"):
        chat_prompt(chat_request(request({"role": "user", "content": []}))[0], [])


def test_a_result_without_content() -> None:
    chat, _ = chat_request(request({"role": "user", "content": [tool_result("1")]}))
    assert [(message.role, message.content) for message in chat.messages] == [("tool", "")]
    chat_prompt(chat, [])


def test_images_in_messages_and_results() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    remote = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    chat, _ = chat_request(
        request({"role": "user", "content": [image, tool_result("1", [remote]), text("?")]})
    )
    urls = [reference.url for reference in image_references(chat.messages)]
    assert urls[0] == "https://x/y.png", "results come before the rest of the message"
    assert isinstance(urls[1], Payload)


def test_options() -> None:
    body = request(
        temperature=0.5, top_p=0.9, top_k=4, stream=True, stop_sequences=["END"],
        thinking={"type": "disabled"},
        tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, metadata={"user_id": "x"},
    )  # fmt: skip
    chat, _ = chat_request(body)
    params = sampling(chat, {})
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 4)
    assert params.stop == ("END",)
    assert chat.stream
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.tools is not None
    function = chat.tools[0].function
    assert (function.name, function.description, function.parameters) == ("look", "Looks.", SCHEMA)
    assert params.format is not None
    assert json.loads(params.format.definition) == SCHEMA


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    chat, _ = chat_request(request(tools=[TOOL], tool_choice=choice))
    assert chat.model_dump()["tool_choice"] == expected


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking(kind: str, thinks: bool) -> None:
    chat, _ = chat_request(request(thinking={"type": kind, "budget_tokens": 1024}))
    assert chat.chat_template_kwargs == {"enable_thinking": thinks}


def test_tokens_are_counted_without_max_tokens() -> None:
    body = CountRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]})
    chat, _ = chat_request(body)
    assert chat.max_completion_tokens is None
    assert chat.tools


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([{"role": "user", "content": [tool_use("1")]}], {}, "messages[0].content[0]"),
        ([{"role": "assistant", "content": [text("a"), tool_result("1")]}], {}, "messages[0].content[1]"),
        ([], {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
)
def test_contradictions_name_the_block(
    messages: list[dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(request(*messages, **fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [{"name": "look"}]},
    ],
)
def test_what_this_server_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        request(**fields)


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("messages[0].content", "system.content"),
        ("messages[1].content[2]", "messages[0].content[2]"),
        ("messages[1].content[0].image_url.url", "messages[0].content[0].source"),
        ("max_completion_tokens", "max_tokens"),
        ("max_tokens", "max_tokens"),
        ("stop", "stop_sequences"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("tools[2].function.name", "tools[2].name"),
        ("tools[2].function.parameters", "tools[2].input_schema"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("temperature", "temperature"),
    ],
)
def test_errors_name_the_clients_field(param: str, expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught, messages_names(["system", "messages[0]"]):
        raise InvalidRequest(f"{param}: wrong", param=param)
    assert (caught.value.param, caught.value.message) == (expected, f"{expected}: wrong")


def test_an_error_of_a_real_request() -> None:
    chat, conversation = chat_request(request({"role": "user", "content": []}, system="x"))
    with pytest.raises(InvalidRequest) as caught, messages_names(conversation.places):
        chat_prompt(chat, [])
    assert caught.value.param == "messages[0].content"


def whole(answer: str, reason: FinishReason = "stop", **fields: Any) -> dict[str, Any]:
    return MessagesBodies("m", READING).complete([completion(answer, reason=reason, **fields)])


def stream(answer: str, size: int, reason: FinishReason = "stop") -> list[dict[str, Any]]:
    """The events of an answer as a client gets them."""
    bodies = MessagesBodies("m", READING)
    payloads = [event for delta in deltas(answer, size, reason=reason) for event in bodies.chunks(delta)]
    payloads += bodies.closing(Usage(5, 2), True)
    events = []
    for payload in payloads:
        head, data = bodies.event(payload).decode().strip().split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {payload['type']}"
    return events


FIELDS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the events of a stream as Anthropic's client does it, in the documented order."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = dict(events[0]["message"])
    assert (message["content"], message["stop_reason"]) == ([], None)
    blocks: list[dict[str, Any]] = []
    open_block, arguments = False, ""
    for event in events[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not open_block
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            open_block, arguments = True, ""
            continue
        assert open_block
        assert event["index"] == len(blocks) - 1
        block = blocks[-1]
        if kind == "content_block_delta":
            if block["type"] == "tool_use":
                assert event["delta"]["type"] == "input_json_delta"
                arguments += event["delta"]["partial_json"]
            else:
                name, field = FIELDS[block["type"]]
                assert event["delta"]["type"] == name
                block[field] += event["delta"][field]
        else:
            assert kind == "content_block_stop"
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(arguments) if _is_json(arguments) else {}
            open_block = False
    assert not open_block
    return {**message, **events[-2]["delta"], "content": blocks, "usage": events[-2]["usage"]}


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def outline(message: dict[str, Any]) -> dict[str, Any]:
    """A message without ids, and without what the server adds."""
    blocks = [{k: v for k, v in b.items() if k not in ("id", "citations")} for b in message["content"]]
    return {**{k: v for k, v in message.items() if k not in ("id", "fovea")}, "content": blocks}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_joined_stream_is_the_complete_message(name: str, size: int, reason: FinishReason) -> None:
    assert outline(joined(stream(ANSWERS[name], size, reason))) == outline(whole(ANSWERS[name], reason))


def test_text_after_a_call_stays_after_it() -> None:
    """The complete answer had all text before all calls, and the stream had the order of the model."""
    answer = f"So:\n{LOOK}\nDone."
    assert outline(joined(stream(answer, 7))) == outline(whole(answer))


def test_the_message_of_calls() -> None:
    body = whole(ANSWERS["all"])
    thinking, words, first, second = body["content"]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "m")
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert (words["type"], words["text"]) == ("text", "So:")
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "look", {"at": "é"})
    assert (second["name"], second["input"]) == ("stop", {})
    assert first["id"] != second["id"]
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("answer", "reason", "stop", "expected"),
    [
        ("x", "stop", None, ("end_turn", None)),
        ("x", "length", None, ("max_tokens", None)),
        ("x", "stop", "END", ("stop_sequence", "END")),
        ("x", "stop", 7, ("end_turn", None)),
        (LOOK, "stop", None, ("tool_use", None)),
        (LOOK, "length", None, ("max_tokens", None)),
    ],
)
def test_why_an_answer_has_ended(answer: str, reason: FinishReason, stop: Any, expected: Any) -> None:
    body = whole(answer, reason, stops=(stop,))
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    bodies = MessagesBodies("m", READING)
    bodies.chunks(Delta(0, answer, (1,), finish_reason=reason, stop=stop))
    ends = bodies.closing(Usage(1, 1), True)[-2]["delta"]
    assert (ends["stop_reason"], ends["stop_sequence"]) == expected


def test_cached_tokens_are_counted_apart() -> None:
    """Anthropic's `input_tokens` are those that were not cached."""
    bodies = MessagesBodies("m", Reading())
    [start, *_] = bodies.chunks(Delta(0, "x", (1,), prompt_tokens=10, cached_tokens=8))
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 8)
    usage = bodies.closing(Usage(10, 3, 8), True)[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (2, 8, 3)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_may_be_sent_back(name: str, streamed: bool) -> None:
    """Clients send the content of an answer back as it was, and the conversation goes on."""
    content = (joined(stream(ANSWERS[name], 7)) if streamed else whole(ANSWERS[name]))["content"]
    results = [tool_result(block["id"], "ok") for block in content if block["type"] == "tool_use"]
    user = {"role": "user", "content": "hi"}
    body = request(
        user,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [*results, text("go on")]},
    )
    chat, _ = chat_request(body)
    prompt = chat_prompt(chat, []).messages
    divided = READING.divide(ANSWERS[name], False)
    assert [message.role for message in prompt if message.role != "tool"] == ["user", "assistant", "user"]
    assert prompt[1].reasoning == divided.reasoning
    assert [call.name for call in prompt[1].calls] == [call.name for call in divided.calls]


def test_an_error_in_a_stream() -> None:
    bodies = MessagesBodies("m", Reading())
    event = bodies.failure(InvalidRequest("no", param="messages"))
    assert event["type"] == "error"
    assert event["error"]["type"] == "invalid_request_error"
    assert event["error"]["message"] == "no"
