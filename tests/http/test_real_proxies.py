"""Fovea's server behind real proxies: the client's address, streams, and connections that are kept."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

from fovea.core.types import Delta, GenerationRequest
from fovea.server.routing import Route
from tests.http.support import CHAT, LAST, Host, hosting, size_of_body, soon, who
from tests.server.scripted import Script
from tests.server.support import PATIENCE, chat
from tests.support.servers import envoy_proxy, nginx_proxy

PROXIES: dict[str, Callable[[Sequence[str]], AbstractContextManager[str]]] = {
    "nginx": nginx_proxy,
    "nginx that buffers": lambda urls: nginx_proxy(urls, buffering=True),
    "envoy": envoy_proxy,
}


class Waiting(Script):
    """An engine that sends two words, and the rest once it is released.

    released: whether it goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.released = False

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            yield Delta(0, "one ", (1,))
            yield Delta(0, "two ", (1,))
            while not self.released:
                await asyncio.sleep(0.01)
            yield LAST
        finally:
            self.closed_streams += 1


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> Callable[[Host], AbstractContextManager[str]]:
    return lambda host: PROXIES[request.param]([host.url])


@contextlib.contextmanager
def connected(url: str, source: str = "127.0.0.1") -> Iterator[http.client.HTTPConnection]:
    """A client's connection. source: its own address."""
    connection = http.client.HTTPConnection(
        url.removeprefix("http://"), timeout=PATIENCE, source_address=(source, 0)
    )
    try:
        yield connection
    finally:
        connection.close()


def test_the_client_is_the_one_that_the_proxy_saw(proxy: Callable[..., AbstractContextManager[str]]) -> None:
    """The client claims another address, and is not believed: a trusted proxy appends the real one."""
    with hosting(trusted_proxies=("127.0.0.1",)) as host:
        host.app.router.add(Route("GET", "/who", who))
        with proxy(host) as url, connected(url, "127.0.0.9") as client:
            client.request("GET", "/who", headers={"X-Forwarded-For": "192.0.2.7"})
            assert json.load(client.getresponse()) == "127.0.0.9"


def test_events_are_not_held_back(proxy: Callable[..., AbstractContextManager[str]]) -> None:
    """Words arrive while the engine waits. An nginx that buffers obeys X-Accel-Buffering."""
    script = Waiting()
    with hosting(script) as host, proxy(host) as url, connected(url) as client:
        client.request("POST", CHAT, json.dumps(chat(stream=True)), {"content-type": "application/json"})
        answer = client.getresponse()
        text = b""
        while b"two" not in text:
            line = answer.readline()
            assert line, text
            text += line
        script.released = True
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_ends_its_request(proxy: Callable[..., AbstractContextManager[str]]) -> None:
    script = Waiting()
    with hosting(script) as host, proxy(host) as url:
        with connected(url) as client:
            client.request("POST", CHAT, json.dumps(chat(stream=True)), {"content-type": "application/json"})
            assert client.getresponse().readline()
        soon(lambda: script.closed_streams == 1)


def test_connections_to_the_server_are_used_again(proxy: Callable[..., AbstractContextManager[str]]) -> None:
    with hosting() as host, proxy(host) as url:
        for _ in range(20):
            with connected(url) as client:
                client.request("GET", "/health")
                assert client.getresponse().status == 200
        assert host.open_connections() == 1


@pytest.mark.parametrize("size", [100_000, 5_000_000])
def test_large_bodies_arrive(proxy: Callable[..., AbstractContextManager[str]], size: int) -> None:
    with hosting() as host:
        host.app.router.add(Route("POST", "/size", size_of_body))
        with proxy(host) as url, connected(url) as client:
            client.request("POST", "/size", b"a" * size)
            assert json.load(client.getresponse()) == size
