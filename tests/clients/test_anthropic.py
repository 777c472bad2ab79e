"""The package `anthropic`: messages, their streams, tools, counted tokens and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from tests.clients.support import (
    BLUE_STAR,
    BY_NAME,
    CASES,
    COUNT_SHAPES,
    ITEM,
    MODEL,
    POINT_AT,
    READ_SIGN,
    SAVE_COUNT,
    TOOLS,
    Case,
    Item,
    Server,
    ToolCase,
    base64_png,
)

each_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def user(text: str, *pictures: str) -> dict[str, Any]:
    images = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_png(name)}}
        for name in pictures
    ]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def user_asks(case: Case) -> dict[str, Any]:
    return user(case.question, *case.pictures)


def ask(client: Anthropic, *messages: Any, **extra: Any) -> Any:
    return client.messages.create(messages=list(messages), **{**GREEDY, **extra})


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def test_text(client: Anthropic) -> None:
    """a text gets an answer with its usage"""
    answer = ask(client, {"role": "user", "content": "How many circles are there?"})
    assert isinstance(answer, Message)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert text_of(answer)
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 0


@pytest.mark.parametrize("name", ["shapes", "sign", "colours"])
def test_image(client: Anthropic, name: str) -> None:
    """a question about an image in base64 gets the right answer"""
    assert text_of(ask(client, user_asks(CASES[name]))) in CASES[name].answers


@pytest.mark.parametrize(
    "system",
    ["Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]],
    ids=["text", "blocks"],
)
def test_system(client: Anthropic, system: Any) -> None:
    """`system` is part of the prompt, as a text and as blocks"""
    plain = ask(client, user_asks(READ_SIGN))
    answer = ask(client, user_asks(READ_SIGN), system=system)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > plain.usage.input_tokens
    assert "B6F63" in text_of(answer)


def test_answer_sent_back(client: Anthropic) -> None:
    """the content of an answer is sent back unchanged, and the next question is answered"""
    first = user("How many circles are there?", "shapes.png")
    said = {"role": "assistant", "content": ask(client, first).content}
    second = ask(client, first, said, {"role": "user", "content": "How many crosses are there?"})
    assert text_of(second) == "There are 2 crosses."


def test_stream_helper(client: Anthropic) -> None:
    """the helper `messages.stream` gives the complete answer and its usage"""
    whole = ask(client, user_asks(COUNT_SHAPES))
    with client.messages.stream(messages=[user_asks(COUNT_SHAPES)], **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stream_events(client: Anthropic) -> None:
    """`stream` gives the events in the order of Anthropic's API"""
    events = [event for event in ask(client, user_asks(COUNT_SHAPES), stream=True) if event.type != "ping"]
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_max_tokens(client: Anthropic) -> None:
    """`max_tokens` ends an answer, and `stop_reason` says so"""
    answer = ask(client, user_asks(COUNT_SHAPES), max_tokens=2)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 2


def test_stop_sequences(client: Anthropic) -> None:
    """`stop_sequences` end an answer, and `stop_sequence` is the text that did"""
    answer = ask(client, user_asks(READ_SIGN), stop_sequences=["never", "is"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "is")
    assert text_of(answer) == "The text "


@pytest.mark.not_at_gateway("chat completions cannot count tokens")
def test_count_tokens(client: Anthropic) -> None:
    """`count_tokens` gives the number of tokens of the prompt"""
    messages = [user_asks(READ_SIGN)]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.")
    usage = ask(client, *messages, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def ask_with_tools(client: Anthropic, tool: ToolCase, **extra: Any) -> Any:
    tools = [each.anthropic for each in TOOLS]
    return ask(client, user(tool.question, tool.picture), tools=tools, **extra)


@each_tool
def test_tools_auto(client: Anthropic, tool: ToolCase) -> None:
    """tools are offered, and the answer is a text or valid calls"""
    answer = ask_with_tools(client, tool)
    calls = calls_of(answer)
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")
    for call in calls:
        BY_NAME[call.name].check(call.name, call.input)


@pytest.mark.parametrize("choice", ["any", "tool"])
@each_tool
def test_tools_forced(client: Anthropic, tool: ToolCase, choice: str) -> None:
    """`tool_choice` any or a named tool gives one valid call"""
    name = {"name": tool.name} if choice == "tool" else {}
    answer = ask_with_tools(
        client, tool, tool_choice={"type": choice, "disable_parallel_tool_use": True, **name}
    )
    [call] = calls_of(answer)
    assert answer.stop_reason == "tool_use"
    assert call.id
    called = tool if choice == "tool" else BY_NAME[call.name]
    called.check(call.name, call.input)


def test_tools_stream(client: Anthropic) -> None:
    """the stream helper gathers a call, which is the complete one"""
    request: dict[str, Any] = {
        "messages": [user(POINT_AT.question, POINT_AT.picture)],
        "tools": [POINT_AT.anthropic],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        **GREEDY,
    }
    [whole] = calls_of(client.messages.create(**request))
    with client.messages.stream(**request) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        [call] = calls_of(stream.get_final_message())
    assert json.loads("".join(pieces)) == call.input == whole.input
    POINT_AT.check(call.name, call.input)


def test_tool_result(client: Anthropic) -> None:
    """the call is sent back with the result of the tool, and the answer is a text"""
    first = ask_with_tools(client, SAVE_COUNT, tool_choice={"type": "tool", "name": "save_count"})
    [call] = calls_of(first)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"ok": true}'}
    second = ask(
        client,
        user(SAVE_COUNT.question, SAVE_COUNT.picture),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
        tools=[SAVE_COUNT.anthropic],
        tool_choice={"type": "none"},
    )
    assert second.stop_reason == "end_turn"
    assert text_of(second)


def test_parse(client: Anthropic) -> None:
    """`messages.parse` gives an object of a pydantic model"""
    answer = client.messages.parse(messages=[user_asks(ITEM)], output_format=Item, **GREEDY)
    assert answer.parsed_output == BLUE_STAR


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"messages": []}, {"tool_choice": {"type": "any"}}],
    ids=["max_tokens", "messages", "tool_choice"],
)
def test_errors(client: Anthropic, wrong: dict[str, Any]) -> None:
    """a wrong field raises BadRequestError with an error in Anthropic's form"""
    request: dict[str, Any] = {"messages": [user_asks(READ_SIGN)], **GREEDY, **wrong}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**request)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body.get("type") == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert next(iter(wrong)) in caught.value.body["error"]["message"]


def test_unknown_model(client: Anthropic) -> None:
    """an unknown model raises NotFoundError with an error in Anthropic's form"""
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, user("?"), model="claude-9")
    assert isinstance(caught.value.body, dict)
    assert caught.value.body.get("type") == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert "claude-9" in caught.value.body["error"]["message"]
