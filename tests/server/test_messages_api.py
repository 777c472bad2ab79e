"""Anthropic's Messages API at /v1/messages, with the bundled model: answers, events, tools and counts."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from fovea import Engine
from fovea.api import sse
from fovea.evaluation.scenes.structured import TOOLS
from fovea.media.limits import MediaLimits
from fovea.server.app import create_app
from fovea.server.settings import ServerSettings
from tests.server.conftest import REMOTE, Web
from tests.server.scripted import ANSWER, talker
from tests.server.support import Json, Server, data_url, image, picture, running, user

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = (EXAMPLES / "shapes.png").read_bytes()
SIGN = (EXAMPLES / "sign.png").read_bytes()
DEFINITIONS: list[Json] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
HOW_MANY = "How many objects can you see?"
COUNT: Json = {
    "type": "object",
    "properties": {"count": {"type": "integer"}},
    "required": ["count"],
    "additionalProperties": False,
}


def base64_block(data: bytes) -> Json:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def text_block(words: str, **extra: Any) -> Json:
    return {"type": "text", "text": words, **extra}


def asked(words: str, data: bytes = SHAPES) -> Json:
    """A message of the user with an image."""
    return {"role": "user", "content": [base64_block(data), text_block(words)]}


SAVE = asked("Save the number of circles.")


@pytest.fixture(scope="module")
def engine(bundled: Engine) -> Engine:
    return bundled


@pytest.fixture(scope="module")
def server(bundled_server: Server) -> Server:
    return bundled_server


def post(server: Server, *messages: Json, **extra: Any) -> Json:
    answer = server.post(PATH, {"messages": messages, "max_tokens": 100, "temperature": 0, **extra})
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    return body


def text_of(body: Json) -> str:
    [block] = body["content"]
    assert block["type"] == "text"
    return str(block["text"])


def error(server: Server, **extra: Any) -> Json:
    hello = [{"role": "user", "content": "hi"}]
    answer = server.post(PATH, {"messages": hello, "max_tokens": 4, **extra})
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def test_image_as_base64(server: Server) -> None:
    body = post(server, asked(HOW_MANY))
    assert text_of(body) == "There are 3 objects."
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fovea-tiny")
    assert body["id"].startswith("msg_")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] > 0


def test_large_image_gets_the_answer_of_a_chat(server: Server) -> None:
    """Bodies over 64 KiB are parsed in another thread, and their long strings are cut out before."""
    noise = picture(300, 300, seed=3)
    assert len(noise) > 128 * 1024
    body = post(server, asked("What is it?", noise))
    turn = {"messages": [user(image(data_url(noise)), "What is it?")], "temperature": 0, "max_tokens": 100}
    whole = server.post("/v1/chat/completions", turn).json()
    assert text_of(body) == whole["choices"][0]["message"]["content"]
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == whole["usage"]["prompt_tokens"]


def test_image_by_url(engine: Engine, web: Web, tmp_path: Path) -> None:
    settings = ServerSettings(media=replace(MediaLimits(), allow_private_hosts=True))
    with running(engine, settings, tmp_path) as server:
        block = {"type": "image", "source": {"type": "url", "url": f"{web.url}/one.png"}}
        by_url = post(server, {"role": "user", "content": [block, text_block("What is it?")]})
        assert text_of(by_url) == text_of(post(server, asked("What is it?", REMOTE)))
    assert web.count == 1


@pytest.mark.parametrize(
    "system", ["Be brief.", [text_block("Be brief.", cache_control={"type": "ephemeral"})]]
)
def test_system(server: Server, system: Any) -> None:
    body = post(server, asked(HOW_MANY), system=system)
    turns = [{"role": "system", "content": "Be brief."}, user(image(data_url(SHAPES)), HOW_MANY)]
    whole = server.post(
        "/v1/chat/completions", {"messages": turns, "temperature": 0, "max_tokens": 100}
    ).json()
    assert text_of(body) == whole["choices"][0]["message"]["content"]
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == whole["usage"]["prompt_tokens"]


def test_conversation_goes_on_with_the_received_blocks(server: Server) -> None:
    question = asked("What text is in the image?", SIGN)
    first = post(server, question)
    answer = {"role": "assistant", "content": first["content"]}
    second = post(
        server, question, answer, {"role": "user", "content": "What text is in the image? Only the text."}
    )
    assert text_of(second) == "B6F63"


def test_stop_sequence_ends_the_answer_before_it(server: Server) -> None:
    body = post(server, asked(HOW_MANY), stop_sequences=["never said", " 3"])
    assert text_of(body) == "There are"
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", " 3")


def test_too_short_a_limit_is_the_stop_reason(server: Server) -> None:
    body = post(server, asked(HOW_MANY), max_tokens=2)
    assert body["stop_reason"] == "max_tokens"
    assert body["usage"]["output_tokens"] == 2


def events_of(server: Server, *messages: Json, **extra: Any) -> list[Json]:
    """The events of a stream, after a check of their names."""
    body = {"messages": messages, "max_tokens": 100, "temperature": 0, **extra, "stream": True}
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_events_of_a_stream(server: Server) -> None:
    whole = post(server, asked(HOW_MANY))
    events = events_of(server, asked(HOW_MANY))
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert len(deltas) > 1
    assert {event["index"] for event in events[1:-2]} == {0}
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert {event["delta"]["type"] for event in deltas} == {"text_delta"}
    assert "".join(event["delta"]["text"] for event in deltas) == text_of(whole)
    message, ending = events[0]["message"], events[-2]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == sum(
        whole["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )
    assert ending["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert ending["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_stream_tells_its_stop_sequence(server: Server) -> None:
    events = events_of(server, asked(HOW_MANY), stop_sequences=[" 3"])
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " 3"}


def test_events_of_a_streamed_call(server: Server) -> None:
    events = events_of(server, SAVE, tools=DEFINITIONS)
    assert (
        events[1]["content_block"].items() >= {"type": "tool_use", "name": "save_count", "input": {}}.items()
    )
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    joined = "".join(delta["partial_json"] for delta in deltas)
    assert json.loads(joined) == {"shape": "circle", "count": 1}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert [event["type"] for event in events].count("content_block_start") == 1


def test_result_of_a_tool_is_answered(server: Server) -> None:
    question = asked("Look up the code.", SIGN)
    first = post(server, question, tools=DEFINITIONS)
    [call] = first["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look_up", {"code": "B6F63"})
    assert first["stop_reason"] == "tool_use"
    turn = {"role": "assistant", "content": first["content"]}
    for content in ('{"price": 42}', [text_block('{"price": 42}')]):
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": content, "is_error": False}
        second = post(server, question, turn, {"role": "user", "content": [result]}, tools=DEFINITIONS)
        assert text_of(second) == "The price is 42."


def test_results_may_come_in_another_order_than_the_calls(server: Server) -> None:
    calls = [
        {"type": "tool_use", "id": "a", "name": "save_count", "input": {"shape": "circle", "count": 1}},
        {"type": "tool_use", "id": "b", "name": "look_up", "input": {"code": "B6F63"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": '{"ok": true}'},
        {"type": "tool_result", "tool_use_id": "b", "content": '{"price": 42}'},
    ]
    turn = {"role": "assistant", "content": calls}
    bodies = [
        post(server, SAVE, turn, {"role": "user", "content": order}, tools=DEFINITIONS)
        for order in (results, results[::-1])
    ]
    assert bodies[0]["content"] == bodies[1]["content"]
    totals = [body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] for body in bodies]
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    ("choice", "name"),
    [({"type": "auto"}, "save_count"), ({"type": "any"}, "save_count"),
     ({"type": "tool", "name": "point_at"}, "point_at"),
     ({"type": "any", "disable_parallel_tool_use": True}, "save_count")],
    ids=["auto", "any", "tool", "one"],
)  # fmt: skip
def test_tool_choice(server: Server, choice: Json, name: str) -> None:
    schemas = {tool["name"]: tool["input_schema"] for tool in DEFINITIONS}
    [call] = post(server, SAVE, tools=DEFINITIONS, tool_choice=choice)["content"]
    assert call["name"] == name
    jsonschema.validate(call["input"], schemas[name])


def test_tool_choice_none_gives_a_text(server: Server) -> None:
    body = post(server, SAVE, tools=DEFINITIONS, tool_choice={"type": "none"})
    assert text_of(body) == text_of(post(server, SAVE))
    assert body["stop_reason"] == "end_turn"


def test_thinking_can_be_disabled(server: Server) -> None:
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}):
        assert text_of(post(server, asked(HOW_MANY), thinking=thinking)) == "There are 3 objects."


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_answer_by_a_schema(server: Server, name: str) -> None:
    form: Json = {"type": "json_schema", "schema": COUNT}
    wish = {"output_config": {"format": form}} if name == "output_config" else {"output_format": form}
    question = asked('How many circles are there? Reply as JSON {"count": integer}')
    assert json.loads(text_of(post(server, question, **wish))) == {"count": 1}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"system": "Be brief."},
        {"tools": DEFINITIONS},
        {"tools": DEFINITIONS, "tool_choice": {"type": "none"}},
    ],
    ids=["plain", "system", "tools", "none"],
)
def test_counted_tokens_are_those_of_the_answer(server: Server, extra: Json) -> None:
    counted = server.post(COUNT_PATH, {"messages": [SAVE], **extra}).json()
    usage = post(server, SAVE, **extra)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_key_in_the_header_of_anthropics_clients(engine: Engine, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with running(engine, ServerSettings(api_keys=("secret",)), tmp_path) as server:
        for path in (PATH, COUNT_PATH):
            good = server.post(path, body, headers={"x-api-key": "secret", "anthropic-version": "2023-06-01"})
            assert good.status_code == 200
            assert server.post(path, body, headers={"x-api-key": "wrong"}).status_code == 401
            assert server.post(path, body).status_code == 401


def wrong_tool(**fields: Any) -> list[Json]:
    tools = copy.deepcopy(DEFINITIONS)
    tools[1] |= fields
    return tools


UNSUPPORTED: Json = {"type": "object", "properties": {"count": {"not": {}}}}
BROKEN: Json = base64_block(b"no image")
RESULT: Json = {"type": "tool_result", "tool_use_id": "a", "content": "1"}


def turn(*blocks: Json, role: str = "user") -> list[Json]:
    return [{"role": "user", "content": "hi"}, {"role": role, "content": list(blocks)}]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": turn(text_block("a"), BROKEN)}, "messages[1].content[1].source"),
        ({"messages": turn(text_block("a"), BROKEN), "system": "b"}, "messages[1].content[1].source"),
        ({"messages": turn(RESULT, role="assistant")}, "messages[1].content[0]"),
        ({"messages": turn(role="robot")}, "messages[1].role"),
        ({"messages": turn({"type": "document"})}, "messages[1].content[0].type"),
        ({"messages": turn({"type": "tool_result"})}, "messages[1].content[0].tool_use_id"),
        ({"messages": turn({"type": "image", "source": {"type": "file"}})},
         "messages[1].content[0].source.type"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": wrong_tool(input_schema={"type": "array"})}, "tools[1].input_schema"),
        ({"tools": wrong_tool(input_schema=UNSUPPORTED, strict=True)}, "tools[1].input_schema"),
        ({"tools": wrong_tool(name="point_at")}, "tools[1].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": DEFINITIONS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": DEFINITIONS, "tool_choice": {"type": "tool", "name": "paint"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": UNSUPPORTED}}},
         "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": UNSUPPORTED}}, "output_format.schema"),
        ({"visual_tokens": {"keep": 7}}, "visual_tokens.keep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_errors_name_the_clients_field(server: Server, extra: Json, param: str) -> None:
    wrong = error(server, **extra)
    assert wrong["param"] == param
    assert "image_url" not in wrong["message"]
    assert ".function" not in wrong["message"]
    assert "response_format" not in wrong["message"]


def test_limit_is_required(server: Server) -> None:
    answer = server.post(PATH, {"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_errors_have_anthropics_form(server: Server) -> None:
    """Anthropic's clients read `type` beside `error`, and `error.type` to tell errors apart."""
    for path in (PATH, COUNT_PATH):
        body = server.post(path, {"messages": [], "max_tokens": 4}).json()
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"]


