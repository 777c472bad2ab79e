"""The package `litellm`, which calls the server as a provider with OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.support import (
    BY_NAME,
    CASES,
    COUNT,
    COUNT_SHAPES,
    MODEL,
    READ_SIGN,
    SAVE_COUNT,
    TOOLS,
    TRIANGLES,
    Count,
    Server,
    user,
    user_asks,
)


def ask(server: Server, *messages: Any, **extra: Any) -> Any:
    return litellm.completion(
        model=f"openai/{MODEL}",
        api_base=server.v1,
        api_key="none",
        messages=list(messages),
        temperature=0,
        num_retries=0,
        **extra,
    )


def with_tools(server: Server, **extra: Any) -> Any:
    message = user(SAVE_COUNT.question, SAVE_COUNT.picture)
    return ask(server, message, tools=[tool.chat for tool in TOOLS], **extra)


@pytest.mark.parametrize("name", ["shapes", "sign", "colours"])
def test_image(server: Server, name: str) -> None:
    """a question about an image gets the right answer"""
    answer = ask(server, user_asks(CASES[name]))
    assert answer.choices[0].message.content in CASES[name].answers
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream(server: Server) -> None:
    """the joined stream is the complete answer, with its usage"""
    whole = ask(server, user_asks(COUNT_SHAPES))
    chunks = list(ask(server, user_asks(COUNT_SHAPES), stream=True, stream_options={"include_usage": True}))
    joined = litellm.stream_chunk_builder(chunks)
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.choices[0].finish_reason == "stop"
    assert joined.usage.completion_tokens == whole.usage.completion_tokens


def test_message_sent_back(server: Server) -> None:
    """the message of an answer is sent back unchanged, and the next question is answered"""
    first = user("How many circles are there?", "shapes.png")
    message = ask(server, first).choices[0].message
    second = ask(server, first, message, {"role": "user", "content": "How many crosses are there?"})
    assert second.choices[0].message.content == "There are 2 crosses."


def test_response_format(server: Server) -> None:
    """`response_format` with a pydantic model gives JSON of this model"""
    answer = ask(server, user_asks(COUNT), response_format=Count)
    assert Count.model_validate_json(answer.choices[0].message.content) == TRIANGLES


def test_json_object(server: Server) -> None:
    """`response_format` json_object gives a JSON object"""
    answer = ask(server, user_asks(COUNT), response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"count": 3}


def test_tools_auto(server: Server) -> None:
    """tools are offered, and the answer is a text or valid calls"""
    choice = with_tools(server).choices[0]
    calls = choice.message.tool_calls or []
    assert bool(calls) != bool(choice.message.content)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    for call in calls:
        BY_NAME[call.function.name].check(call.function.name, call.function.arguments)


def test_tools_stream(server: Server) -> None:
    """the joined stream of a required call is the complete call"""
    request: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    [whole] = with_tools(server, **request).choices[0].message.tool_calls
    joined = litellm.stream_chunk_builder(list(with_tools(server, **request, stream=True)))
    [call] = joined.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (whole.function.name, whole.function.arguments)
    BY_NAME[call.function.name].check(call.function.name, call.function.arguments)


def test_tool_result(server: Server) -> None:
    """the call is sent back with the result of the tool, and the answer is a text"""
    first = with_tools(server, tool_choice={"type": "function", "function": {"name": "save_count"}})
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"ok": true}'}
    second = ask(
        server,
        user(SAVE_COUNT.question, SAVE_COUNT.picture),
        message,
        result,
        tools=[SAVE_COUNT.chat],
        tool_choice="none",
    )
    assert second.choices[0].message.content


def test_responses(server: Server) -> None:
    """`litellm.responses` gets the right answer about an image"""
    picture = user_asks(READ_SIGN)["content"][0]["image_url"]["url"]
    content = [
        {"type": "input_image", "image_url": picture},
        {"type": "input_text", "text": READ_SIGN.question},
    ]
    answer = litellm.responses(
        model=f"openai/{MODEL}",
        api_base=server.v1,
        api_key="none",
        input=[{"role": "user", "content": content}],
        temperature=0,
    )
    assert answer.output[0].content[0].text in READ_SIGN.answers


def test_errors(server: Server) -> None:
    """a wrong field raises BadRequestError, and an unknown model NotFoundError"""
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        ask(server, user_asks(READ_SIGN), top_p=-1)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/gpt-9", api_base=server.v1, api_key="none", messages=[user("?")])
