"""The client over a real socket: the measurements of an answer, and the kind of every failure."""

from __future__ import annotations

import json
import socket

import pytest

from fovea.bench.client import Client, record_event
from fovea.bench.measure import BenchRequest, Sample
from fovea.bench.settings import Target
from fovea.core.errors import ConfigError, Unavailable
from tests.bench.support import Scripted, connected, scripted

REQUEST = BenchRequest(({"role": "user", "content": "hello"},), 5)


def piece(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


async def send(script: Scripted, request: BenchRequest = REQUEST) -> Sample:
    """Send a request without the first short question, at which a broken server would already fail."""
    with scripted(script):
        async with Client(Target(script.url, model="m")) as client:
            return await client.send(request)


async def test_sample_records_times_and_counts() -> None:
    async with connected(Scripted()) as client:
        sample = await client.send(REQUEST)
    assert sample.failure is None
    assert len(sample.events) == 5, "the first event has no text and does not count"
    assert sample.sent_at <= sample.events[0] <= sample.events[-1] <= sample.ended_at
    assert (sample.tokens, sample.prompt_tokens, sample.image_tokens, sample.cached_tokens) == (5, 9, 4, 1)
    assert (sample.finish_reason, "".join(sample.text_pieces)) == ("length", " 0 1 2 3 4")


async def test_request_body() -> None:
    script = Scripted()
    async with connected(script) as client:
        await client.send(BenchRequest(REQUEST.messages, 5, priority=3, salt="s"))
    (body,) = script.questions
    assert body == {
        "model": "scripted", "messages": [{"role": "user", "content": "hello"}], "stream": True,
        "max_tokens": 5, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0,
        "priority": 3, "cache_salt": "s",
    }  # fmt: skip


async def test_latencies_count_from_the_due_time() -> None:
    async with connected(Scripted()) as client:
        due = client.clock() - 10
        sample = await client.send(REQUEST, due)
    assert sample.due_at == due
    assert sample.send_delay > 10
    assert sample.ttft > 10


async def test_client_closes_the_stream_when_on_progress_returns_true() -> None:
    async with connected(Scripted()) as client:
        sample = await client.send(
            BenchRequest(REQUEST.messages, 500), on_progress=lambda sample: bool(sample.events)
        )
        assert sample.failure is not None
        assert sample.failure.kind == "left"
        assert client.running == 0


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        (Scripted(statuses=[429]), "http 429", "not now"),
        (Scripted(statuses=[503]), "http 503", "not now"),
        (Scripted(streams=False), "no stream", "a whole answer"),
        (Scripted(events=[piece("a")]), "broken stream", "without a finish_reason"),
        (
            Scripted(events=[piece("a"), '{"error": {"message": "the engine died"}}']),
            "broken stream",
            "the engine died",
        ),
        (Scripted(events=["{"]), "bad answer", "'{'"),
        (Scripted(events=["[1]"]), "bad answer", "not a JSON object"),
        (
            Scripted(events=['{"choices": [{"delta": {}, "finish_reason": "stop"}]}']),
            "empty answer",
            "no text",
        ),
    ],
)
async def test_failure_kinds(script: Scripted, kind: str, text: str) -> None:
    failure = (await send(script)).failure
    assert failure is not None
    assert failure.kind == kind
    assert text in failure.text


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        ("[" * 5000, "bad answer"),
        ('{"choices": [null]}', "bad answer"),
        ('{"choices": 1}', "bad answer"),
        ('{"error": [1]}', "broken stream"),
        ('{"choices": [{"delta": [1]}]}', ""),
        ('{"choices": [{"delta": {"content": 5}}], "usage": {"prompt_tokens_details": 1}}', ""),
    ],
)
def test_events_of_a_strange_server_do_not_end_the_run(payload: str, kind: str) -> None:
    """Fuzzing sent such events. Each ended a whole run with an AttributeError or a RecursionError."""
    sample = Sample(0.0, "", 0, 1)
    failure = record_event(payload, 0.0, sample)
    assert (failure.kind if failure else "") == kind
    assert not sample.text_pieces