def test_a_required_call_and_a_format_exclude_each_other(server: Server) -> None:
    form = {"format": {"type": "json_schema", "schema": COUNT}}
    wrong = error(server, tools=DEFINITIONS, tool_choice={"type": "any"}, output_config=form)
    assert wrong["param"] == "tool_choice"
    assert "response_format" not in wrong["message"]  # the client sent output_config.format


async def scripted(text: str, *, thinking: bool = False, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(talker(text, thinking=thinking)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(PATH, json=body)


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    whole = post(server, asked("How many objects can you see?"))["content"][0]["text"]
    begun = {"role": "assistant", "content": whole[: len(whole) // 2].rstrip()}
    rest = post(server, asked("How many objects can you see?"), begun)["content"][0]["text"]
    assert begun["content"] + rest == whole


HELLO: Json = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "tools": DEFINITIONS}


async def test_thinking_text_and_call_are_blocks_of_their_own() -> None:
    whole = (await scripted(ANSWER, **HELLO)).json()
    thinking, text, call = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert (text["type"], text["text"]) == ("text", "I look it up.")
    assert (call["type"], call["input"]) == ("tool_use", {"code": "A1"})
    assert whole["stop_reason"] == "tool_use"
    answer = await scripted(ANSWER, **HELLO, stream=True)
    events = [json.loads(payload) for payload in sse.Decoder().feed(answer.content)]
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    joined = {"thinking": "", "text": "", "partial_json": ""}
    for delta in (event["delta"] for event in events if event["type"] == "content_block_delta"):
        name = delta["type"].removesuffix("_delta").replace("input_json", "partial_json")
        joined[name] += delta[name]
    assert (joined["thinking"], joined["text"]) == ("hm", "I look it up.")
    assert json.loads(joined["partial_json"]) == {"code": "A1"}
    turns = [*HELLO["messages"], {"role": "assistant", "content": whole["content"]}]
    sent_back = await scripted("Hello", **{**HELLO, "messages": turns})
    assert sent_back.json()["content"][0]["text"] == "Hello"


async def test_an_answer_may_begin_inside_the_thinking() -> None:
    thinking, text = (await scripted("hm\n</think>\n\nHello", thinking=True, **HELLO)).json()["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "Hello")
