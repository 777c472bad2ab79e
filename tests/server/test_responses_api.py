"""OpenAI's Responses API at /v1/responses, with the bundled model: answers, events, tools, conversations."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from fovea import Engine
from fovea.api import sse
from fovea.evaluation.scenes.structured import TOOLS
from fovea.server.app import create_app
from fovea.server.settings import ServerSettings
from tests.server.scripted import ANSWER, talker
from tests.server.support import Json, Server, chat, data_url, image, picture, running, user

PATH = "/v1/responses"
EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = data_url((EXAMPLES / "shapes.png").read_bytes())
SIGN = data_url((EXAMPLES / "sign.png").read_bytes())
FUNCTIONS: list[Json] = [{"type": "function", **tool["function"]} for tool in TOOLS]
COUNT: Json = {
    "type": "object",
    "properties": {"count": {"type": "integer"}},
    "required": ["count"],
    "additionalProperties": False,
}
FORMAT: Json = {"format": {"type": "json_schema", "name": "count", "schema": COUNT, "strict": True}}
HOW_MANY = "How many objects can you see?"


def asked(words: str, url: str = SHAPES) -> Json:
    """A message of the user with an image."""
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": words}]
    return {"role": "user", "content": parts}


SAVE = asked("Save the number of circles.")


@pytest.fixture(scope="module")
def engine(bundled: Engine) -> Engine:
    return bundled


@pytest.fixture(scope="module")
def server(bundled_server: Server) -> Server:
    return bundled_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, given: Any, **extra: Any) -> Any:
    fields: Json = {"model": "fovea-tiny", "temperature": 0, "max_output_tokens": 100}
    return client.responses.create(input=given, **{**fields, **extra})


def post(server: Server, given: Any, **extra: Any) -> Json:
    answer = server.post(PATH, {"input": given, "temperature": 0, "max_output_tokens": 100, **extra})
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    return body


def error(server: Server, status: int = 400, **body: Any) -> Json:
    answer = server.post(PATH, {"input": "hi", "max_output_tokens": 4, **body})
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def text_of(body: Json) -> str:
    [message] = [item for item in body["output"] if item["type"] == "message"]
    return str(message["content"][0]["text"])


def called(answer: Any) -> list[tuple[str, Any]]:
    assert answer.status == "completed"
    assert {item.type for item in answer.output} == {"function_call"}
    return [(item.name, json.loads(item.arguments)) for item in answer.output]


def test_text_and_image(client: openai.OpenAI) -> None:
    answer = ask(client, [asked(HOW_MANY)])
    assert answer.output_text == "There are 3 objects."
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "fovea-tiny")
    assert answer.id.startswith("resp_")
    assert answer.error is None
    assert answer.incomplete_details is None
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert answer.usage.input_tokens_details.model_extra["image_tokens"] == 80
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_text_alone_equals_a_chat(server: Server) -> None:
    body = post(server, "What text is in the image?", instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, user("What text is in the image?")]
    turn = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 100})
    assert text_of(body) == turn.json()["choices"][0]["message"]["content"]
    assert body["usage"]["input_tokens"] == turn.json()["usage"]["prompt_tokens"]
    assert body["instructions"] == "Be brief."


def events_of(server: Server, **body: Any) -> list[Json]:
    """The events of a stream, after a check of their names and numbers."""
    answer = server.post(PATH, {"temperature": 0, "max_output_tokens": 100, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    events = []
    for name, data in blocks:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_events_of_a_stream(server: Server) -> None:
    whole = post(server, [asked(HOW_MANY)])
    events = events_of(server, input=[asked(HOW_MANY)])
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(deltas) == text_of(whole) == text_of(events[-1]["response"])
    assert len(deltas) > 1
    about = events[2:-1]
    assert {event["output_index"] for event in about} == {0}
    name = events[2]["item"]["id"]
    assert {event.get("item_id", name) for event in about} == {name}
    assert events[2]["item"]["content"] == []
    assert events[2]["item"]["status"] == "in_progress"
    assert events[3]["part"]["text"] == ""
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert events[-1]["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {events[0]["response"]["id"]}
    assert events[0]["response"]["status"] == "in_progress"


def test_helper_of_the_public_client_gathers_a_stream(client: openai.OpenAI) -> None:
    fields: Json = {"model": "fovea-tiny", "temperature": 0}
    with client.responses.stream(input=[asked(HOW_MANY)], **fields) as stream:
        assert stream.get_final_response().output_text == "There are 3 objects."
    with client.responses.stream(input=[SAVE], tools=FUNCTIONS, **fields) as stream:
        [call] = stream.get_final_response().output
        assert json.loads(call.arguments) == {"shape": "circle", "count": 1}  # type: ignore[union-attr]


def test_events_of_a_streamed_call(server: Server) -> None:
    events = events_of(server, input=[SAVE], tools=FUNCTIONS)
    kinds = [event["type"].removeprefix("response.") for event in events]
    pieces = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert kinds == [
        "created", "in_progress", "output_item.added",
        *["function_call_arguments.delta"] * len(pieces),
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    done, item, last = events[-3:]
    assert done["arguments"] == "".join(pieces) == item["item"]["arguments"]
    assert events[2]["item"]["call_id"] == item["item"]["call_id"]
    assert events[2]["item"]["arguments"] == ""
    assert last["response"]["output"] == [item["item"]]


@pytest.mark.parametrize(
    "choice",
    [openai.omit, "auto", "required", {"type": "function", "name": "save_count"}],
    ids=["omitted", "auto", "required", "named"],
)
def test_tools_are_called(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, [SAVE], tools=FUNCTIONS, tool_choice=choice)
    assert called(answer) == [("save_count", {"shape": "circle", "count": 1})]


@pytest.mark.parametrize("kept", [True, False], ids=["previous_response_id", "all items"])
def test_result_of_a_call_is_answered(client: openai.OpenAI, kept: bool) -> None:
    question = asked("Look up the code.", SIGN)
    first = ask(client, [question], tools=FUNCTIONS)
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"price": 42}'}
    if kept:
        second = ask(client, [result], tools=FUNCTIONS, previous_response_id=first.id)
    else:
        second = ask(client, [question, *first.output, result], tools=FUNCTIONS)
    assert second.output_text == "The price is 42."


def test_output_may_be_a_list_of_parts(client: openai.OpenAI) -> None:
    first = ask(client, [asked("Look up the code.", SIGN)], tools=FUNCTIONS)
    parts = [{"type": "input_text", "text": '{"price": 42}'}]
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": parts}
    second = ask(client, [result], tools=FUNCTIONS, previous_response_id=first.id)
    assert second.output_text == "The price is 42."


def test_answer_by_a_schema(client: openai.OpenAI) -> None:
    question = asked('How many circles are there? Reply as JSON {"count": integer}')
    answer = ask(client, [question], text=FORMAT)
    assert json.loads(answer.output_text) == {"count": 1}
    assert answer.text.format.type == "json_schema"
    for seed in range(5):
        fields: Json = {"text": FORMAT, "temperature": 1.2, "extra_body": {"seed": seed}}
        jsonschema.validate(json.loads(ask(client, [question], **fields).output_text), COUNT)


def test_too_short_a_limit_leaves_the_answer_incomplete(client: openai.OpenAI, server: Server) -> None:
    answer = ask(client, [asked(HOW_MANY)], max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 2
    last = events_of(server, input=[asked(HOW_MANY)], max_output_tokens=2)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_logprobs(client: openai.OpenAI, server: Server) -> None:
    wish: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, [asked(HOW_MANY)], **wish)
    entries = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith(answer.output_text)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = events_of(server, input=[asked(HOW_MANY)], **wish)
    streamed = [entry["token"] for event in events for entry in event.get("logprobs", ()) if "delta" in event]
    assert "".join(streamed).startswith(answer.output_text)


def test_conversation_goes_on_with_its_images(server: Server) -> None:
    """The second request has no image of its own, and gets the answer of the whole conversation."""
    question = asked("What text is in the image?", SIGN)
    first = post(server, [question])
    again = "What text is in the image? Only the text."
    second = post(server, again, previous_response_id=first["id"])
    assert text_of(second) == "B6F63"
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens_details"]["image_tokens"] == 117
    sent_back = post(server, [question, *first["output"], {"role": "user", "content": again}])
    assert sent_back["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    third = post(server, again, previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    branch = post(server, again, previous_response_id=first["id"])
    assert branch["usage"]["input_tokens"] == second["usage"]["input_tokens"]


def test_streamed_answer_can_be_continued(server: Server) -> None:
    events = events_of(server, input=[asked("What text is in the image?", SIGN)])
    second = post(server, "Only the text.", previous_response_id=events[-1]["response"]["id"])
    assert second["usage"]["input_tokens_details"]["image_tokens"] == 117


def test_instructions_are_not_kept(server: Server) -> None:
    question = asked(HOW_MANY)
    first = post(server, [question], instructions="Answer in many words, please.")
    second = post(server, "And now?", previous_response_id=first["id"])
    sent_back = post(server, [question, *first["output"], {"role": "user", "content": "And now?"}])
    assert second["instructions"] is None
    assert second["usage"]["input_tokens"] == sent_back["usage"]["input_tokens"]
    assert text_of(second) == text_of(sent_back)


def test_kept_answer_can_be_read_and_deleted(client: openai.OpenAI, server: Server) -> None:
    answer = ask(client, [SAVE, {"role": "user", "content": "Now!"}], tools=FUNCTIONS, metadata={"a": "b"})
    kept = server.get(f"{PATH}/{answer.id}").json()
    assert kept["output"] == [item.model_dump(exclude_unset=True) for item in answer.output]
    assert kept["metadata"] == {"a": "b"}
    assert client.responses.retrieve(answer.id).id == answer.id
    items = client.responses.input_items.list(answer.id).data
    assert [item.content for item in items][1] in ("Now!", [])
    assert [part.type for part in items[0].content] == ["input_image", "input_text"]  # type: ignore[union-attr]
    assert SHAPES not in server.get(f"{PATH}/{answer.id}/input_items").text
    client.responses.delete(answer.id)
    for read in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            read(answer.id)
        assert caught.value.code == "response_not_found"


def test_answers_that_are_not_kept(server: Server) -> None:
    for given in ("resp_unknown", post(server, "hi", store=False)["id"]):
        assert server.get(f"{PATH}/{given}").status_code == 404
        wrong = error(server, 404, previous_response_id=given)
        assert wrong["param"] == "previous_response_id"
        assert wrong["code"] == "response_not_found"


def test_another_key_cannot_see_an_answer(engine: Engine, tmp_path: Path) -> None:
    with running(engine, ServerSettings(api_keys=("one", "two")), tmp_path) as server:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"input": "hi", "max_output_tokens": 4}
        name = server.post(PATH, body, headers=mine).json()["id"]
        continued = {**body, "previous_response_id": name}
        assert server.post(PATH, continued, headers=other).status_code == 404
        with server.client(headers=other) as client:
            assert client.get(f"{PATH}/{name}").status_code == 404
            assert client.get(f"{PATH}/{name}/input_items").status_code == 404
            assert client.delete(f"{PATH}/{name}").status_code == 404
        assert server.post(PATH, continued, headers=mine).status_code == 200
        assert server.get(f"{PATH}/{name}", headers=mine).status_code == 200
        assert server.get(f"{PATH}/{name}").status_code == 401


def test_old_answers_make_room_for_new_ones(engine: Engine, tmp_path: Path) -> None:
    """An image of 260 KB counts twice, so a ceiling of 1 MiB has room for one such conversation."""
    with running(engine, ServerSettings(response_store_mib=1), tmp_path) as server:
        ids = []
        for seed in range(3):
            url = data_url(picture(256, 256, seed))
            ids.append(post(server, [asked("what?", url)], max_output_tokens=2)["id"])
        kept = [server.get(f"{PATH}/{name}").status_code for name in ids]
        assert kept == [404, 404, 200]
        assert server.metrics()["fovea:response_store_bytes"] <= 1 << 20
        small = post(server, "hi", max_output_tokens=2)["id"]
        assert server.get(f"{PATH}/{small}").status_code == 200


def test_a_server_may_keep_nothing(engine: Engine, tmp_path: Path) -> None:
    with running(engine, ServerSettings(response_store_mib=0), tmp_path) as server:
        name = post(server, "hi", max_output_tokens=2)["id"]
        assert server.get(f"{PATH}/{name}").status_code == 404


BROKEN = "data:image/png;base64,AAAA"


@pytest.mark.parametrize("instructions", [None, "Be brief."], ids=["plain", "instructions"])
def test_errors_name_the_item(server: Server, instructions: str | None) -> None:
    """The instructions become a message, too, which must not shift the numbers of the items."""
    items = [{"role": "user", "content": "hi"}, asked("what?", BROKEN)]
    wrong = error(server, input=items, instructions=instructions)
    assert wrong["param"] == "input[1].content[0].image_url"
    first = post(server, [asked(HOW_MANY)])
    wrong = error(server, input=items, instructions=instructions, previous_response_id=first["id"])
    assert wrong["param"] == "input[1].content[0].image_url"


def wrong_function(**fields: Any) -> list[Json]:
    functions = copy.deepcopy(FUNCTIONS)
    functions[1] |= fields
    return functions


UNSUPPORTED: Json = {"type": "object", "properties": {"count": {"not": {}}}}
IN_ASSISTANT: Json = {"role": "assistant", "content": [{"type": "input_image", "image_url": SHAPES}]}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [IN_ASSISTANT]}, "input[0].content[0]"),
        ({"input": "word " * 9000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000, "input": "x " * 8000}, "input"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": wrong_function(parameters={"type": "array"})}, "tools[1].parameters"),
        ({"tools": wrong_function(parameters=UNSUPPORTED, strict=True)}, "tools[1].parameters"),
        ({"tools": wrong_function(name="point_at")}, "tools[1].name"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "paint"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": UNSUPPORTED}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"visual_tokens": {"keep": 7}}, "visual_tokens.keep"),
        ({"visual_tokens": {"method": "none at all", "keep": 0.5}}, "visual_tokens.method"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_errors_name_the_clients_field(server: Server, extra: Json, param: str) -> None:
    wrong = error(server, **extra)
    assert wrong["param"] == param
    assert "messages[" not in wrong["message"]
    assert ".function" not in wrong["message"]


def test_a_required_call_and_a_format_exclude_each_other(server: Server) -> None:
    wrong = error(server, tools=FUNCTIONS, tool_choice="required", text=FORMAT)
    assert wrong["param"] == "tool_choice"
    assert "response_format" not in wrong["message"]  # the client sent text.format


def test_chats_are_no_responses(server: Server) -> None:
    """A chat sent to this route lacks `input`; `messages` is not taken for it."""
    answer = server.post(PATH, chat(user(image(SHAPES), "what?")))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


async def scripted(text: str, *, thinking: bool = False, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(talker(text, thinking=thinking)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(PATH, json=body)


def without_names(items: list[Json]) -> list[Json]:
    """The items of an answer without the names that are new in every answer."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


