"""Tool calls at /v1/chat/completions: the bundled model, which has learnt three tools, and scripts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from fovea.core.types import Delta, StageTimings, Usage
from fovea.evaluation.scenes.structured import LOOK_UP, POINT_AT, SAVE_COUNT, TOOLS
from fovea.server.app import create_app
from tests.server.scripted import Script
from tests.server.support import Json, Server, chat, data_url, image, user
from tests.support.thorough import examples

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = data_url((EXAMPLES / "shapes.png").read_bytes())
SIGN = data_url((EXAMPLES / "sign.png").read_bytes())
SAVE = user(image(SHAPES), "Save the number of circles.")
COUNT_SCHEMA: Json = {
    "type": "object",
    "properties": {"count": {"type": "integer"}},
    "required": ["count"],
    "additionalProperties": False,
}
COUNT: Json = {"type": "json_schema", "json_schema": {"name": "count", "schema": COUNT_SCHEMA}}


@pytest.fixture(scope="module")
def server(bundled_server: Server) -> Server:
    return bundled_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *messages: Any, **extra: Any) -> Any:
    fields: Json = {"model": "fovea-tiny", "tools": list(TOOLS), "temperature": 0, "max_tokens": 100}
    return client.chat.completions.create(messages=list(messages), **{**fields, **extra})


def calls(answer: Any) -> list[tuple[str, Any]]:
    """The calls of an answer, each with its arguments, after a check that the answer is nothing else."""
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    made = choice.message.tool_calls
    assert all(call.type == "function" and call.id for call in made)
    assert len({call.id for call in made}) == len(made)
    return [(call.function.name, json.loads(call.function.arguments)) for call in made]


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("choice", [openai.omit, "auto", "required"], ids=["default", "auto", "required"])
@pytest.mark.parametrize("tools", [TOOLS, (SAVE_COUNT, LOOK_UP)], ids=["three", "two"])
def test_model_calls_the_right_tool(client: openai.OpenAI, choice: Any, tools: Any) -> None:
    fields: Json = {"tools": list(tools), "tool_choice": choice}
    assert calls(ask(client, SAVE, **fields)) == [("save_count", {"shape": "circle", "count": 1})]
    read = ask(client, user(image(SIGN), "Look up the code."), **fields)
    assert calls(read) == [("look_up", {"code": "B6F63"})]


def test_a_named_tool_is_called_whatever_the_question(client: openai.OpenAI) -> None:
    for tool in TOOLS:
        name = tool["function"]["name"]
        [(called, arguments)] = calls(ask(client, SAVE, tool_choice=named(name)))
        assert called == name
        jsonschema.validate(arguments, tool["function"]["parameters"])


def test_a_question_that_needs_no_tool_gets_a_text(client: openai.OpenAI) -> None:
    answer = ask(client, user(image(SHAPES), "How many objects can you see?"))
    assert answer.choices[0].message.content == "There are 3 objects."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_none_gives_no_call_and_hides_the_tools(client: openai.OpenAI) -> None:
    without = ask(client, SAVE, tools=openai.omit)
    hidden = ask(client, SAVE, tool_choice="none")
    assert hidden.choices[0].message.tool_calls is None
    assert hidden.choices[0].message.content == without.choices[0].message.content
    assert hidden.usage.prompt_tokens == without.usage.prompt_tokens
    assert ask(client, SAVE).usage.prompt_tokens > hidden.usage.prompt_tokens


def test_text_of_an_answer_that_only_calls_is_null(client: openai.OpenAI) -> None:
    assert ask(client, SAVE).choices[0].message.content is None


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    question = user(image(SHAPES), "Save the number of circles and point at the circle.")
    for seed in range(5):
        fields: Json = {"tool_choice": "required", "temperature": 1.2, "seed": seed}
        assert len(calls(ask(client, question, parallel_tool_calls=False, **fields))) == 1


@pytest.mark.parametrize("choice", ["auto", "required", named("point_at")], ids=str)
def test_stream_equals_the_complete_call(client: openai.OpenAI, choice: Any) -> None:
    whole = ask(client, SAVE, tool_choice=choice).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in ask(client, SAVE, tool_choice=choice, stream=True)]
    parts = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    firsts = [part for part in parts if part.id is not None]
    assert [part.index for part in firsts] == list(range(len(whole)))
    assert [part.function.name for part in firsts] == [call.function.name for call in whole]
    assert all(part.type == "function" for part in firsts)
    assert not any(part.function.name for part in parts if part.id is None)
    for index, call in enumerate(whole):
        text = "".join(part.function.arguments or "" for part in parts if part.index == index)
        assert text == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert chunks[-1].finish_reason == "tool_calls"


def test_helper_of_the_public_client_gathers_a_streamed_call(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    with client.chat.completions.stream(
        model="fovea-tiny", messages=[SAVE], tools=tools, temperature=0
    ) as stream:
        answer: Any = stream.get_final_completion()
    assert calls(answer) == [("save_count", {"shape": "circle", "count": 1})]


def test_choices_have_calls_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, SAVE, n=2, tool_choice="required")
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 2
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in ask(client, SAVE, n=2, tool_choice="required", stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            streamed[chunk.choices[0].index] += part.function.arguments or ""
    expected = [choice.message.tool_calls[0].function.arguments for choice in answer.choices]
    assert [streamed[0], streamed[1]] == expected


@pytest.mark.parametrize(
    ("question", "result", "answer"),
    [
        (SAVE, {"ok": True}, "Done."),
        (user(image(SIGN), "Look up the code."), {"price": 42}, "The price is 42."),
    ],
    ids=["save_count", "look_up"],
)
def test_result_is_answered(client: openai.OpenAI, question: Json, result: Json, answer: str) -> None:
    """The received message goes back unchanged, as clients do with `messages.append(answer.message)`."""
    message = ask(client, question).choices[0].message
    reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps(result)}
    second = ask(client, question, message, reply)
    assert second.choices[0].message.content == answer
    assert second.choices[0].finish_reason == "stop"
    plain = ask(client, question, message.model_dump(), {**reply, "name": "any"})
    assert plain.choices[0].message.content == answer


def test_results_may_come_in_another_order_than_the_calls(client: openai.OpenAI) -> None:
    """Chat templates do not write ids of calls, so results are put into the order of the calls."""
    made = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", **named("save_count")},
            {"id": "b", **named("look_up")},
        ],
    }
    made["tool_calls"][0]["function"]["arguments"] = '{"shape": "circle", "count": 1}'
    made["tool_calls"][1]["function"]["arguments"] = '{"code": "B6F63"}'
    saved = {"role": "tool", "tool_call_id": "a", "content": '{"ok": true}'}
    found = {"role": "tool", "tool_call_id": "b", "content": '{"price": 42}'}
    in_order, swapped = ask(client, SAVE, made, saved, found), ask(client, SAVE, made, found, saved)
    assert swapped.choices[0].message.content == in_order.choices[0].message.content
    assert swapped.usage.prompt_tokens == in_order.usage.prompt_tokens
    assert swapped.usage.prompt_tokens_details.cached_tokens > in_order.usage.prompt_tokens - 32


def test_required_calls_follow_the_schema_at_any_temperature(client: openai.OpenAI) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for seed in range(examples(20)):
        answer = ask(client, SAVE, tool_choice="required", temperature=1.2, seed=seed, max_tokens=400)
        for name, arguments in calls(answer):
            jsonschema.validate(arguments, schemas[name])


def test_auto_beside_a_schema_gives_a_call_or_json(client: openai.OpenAI) -> None:
    question = 'How many circles are there? Reply as JSON {"count": integer}'
    called = ask(client, SAVE, response_format=COUNT)
    assert calls(called) == [("save_count", {"shape": "circle", "count": 1})]
    written = ask(client, user(image(SHAPES), question), response_format=COUNT)
    assert json.loads(written.choices[0].message.content) == {"count": 1}
    assert written.choices[0].finish_reason == "stop"
    for seed in range(examples(10)):
        answer = ask(client, SAVE, response_format=COUNT, temperature=1.2, seed=seed, max_tokens=400)
        if answer.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(answer.choices[0].message.content), COUNT_SCHEMA)


def test_strict_tools_are_called_by_their_schema(client: openai.OpenAI) -> None:
    """With strict, text is free and calls are not."""
    tools = [
        {"type": "function", "function": {**tool["function"], "strict": True}}
        for tool in (SAVE_COUNT, LOOK_UP, POINT_AT)
    ]
    assert calls(ask(client, SAVE, tools=tools)) == [("save_count", {"shape": "circle", "count": 1})]
    text = ask(client, user(image(SHAPES), "How many objects can you see?"), tools=tools)
    assert text.choices[0].message.content == "There are 3 objects."


def wrong_tool(**function: Any) -> list[Any]:
    tools: list[Any] = copy.deepcopy(list(TOOLS))
    tools[0]["function"] |= function
    return tools


UNSUPPORTED: Json = {"type": "object", "properties": {"count": {"not": {}}}}


@pytest.mark.parametrize(
    ("extra", "param", "says"),
    [
        ({"tools": wrong_tool(strict=True, parameters=UNSUPPORTED)},
         "tools[0].function.parameters", "tools[0].function.parameters at /properties/count"),
        ({"tools": wrong_tool(parameters=UNSUPPORTED), "tool_choice": "required"},
         "tools[0].function.parameters", "tools[0].function.parameters at /properties/count"),
        ({"tools": wrong_tool(parameters={"type": "array"})}, "tools[0].function.parameters", "'object'"),
        ({"tools": wrong_tool(name="look_up")}, "tools[0].function.name", "have the name 'look_up'"),
        ({"tools": wrong_tool(name="a b")}, "tools[0].function.name", "name"),
        ({"tool_choice": "required", "response_format": COUNT}, "tool_choice", "exclude each other"),
        ({"tool_choice": named("paint")}, "tool_choice.function.name", "there are 'save_count'"),
        ({"tool_choice": "required", "tools": openai.omit}, "tool_choice", "needs tools"),
    ],
    ids=["strict", "required", "array", "twice", "bad-name", "format", "unknown", "no-tools"],
)  # fmt: skip
def test_wrong_tools_are_refused_by_name(client: openai.OpenAI, extra: Json, param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, SAVE, **extra)
    assert says in caught.value.message
    assert caught.value.param == param


def test_a_schema_that_is_not_enforced_may_be_anything(client: openai.OpenAI) -> None:
    """With auto and without strict, a schema is read by the model alone."""
    tools = wrong_tool(parameters=UNSUPPORTED)
    assert ask(client, SAVE, tools=tools).choices[0].finish_reason == "tool_calls"


THOUGHT = "<think>\nhm\n</think>\n\nHello"
CALLED = '<tool_call>\n{"name": "look_up", "arguments": {"code": "A1"}}\n</tool_call>'


def script(*texts: str, tool_format: str = "hermes", thinking: bool = False) -> Script:
    """An engine whose answer comes in the given pieces, by a model that reasons."""
    deltas = [Delta(0, text, (number,), thinking=thinking) for number, text in enumerate(texts)]
    usage, timings = Usage(5, len(texts)), StageTimings()
    last = Delta(0, "", (), finish_reason="stop", usage=usage, timings=timings, thinking=thinking)
    engine = Script(*deltas, last)
    engine.info = replace(engine.info, tool_format=tool_format, reasons=True)
    return engine


async def post(engine: Script, **extra: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/chat/completions", json=chat(user("hi"), **extra))


def streamed(answer: httpx.Response) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0]["delta"] for line in lines]


@pytest.mark.parametrize("pieces", [(THOUGHT,), tuple(THOUGHT)], ids=["at once", "by letters"])
async def test_reasoning_is_apart_from_the_content(pieces: tuple[str, ...]) -> None:
    message = (await post(script(*pieces))).json()["choices"][0]["message"]
    assert message["content"] == "Hello"
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    deltas = streamed(await post(script(*pieces), stream=True))
    for name, text in (("content", "Hello"), ("reasoning", "hm"), ("reasoning_content", "hm")):
        assert "".join(delta.get(name) or "" for delta in deltas) == text


async def test_reasoning_can_be_left_out() -> None:
    answer = await post(script(THOUGHT), include_reasoning=False)
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == "Hello"
    assert not {"reasoning", "reasoning_content"} & message.keys()
    deltas = streamed(await post(script(*THOUGHT), include_reasoning=False, stream=True))
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello"
    assert not any({"reasoning", "reasoning_content"} & delta.keys() for delta in deltas)


async def test_an_answer_may_begin_inside_the_reasoning() -> None:
    """Some templates write the opening mark themselves; the engine then reports it with every delta."""
    pieces = ("hm", "\n</think>", "\n\nHello")
    message = (await post(script(*pieces, thinking=True))).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hello")
    deltas = streamed(await post(script(*pieces, thinking=True), stream=True))
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello"
    unfinished = (await post(script("hm", thinking=True))).json()["choices"][0]["message"]
    assert (unfinished["reasoning"], unfinished["content"]) == ("hm", "")


async def test_reasoning_text_and_two_calls_in_one_answer() -> None:
    text = f"<think>\nhm\n</think>\n\nI look it up.\n{CALLED}\n{CALLED.replace('A1', 'B2')}"
    tools = {"tools": list(TOOLS)}
    choice = (await post(script(text), **tools)).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "I look it up.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look_up", "look_up"]
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"code": "A1"}, {"code": "B2"}]
    assert choice["finish_reason"] == "tool_calls"
    parts = [
        call
        for delta in streamed(await post(script(*text), stream=True, **tools))
        for call in delta.get("tool_calls", ())
    ]
    joined = [
        json.loads("".join(part["function"].get("arguments", "") for part in parts if part["index"] == index))
        for index in (0, 1)
    ]
    assert joined == arguments


@pytest.mark.parametrize(
    "tools", [{}, {"tools": list(TOOLS), "tool_choice": "none"}], ids=["without", "none"]
)
async def test_a_call_that_nobody_offered_stays_text(tools: Json) -> None:
    message = (await post(script(CALLED), **tools)).json()["choices"][0]["message"]
    assert message["content"] == CALLED
    assert "tool_calls" not in message


async def test_a_model_without_tool_calls_refuses_tools() -> None:
    answer = await post(script("Hello", tool_format=""), tools=list(TOOLS))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert answer.json()["error"]["code"] == "unsupported_field"
    assert (await post(script("Hello", tool_format=""), tools=list(TOOLS), tool_choice="none")).is_success
