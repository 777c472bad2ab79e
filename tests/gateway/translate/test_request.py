"""Requests of the other APIs as chat requests: what is passed on untouched, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fovea.api.schema import ChatRequest
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload
from fovea.gateway.inspect.body import Prefixed
from fovea.gateway.translate.translation import Api, to_chat
from tests.gateway.translate.support import HELLO, Json, translation

LONG = "0123456789abcdef0123456789abcdef:0"
"""A placeholder of a long string."""
TOOL: Json = {"type": "object", "properties": {"path": {"type": "string"}}}


def base64(data: Any, kind: str = "image/png") -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def message_body(**fields: Any) -> Json:
    return translation("messages", **fields).body


def response_body(**fields: Any) -> Json:
    return translation("responses", **fields).body


def url_of(block: Json) -> Any:
    [part] = message_body(messages=[{"role": "user", "content": [block]}])["messages"][0]["content"]
    return part["image_url"]["url"]


def test_a_whole_conversation_of_messages() -> None:
    chat = to_chat(
        "messages",
        {
            "model": "m",
            "max_tokens": 7,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [base64(LONG), {"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "tool_use", "id": "t", "name": "look", "input": {"path": "ä"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
            ],
            "tools": [{"name": "look", "input_schema": TOOL}],
            "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "top_k": 4,
            "stream": True,
        },
    )
    assert chat.body == {
        "model": "m",
        "max_tokens": 7,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": Prefixed("data:image/png;base64,", LONG)}},
                    {"type": "text", "text": "hi"},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "reasoning": "hm",
                "tool_calls": [
                    {
                        "id": "t",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"path": "ä"}'},
                    }
                ],
            },
            {"role": "tool", "content": "ok", "tool_call_id": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": TOOL}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert chat.stream


def test_a_whole_list_of_items() -> None:
    image = {"type": "input_image", "image_url": LONG, "detail": "low"}
    chat = translation(
        "responses",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [image, {"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": "ok"},
        ],
        tools=[{"type": "function", "name": "look", "parameters": TOOL}],
        text={"format": {"type": "json_schema", "name": "n", "schema": TOOL}},
        reasoning={"effort": "low"},
        max_output_tokens=9,
    )
    url = {"url": LONG, "detail": "low"}
    assert chat.body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": "hi"}],
            },
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "ok", "tool_call_id": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": TOOL}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": TOOL}},
        "reasoning_effort": "low",
        "max_tokens": 9,
        "stream": False,
    }
    assert not chat.stream


@pytest.mark.parametrize(
    ("data", "kind", "prefix"),
    [
        (LONG, "image/webp", b"data:image/webp;base64,"),
        ("aGk=", "image/jpeg", b"data:image/jpeg;base64,"),
        ("aGk=", 'image/"x', b"data:image/any;base64,"),
        ("aGk=", "image/jpg", b"data:image/jpeg;base64,"),
        ("aGk=", "image/heic", b"data:image/any;base64,"),
        ("aGk=", "", b"data:image/any;base64,"),
    ],
    ids=["placeholder", "short", "unknown type", "jpg", "heic", "empty"],
)
def test_base64_is_not_copied(data: Any, kind: str, prefix: bytes) -> None:
    url = url_of(base64(data, kind))
    assert isinstance(url, Prefixed)
    assert url.value is data
    assert url.prefix == prefix.decode()


@pytest.mark.parametrize("url", [LONG, "https://example.com/a.png", Payload(b"data:image/png;base64,aGk=")])
def test_urls_pass_through_untouched(url: Any) -> None:
    assert url_of({"type": "image", "source": {"type": "url", "url": url}}) is url
    part = {"type": "input_image", "image_url": url}
    body = response_body(input=[{"role": "user", "content": [part]}])
    assert body["messages"][0]["content"][0]["image_url"]["url"] is url


def test_images_in_results_of_tools_and_of_calls() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [base64(LONG)]}
    [message] = message_body(messages=[{"role": "user", "content": [result]}])["messages"]
    assert message["role"] == "tool"
    assert message["content"][0]["image_url"]["url"] == Prefixed("data:image/png;base64,", LONG)


def test_placeholders_in_arguments_become_texts() -> None:
    """Arguments are JSON within JSON, where a placeholder could not be replaced any more."""
    words = {LONG: 'a "long" text'}
    block = {"type": "tool_use", "id": "t", "name": "write", "input": {"text": LONG, "more": [LONG, 1]}}
    body = {**HELLO["messages"], "messages": [{"role": "assistant", "content": [block]}]}
    before = copy.deepcopy(body)
    chat = to_chat("messages", body, lambda text: words.get(text, text))
    arguments = chat.body["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == r'{"text": "a \"long\" text", "more": ["a \"long\" text", 1]}'
    assert body == before


def test_placeholders_in_what_the_answer_repeats_become_texts() -> None:
    tools = [{"type": "function", "name": "f", "description": LONG}]
    chat = to_chat(
        "responses",
        {"input": LONG, "instructions": LONG, "tools": tools},
        lambda text: "long" if text == LONG else text,
    )
    assert [message["content"] for message in chat.body["messages"]] == [LONG, LONG]
    assert chat.body["tools"][0]["function"]["description"] == LONG
    answer = chat.answer(200, {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]})
    assert (answer["instructions"], answer["tools"][0]["description"]) == ("long", "long")
    assert answer["store"] is False


def test_last_message_of_the_assistant_is_continued() -> None:
    chat = translation(
        "messages",
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    )
    assert chat.body["continue_final_message"] is True
    assert chat.body["add_generation_prompt"] is False


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_chat_body_is_a_chat_request(api: Api) -> None:
    chat = translation(api, stream=True, temperature=0.5, top_p=0.5, timeout=4, priority=1)
    ChatRequest.model_validate(chat.body, extra="forbid")


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_name_of_the_limit(api: Api) -> None:
    """All engines know max_tokens; some ignore the newer name."""
    chat = to_chat(api, {**HELLO[api], "max_output_tokens" if api == "responses" else "max_tokens": 5}).body
    assert chat["max_tokens"] == 5
    assert "max_completion_tokens" not in chat


def test_unknown_fields_are_named() -> None:
    chat = translation("responses", input=[{"role": "user", "content": "a", "zzz": 1}], qqq=2)
    assert sorted(chat.ignored) == ["input[0].zzz", "qqq"]
    assert "qqq" not in chat.body


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
FILE = {"type": "input_file", "file_id": "f"}
REFUSED: list[tuple[Api, Json, str]] = [
    ("messages", {"messages": [{"role": "user", "content": [DOCUMENT]}]}, "messages[0].content[0].type"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ("messages", {"max_tokens": 0}, "max_tokens"),
    ("messages", {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ("messages", {"temperatur": 1}, "temperatur"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"conversation": "conv_1"}, "conversation"),
    ("responses", {"prompt": {"id": "p"}}, "prompt"),
    ("responses", {"background": True}, "background"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("responses", {"tools": [{"type": "mcp", "server_url": "x"}]}, "tools[0].type"),
    ("responses", {"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0].type"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ("responses", {"input": []}, "input"),
]


@pytest.mark.parametrize(("api", "fields", "param"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused_features_are_named(api: Api, fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translation(api, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [[], "a", None, {}, {"messages": 1}])
@pytest.mark.parametrize("api", ["messages", "responses"])
def test_bodies_that_are_no_requests(api: Api, body: Any) -> None:
    with pytest.raises(InvalidRequest):
        to_chat(api, body)