async def test_reasoning_text_and_call_are_items_of_their_own() -> None:
    whole = (await scripted(ANSWER, input="x", tools=FUNCTIONS)).json()["output"]
    assert [item["type"] for item in whole] == ["reasoning", "message", "function_call"]
    assert whole[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert whole[1]["content"][0]["text"] == "I look it up."
    assert json.loads(whole[2]["arguments"]) == {"code": "A1"}
    answer = await scripted(ANSWER, input="x", tools=FUNCTIONS, stream=True)
    events = [json.loads(payload) for payload in sse.Decoder().feed(answer.content)]
    assert without_names(events[-1]["response"]["output"]) == without_names(whole)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    sent_back = await scripted("Hello", input=[{"role": "user", "content": "x"}, *whole], tools=FUNCTIONS)
    assert sent_back.json()["output"][0]["content"][0]["text"] == "Hello"


async def test_an_answer_may_begin_inside_the_reasoning() -> None:
    items = (await scripted("hm\n</think>\n\nHello", thinking=True, input="x")).json()["output"]
    assert [item["content"][0]["text"] for item in items] == ["hm", "Hello"]


async def test_text_after_a_call_has_the_same_place_in_a_stream_and_in_a_whole_answer() -> None:
    text = f"{ANSWER}\nThat is all."
    whole = (await scripted(text, input="x", tools=FUNCTIONS)).json()["output"]
    answer = await scripted(text, input="x", tools=FUNCTIONS, stream=True)
    last = json.loads(sse.Decoder().feed(answer.content)[-1])
    assert without_names(last["response"]["output"]) == without_names(whole)
