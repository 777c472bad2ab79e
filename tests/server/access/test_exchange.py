"""Request ids, the access log and the audit log of a running server, and routes that trust no header."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from fovea import Engine
from fovea.core.types import Delta, GenerationRequest, StageTimings, Usage
from fovea.server.app import create_app
from fovea.server.clients import Limits
from fovea.server.request import duration
from fovea.server.settings import ServerSettings
from tests.server.scripted import Script
from tests.server.support import Json, Server, chat, data_url, image, picture, running, until, user

CHAT = "/v1/chat/completions"
JSON = [(b"content-type", b"application/json")]
KEY = {"Authorization": "Bearer secret-key"}


@pytest.fixture(scope="module")
def logged(
    engine: Engine, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    path = tmp_path_factory.mktemp("log") / "access.log"
    settings = ServerSettings.of(
        api_keys=("secret-key", "other"), admin_keys=("boss",), access_log=str(path), allow_private_hosts=True
    )
    with running(engine, settings, files) as server:
        yield server, path


def line_of(path: Path, request_id: str) -> Json:
    """Wait for the line of a request in the access log."""
    found: list[Json] = []

    def written() -> bool:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[:] = [line for line in lines if line["id"] == request_id]
        return bool(found)

    until(written)
    assert len(found) == 1
    return found[0]


def test_a_line_per_request_with_the_name_of_the_key_and_never_the_key(logged: tuple[Server, Path]) -> None:
    server, path = logged
    answer = server.post(f"{CHAT}?token=hidden", chat(), headers={**KEY, "x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    line = line_of(path, "abc-1")
    usage = answer.json()["usage"]
    assert (line["key"], line["method"], line["path"], line["status"]) == ("api-key:1", "POST", CHAT, 200)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], 4)
    assert line["bytes_out"] == len(answer.content)
    assert line["bytes_in"] > 0
    assert line["client"] == "127.0.0.1"
    assert 0 <= line["first_byte_ms"] <= line["ms"]
    text = path.read_text()
    assert "secret" not in text
    assert "hidden" not in text


def test_a_stream_is_logged_at_its_end(logged: tuple[Server, Path]) -> None:
    server, path = logged
    body = chat(stream=True, stream_options={"include_usage": True})
    answer = server.post(CHAT, body, headers={**KEY, "x-request-id": "stream"})
    line = line_of(path, "stream")
    assert line["completion_tokens"] == 4
    assert line["bytes_out"] == len(answer.content)


@pytest.mark.parametrize("sent", ["x" * 129, "a b", 'a"b', "{}", ""])
def test_a_forged_request_id_is_replaced(logged: tuple[Server, Path], sent: str) -> None:
    server, path = logged
    answer = server.get("/v1/models", headers={**KEY, "x-request-id": sent})
    assert len(answer.headers["x-request-id"]) == 32
    line_of(path, answer.headers["x-request-id"])


def test_a_path_cannot_forge_a_line(logged: tuple[Server, Path]) -> None:
    """Percent-encoded line breaks of a path arrive decoded in the log's input."""
    server, path = logged
    before = len(path.read_text().splitlines())
    answer = server.get("/v1/%0A%7B%22id%22:%22forged%22%7D%0D%1B" + "x" * 5000, headers=KEY)
    line = line_of(path, answer.headers["x-request-id"])
    assert line["path"].startswith('/v1/\n{"id"')
    assert len(line["path"]) == 200
    assert len(path.read_text().splitlines()) == before + 1


