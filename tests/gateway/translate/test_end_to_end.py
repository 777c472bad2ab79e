"""The server's own answers equal those that are translated from its chat completions.

A request goes to the server twice: as it is, and translated to a chat completion whose answer is translated
back. Only ids, times, and the token counts at the beginning of a stream may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from fovea import Engine
from fovea.api import sse
from fovea.core.types import Delta, FinishReason, StageTimings, Usage
from fovea.gateway.inspect.body import Prefixed
from fovea.gateway.translate.translation import Api, ChatTranslation, to_chat
from fovea.server.app import App, create_app
from fovea.server.settings import ServerSettings
from tests.gateway.translate.support import APIS, HELLO, RICH, Json, check, events, translation
from tests.server.scripted import ANSWER, Script, talker
from tests.server.support import Server, running
from tests.server.test_messages_api import DEFINITIONS, SHAPES, SIGN
from tests.server.test_messages_api import asked as asked_message
from tests.server.test_responses_api import FUNCTIONS
from tests.server.test_responses_api import asked as asked_item

PATHS = {"messages": "/v1/messages", "responses": "/v1/responses"}
CHAT = "/v1/chat/completions"
VARYING = ("id", "item_id", "call_id", "created_at", "timings_ms", "store")


def plain(value: Any) -> Any:
    """A body or an event without what is new in every answer."""
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items() if name not in VARYING}
    return value


def written(body: Any) -> Any:
    """A chat body as a gateway sends it."""
    if isinstance(body, Prefixed):
        return body.prefix + body.value
    if isinstance(body, list):
        return [written(entry) for entry in body]
    if isinstance(body, dict):
        return {name: written(entry) for name, entry in body.items()}
    return body


TWO = f'{ANSWER}\n<tool_call>\n{{"name": "look_up", "arguments": {{}}}}\n</tool_call>'
SCRIPTS = {
    "text": "Hello, Köln 🌞!",
    "nothing": "",
    "reasoning, text and call": ANSWER,
    "two calls": TWO,
    "reasoning alone": "<think>and then",
    "cut off": ANSWER[:-25],
}


class Switch(Script):
    """An engine that answers as the test wants that runs, so that all share a server."""

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(talker("").info, name="m")

    def play(self, *steps: Delta) -> None:
        self._steps = steps


@pytest.fixture(scope="module")
def switch() -> Switch:
    return Switch()


@pytest.fixture(scope="module")
def app(switch: Switch) -> App:
    return create_app(switch)


def script(text: str, reason: FinishReason, stop: str | None) -> list[Delta]:
    """The steps of an answer that comes letter by letter."""
    last = Delta(
        0, "", (), finish_reason=reason, usage=Usage(5, len(text), 2, 1, 1), timings=StageTimings(), stop=stop
    )
    return [*(Delta(0, letter, (1,)) for letter in text), last]


async def post(app: App, path: str, body: Json) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize(
    ("name", "reason", "stop"),
    [
        pytest.param(name, reason, stop, marks=[] if quick else pytest.mark.slow)
        for name in SCRIPTS
        for reason, stop in (("stop", None), ("length", None), ("stop", "END"))
        for quick in [reason == "stop" and not stop or name in ("text", "cut off")]
    ],
)
@pytest.mark.parametrize("api", APIS)
async def test_translated_answers_equal_native_ones(
    app: App, switch: Switch, api: Api, name: str, reason: FinishReason, stop: str | None
) -> None:
    tools = DEFINITIONS if api == "messages" else FUNCTIONS
    switch.play(*script(SCRIPTS[name], reason, stop))
    for stream in (False, True):
        body = {**HELLO[api], "tools": tools, "stream": stream}
        native = await post(app, PATHS[api], body)
        chat = to_chat(api, body)
        answer = await post(app, CHAT, chat.body)
        assert native.status_code == answer.status_code == 200
        if not stream:
            assert plain(chat.answer(200, answer.json())) == plain(native.json())
            continue
        translator = chat.translator()
        found = events(translator.feed(answer.content) + translator.close())
        check(api, found)
        assert plain(found) == plain(events(native.content))


async def test_failed_streams_equal_native_ones() -> None:
    steps = [Delta(0, "Hello", (1,)), RuntimeError("defect")]
    for api in APIS:
        body = {**HELLO[api], "stream": True}
        native = await post(create_app(Script(*steps)), PATHS[api], {**body, "model": None})
        chat = to_chat(api, {**body, "model": None})
        answer = await post(create_app(Script(*steps)), CHAT, chat.body)
        translator = chat.translator()
        found = events(translator.feed(answer.content) + translator.close())
        check(api, found, failed=True)
        [*mine, last], [*theirs, failure] = plain(found), plain(events(native.content))
        assert mine == theirs
        assert last.get("error", last)["message"] == failure.get("error", failure)["message"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the bundled model, which has learnt to call tools."""
    with (
        Engine.from_pretrained("fovea-tiny", device="cpu", threads=1, kv_cache_mib=16) as engine,
        running(engine, ServerSettings(), tmp_path_factory.mktemp("files")) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """One client for all requests: to make one reads certificates, which takes longer than most answers."""
    with server.client(verify=False) as client:
        yield client


COUNT: Json = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": '{"price": 42}'}
LOOKED_UP = [
    asked_message("Look up the code.", SIGN),
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "look_up", "input": {"code": "B6F63"}}],
    },
    {"role": "user", "content": [RESULT]},
]
HOW_MANY = "How many objects can you see?"
REAL: list[tuple[Api, Json]] = [
    ("messages", {"messages": [asked_message(HOW_MANY)], "system": "Be brief."}),
    ("messages", {"messages": [asked_message(HOW_MANY)], "stop_sequences": ["objects"]}),
    ("messages", {"messages": [asked_message(HOW_MANY)], "max_tokens": 2}),
    ("messages", {"messages": [asked_message(HOW_MANY), {"role": "assistant", "content": "There are"}]}),
    (
        "messages",
        {"messages": [asked_message("Save the number of circles.")], "tools": DEFINITIONS}
        | {"tool_choice": {"type": "any"}},
    ),
    ("messages", {"messages": LOOKED_UP, "tools": DEFINITIONS}),
    (
        "messages",
        {
            "messages": [asked_message('How many circles are there? Reply as JSON {"count": integer}')],
            "output_config": {"format": {"type": "json_schema", "schema": COUNT}},
        },
    ),
    ("responses", {"input": [asked_item(HOW_MANY)], "instructions": "Be brief.", "top_logprobs": 2}),
    ("responses", {"input": [asked_item("Save the number of circles.")], "tools": FUNCTIONS}),
    ("responses", {"input": [asked_item(HOW_MANY)], "max_output_tokens": 2, "metadata": {"a": "b"}}),
]


