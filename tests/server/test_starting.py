"""A server whose model is still loading: the port is open, and requests are refused with 503."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from fovea.core.errors import CheckpointError
from fovea.core.progress import report
from fovea.core.protocols import EngineClient
from fovea.core.types import TextPrompt
from fovea.server.app import create_app
from fovea.server.starting import StartingClient
from tests.server.scripted import Script
from tests.server.support import Server

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def never() -> None:
    raise AssertionError("loading did not fail")


def http(client: StartingClient) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client)), base_url="http://test")


async def wait_for(condition: Callable[[], bool]) -> None:
    import asyncio

    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true in five seconds")


async def test_loading_then_ready() -> None:
    gate = threading.Event()

    def load() -> EngineClient:
        gate.wait(10)
        return Script()

    client = StartingClient("named", load, never)
    client.start()
    async with http(client) as browser:
        assert (await browser.get("/health")).status_code == 200
        ready = await browser.get("/ready")
        answer = await browser.post("/v1/chat/completions", json=CHAT)
        assert [ready.status_code, answer.status_code] == [503, 503]
        assert "still loading" in ready.json()["error"]["message"]
        assert "still loading" in answer.json()["error"]["message"]
        assert "loading" not in answer.json()
        report(440 << 20, 1 << 30)
        ready = await browser.get("/ready")
        assert ready.json()["loading"] == {"loaded_bytes": 440 << 20, "total_bytes": 1 << 30, "percent": 42}
        assert ready.json()["error"]["message"].endswith("42% of its weights (440 of 1,024 MiB)")
        assert (await browser.get("/v1/models")).json()["data"][0]["id"] == "named"
        assert (await browser.get("/metrics")).status_code == 200
        gate.set()
        await wait_for(lambda: client.status == "ready")
        assert (await browser.get("/ready")).json() == {"status": "ready", "model": "script"}


async def test_failed_load_calls_on_failure() -> None:
    failed = threading.Event()

    def load() -> EngineClient:
        raise CheckpointError("no such folder")

    client = StartingClient("named", load, failed.set)
    client.start()
    await wait_for(failed.is_set)
    assert client.status == "stopped"
    assert isinstance(client.failure, CheckpointError)
    async with http(client) as browser:
        assert (await browser.get("/ready")).status_code == 503


async def test_client_refuses_calls_before_the_start() -> None:
    from fovea.core.errors import Unavailable

    client = StartingClient("named", Script, never)
    with pytest.raises(Unavailable, match="still loading"):
        await client.tokenize(TextPrompt("hi"))


def test_probes_accept_head_requests(server: Server) -> None:
    with server.client() as client:
        for path in ("/health", "/ready"):
            answer = client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