async def test_the_engine_gets_the_request_id_as_prefix() -> None:
    """Lines of the engine's log and of the access log can be joined."""
    ids: list[str] = []

    class Recording(Script):
        def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            ids.append(request.id)
            return super().stream(request)

    end = Delta(0, "", (), finish_reason="length", usage=Usage(1, 0), timings=StageTimings())
    transport = httpx.ASGITransport(create_app(Recording(end)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(2):
            await client.post(CHAT, json=chat(), headers={"x-request-id": "mine"})
    assert [name.partition("-")[0] for name in ids] == ["mine", "mine"]
    assert len(set(ids)) == 2, "an id that a client repeats is still unique in the engine"


def test_refused_keys_are_audited_and_counted(
    logged: tuple[Server, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = logged
    with caplog.at_level(logging.WARNING, "fovea.audit"):
        server.get("/v1/models")
        server.get("/v1/models", headers={"Authorization": "Bearer guess"})
        server.get("/admin/caches", headers=KEY)
        private = chat(user(image("file:///etc/passwd")))
        forbidden = server.post(CHAT, private, headers=KEY)
        until(lambda: len(caplog.records) == 4)  # the answer leaves first
    assert forbidden.status_code == 403
    lines = [json.loads(record.message.removeprefix("refused ")) for record in caplog.records]
    assert [(line["status"], line["reason"], line["path"]) for line in lines] == [
        (401, "missing_api_key", "/v1/models"),
        (401, "invalid_api_key", "/v1/models"),
        (401, "invalid_api_key", "/admin/caches"),
        (403, forbidden.json()["error"]["code"], CHAT),
    ]
    assert [len(line["key"]) for line in lines] == [1, 8, 8, 8]
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    text = server.get("/metrics", headers={"Authorization": "Bearer boss"}).text
    assert 'fovea:denied_total{reason="missing_api_key"}' in text


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1/chat/completions/", "/tokenize/", "/health/", "/admin/caches/"]
)
def test_no_redirect_to_the_host_that_a_client_names(server: Server, path: str) -> None:
    """A path with a slash too many was answered with 307 to a URL made of the Host header.

    So a page that a shared cache or a proxy keeps could lead other clients, with their keys, to a host of the
    attacker's choice.
    """
    for headers in (
        {"Host": "evil.example"},
        {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https"},
    ):
        for method in ("GET", "POST"):
            with server.client() as client:
                answer = client.request(method, path, headers=headers, follow_redirects=False)
            assert answer.status_code in (403, 404, 405), answer.status_code
            assert "evil.example" not in without_quoted_host(answer) + str(answer.headers)


@pytest.mark.parametrize("host", ["[", "a/../admin", "x?y#z", "user@evil.example", "a" * 300])
def test_a_host_header_that_is_no_host(server: Server, host: str) -> None:
    """The path of an error is read from a URL that begins with the Host header. It must not end up in it."""
    with server.client() as client:
        answer = client.get("/none", headers={"Host": host})
    assert answer.status_code in (400, 403, 404), answer.text
    assert host not in without_quoted_host(answer)


def without_quoted_host(answer: httpx.Response) -> str:
    """The body of an answer, without the message that quotes a refused Host header, which is not a URL."""
    if answer.status_code != 403:
        return answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("host_not_allowed", "host")
    assert error["message"].startswith("the Host header '")
    return json.dumps({**error, "message": ""})


def test_docs_that_are_off(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings.of(docs="off"), files) as server:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert server.get(path).status_code == 404
    with running(engine, ServerSettings.of(api_keys=("a",), docs="on", open_metrics=True), files) as server:
        assert [server.get(path).status_code for path in ("/docs", "/openapi.json", "/metrics")] == [200] * 3


async def test_tokenize_takes_a_place_and_ends_with_its_client() -> None:
    """In the past, /tokenize took no place, had no timeout, and went on after its client had left."""
    reserved: list[int] = []
    ended: list[bool] = []

    class Stuck(Script):
        async def tokenize(self, prompt: object) -> list[int]:
            reserved.append(app.state.places.reserved)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)
            return []

    app = create_app(Stuck())
    messages: list[Json] = [{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}]

    async def receive() -> Json:
        if messages:
            return messages.pop()
        while not reserved:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        raise AssertionError(f"nobody reads an answer: {message}")

    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": JSON}
    await app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
    assert (reserved, ended) == ([1], [True])
    assert app.state.places.reserved == 0


def test_salt_of_tokenize(server: Server) -> None:
    body = {"messages": [user(image(data_url(picture(seed=91))), "what is it?")], "cache_salt": "s"}
    assert server.post("/tokenize", body).status_code == 200


def test_tokenize_has_the_servers_timeout_and_needs_a_free_place(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(request_timeout=1e-6), files) as server:
        answer = server.post("/tokenize", {"prompt": "hello"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    with running(engine, ServerSettings(api_keys=("a",)), files) as server:
        server.app.state.access.clients[0].change_limits(Limits(places=1))
        (client,), places = server.app.state.access.clients, server.app.state.places
        places.take(client, 1)
        answer = server.post("/tokenize", {"prompt": "a"}, headers={"Authorization": "Bearer a"})
        assert answer.status_code == 429
        places.give_up(client, 1)
        answer = server.post("/tokenize", {"prompt": "a"}, headers={"Authorization": "Bearer a"})
        assert answer.status_code == 200


async def test_caches_are_cleared_one_after_another() -> None:
    """Each clearing blocks a thread until the step ends; a hundred of them took all threads of the server."""
    clearing, most = 0, 0
    gate = threading.Event()

    class Slow(Script):
        def clear_caches(self, *stages: object) -> None:
            nonlocal clearing, most
            clearing += 1
            most = max(most, clearing)
            gate.wait(60)
            clearing -= 1

    transport = httpx.ASGITransport(create_app(Slow()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        tasks = [asyncio.create_task(client.delete("/admin/caches/kv")) for _ in range(5)]
        while not most:
            await asyncio.sleep(0.01)
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 5
    assert most == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.02, "20ms"), (1.5, "1.5s"), (59.9, "59.9s"), (60, "1m0s"), (3661, "61m1s")],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