@pytest.mark.parametrize(("api", "fields"), REAL)
def test_answers_of_a_model_are_equal(client: httpx.Client, api: Api, fields: Json) -> None:
    limit = {"max_tokens": 60} if api == "messages" else {"max_output_tokens": 60}
    body = {"model": "fovea-tiny", "temperature": 0, **limit, **fields}
    client.post(PATHS[api], json=body)  # both of the next find the same prefix in the cache
    chat = to_chat(api, body)
    native = client.post(PATHS[api], json=body).json()
    answer = client.post(CHAT, json=written(chat.body))
    assert answer.status_code == 200, answer.text
    assert plain(chat.answer(200, answer.json())) == plain(native)
    streamed = to_chat(api, {**body, "stream": True})
    translator = streamed.translator()
    found = events(
        translator.feed(client.post(CHAT, json=written(streamed.body)).content) + translator.close()
    )
    theirs = events(client.post(PATHS[api], json={**body, "stream": True}).content)
    if api == "messages":  # a chat stream tells its token counts only at its end
        assert found[0]["message"].pop("usage")["input_tokens"] == 0
        assert theirs[0]["message"].pop("usage")["output_tokens"] == 0
    assert plain(found) == plain(theirs)


def test_errors_of_a_model_are_equal(client: httpx.Client) -> None:
    broken = asked_message("what?", SHAPES[:50])
    body = {"max_tokens": 4, "system": "s", "messages": [{"role": "user", "content": "hi"}, broken]}
    native = client.post(PATHS["messages"], json=body)
    chat = to_chat("messages", body)
    answer = client.post(CHAT, json=written(chat.body))
    assert answer.status_code == native.status_code == 400
    assert chat.answer(400, answer.json()) == native.json()


def sdk(chat: ChatTranslation, data: bytes, status: int = 200) -> openai.OpenAI:
    """OpenAI's client in front of a translated stream, which arrives in pieces of 50 bytes."""

    def handle(request: httpx.Request) -> httpx.Response:
        translator = chat.translator()
        parts = [translator.feed(data[at : at + 50]) for at in range(0, len(data), 50)]
        content = b"".join([*parts, translator.close()])
        return httpx.Response(status, content=content, headers={"content-type": sse.MEDIA_TYPE})

    http = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)


def test_openais_client_gathers_a_translated_stream() -> None:
    client = sdk(translation("responses"), RICH)
    with client.responses.stream(model="m", input="x") as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert answer.output_text == "Ich schaue nach: 🌞"
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(item.name, json.loads(item.arguments)) for item in calls] == [
        ("look", {"city": "Köln"}), ("stop", {}),
    ]  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert kinds[-1] == "response.completed"


def test_openais_client_reads_every_event_as_its_own_type() -> None:
    for event in sdk(translation("responses"), RICH).responses.create(model="m", input="x", stream=True):
        kind = type(event)
        assert kind.__name__.startswith("Response")
        kind.model_validate(event.to_dict())


def test_openais_client_reads_the_error_of_a_broken_stream() -> None:
    cut = RICH[: len(RICH) // 2]
    client = sdk(translation("responses"), cut)
    *_, last = client.responses.create(model="m", input="x", stream=True)
    assert last.type == "error"
    assert "not JSON" in last.message