async def test_timeout_of_a_request() -> None:
    failure = (await send(Scripted(), BenchRequest(REQUEST.messages, 5, timeout=1e-9))).failure
    assert failure is not None
    assert (failure.kind, failure.text) == ("timeout", "no end within 1e-09 s")


async def test_unreachable_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        async with Client(Target(url, model="m")) as client:
            failure = (await client.send(REQUEST)).failure
            assert failure is not None
            assert failure.kind == "unreachable"
            with pytest.raises(Unavailable, match=f"{url}/v1 cannot be reached: "):
                await client.connect()


@pytest.mark.parametrize(
    ("script", "target", "message"),
    [
        (Scripted(key="right"), {}, r"refuses the API key \(401: wrong key\); give it by --api-key"),
        (Scripted(key="right"), {"api_key": "wrong"}, "refuses the API key"),
        (Scripted(), {"model": "other"}, "no model 'other'; served: scripted"),
        (Scripted(models=None), {}, r"lists no model \(404: Not Found\); name one by --model"),
        (Scripted(models=()), {}, r"lists no model .* name one by --model"),
        (
            Scripted(streams=False),
            {},
            "no stream: the server answers a request for a stream with a whole answer",
        ),
        (Scripted(refuses=frozenset({"messages"})), {}, "http 400: unknown field messages"),
        (Scripted(statuses=[404]), {}, "http 404"),
    ],
)
async def test_connect_says_what_is_wrong(script: Scripted, target: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with connected(script, **target):
            pass


async def test_server_without_a_list_of_models() -> None:
    async with connected(Scripted(models=None), model="m") as client:
        assert client.model == "m"


async def test_right_api_key() -> None:
    async with connected(Scripted(key="right"), api_key="right") as client:
        assert client.model == "scripted"


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    ("refused", "note"),
    [
        ({"stream_options"}, "does not know stream_options: tokens are counted by events"),
        ({"ignore_eos"}, "does not know ignore_eos: answers may end before their length"),
        ({"temperature"}, "refuses temperature 0"),
        ({"stream_options", "ignore_eos", "max_tokens", "temperature"}, "stream_options"),
    ],
)
async def test_unknown_fields_are_omitted_and_noted(refused: set[str], note: str, silent: bool) -> None:
    script = Scripted(refuses=frozenset(refused), silent=silent)
    async with connected(script) as client:
        sample = await client.send(REQUEST)
    assert sample.failure is None
    assert any(note in text for text in client.dialect.notes)
    assert not refused & script.bodies[-1].keys()
    if not silent:
        assert len(client.dialect.notes) == len(refused - {"max_tokens"}), "nothing else is left out"


async def test_images_are_uploaded() -> None:
    script = Scripted()
    async with connected(script, images_as="encoded") as client:
        assert await client.send_image("data:x") == "fovea-image://1"
    assert script.images == [{"url": "data:x", "encode": True}]
    with pytest.raises(
        ConfigError, match="/v1/images does not take images .* accepted here: --images-as data"
    ):
        async with connected(Scripted(takes_images=False), images_as="sent") as client:
            await client.send_image("data:x")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v3/", "https://host/v3"),
        ("http://[::1]:80/v1?x=1#y", "http://[::1]:80/v1"),
    ],
)
def test_base_urls(text: str, url: str) -> None:
    assert Target(text).url == url


@pytest.mark.parametrize(
    "text",
    ["host:8000", "ftp://host", "http://", "http://a:b@host", "http://host:x", "http://a..b", "", "http://["],
)
def test_invalid_urls(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted: http:// or https:// and a host"):
        Target(text)


@pytest.mark.parametrize("wrong", [{"timeout": 0.0}, {"images_as": "files"}, {"api_key": "ключ"}])
def test_invalid_targets(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as raised:
        Target("http://host", **wrong)  # type: ignore[arg-type]
    assert raised.value.param == next(iter(wrong))
