"""A proxy passes everything on, in time: nginx, Envoy and Fovea's gateway in front of simulated engines.

All tests run with nginx and Envoy, too, so that they ask for nothing that a good proxy does not do. Those
cases, which do not test the gateway, are slow.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from fovea.cli.main import COMMANDS
from tests.support.servers import envoy_proxy, fovea_gateway, nginx_proxy, simulated_backends
from tests.support.thorough import others_slow

PATIENCE_S = 20.0
Start = Callable[[Sequence[str]], AbstractContextManager[str]]


@contextlib.contextmanager
def chain(outer: Start, inner: Start, urls: Sequence[str]) -> Iterator[str]:
    """A proxy in front of a proxy."""
    with inner(urls) as middle, outer([middle]) as url:
        yield url


PROXIES: dict[str, Start] = {
    "nginx": nginx_proxy,
    "envoy": envoy_proxy,
}
CHAINS: dict[str, Start] = {}
if "gateway" in COMMANDS:
    PROXIES["gateway"] = fovea_gateway
    CHAINS["nginx, gateway"] = lambda urls: chain(nginx_proxy, fovea_gateway, urls)
    CHAINS["envoy, gateway"] = lambda urls: chain(envoy_proxy, fovea_gateway, urls)
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Place:
    """A proxy and the engines behind it, as base URLs."""

    proxy: str
    engines: Sequence[str]

    def behave(self, **behaviour: Any) -> None:
        """Let all engines answer in a certain way."""
        for url in self.engines:
            with posting(url, "/behaviour", json.dumps(behaviour).encode()) as answer:
                assert answer.status == 200, answer.read()

    def counts(self, name: str) -> int:
        """The sum of a counter over all engines."""
        total = 0
        for url in self.engines:
            with posting(url, "/counts", b"{}") as answer:
                total += json.load(answer)[name]
        return total


@contextlib.contextmanager
def posting(url: str, path: str, body: bytes) -> Iterator[http.client.HTTPResponse]:
    """Send a body and give the answer, whose connection is closed at the end."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


@pytest.fixture(
    scope="module",
    params=others_slow([*PROXIES, *CHAINS], {"gateway", "envoy, gateway"} & {*PROXIES, *CHAINS}),
)
def running(request: pytest.FixtureRequest) -> Iterator[Place]:
    start = {**PROXIES, **CHAINS}[request.param]
    with simulated_backends(2, "--digest") as engines, start(engines) as url:
        yield Place(url, engines)


@pytest.fixture
def place(running: Place) -> Place:
    """A place that tests share: their engines do not fail, because a proxy may remember that."""
    running.behave(mode="answer", gap_ms=0)
    return running


@pytest.fixture(scope="module")
def engines() -> Iterator[Sequence[str]]:
    """Engines that fail as each test tells them."""
    with simulated_backends(2) as urls:
        yield urls


@pytest.fixture(params=others_slow(PROXIES, {"gateway"} & {*PROXIES}))
def failing(request: pytest.FixtureRequest, engines: Sequence[str]) -> Iterator[Place]:
    """A proxy for one test, because it may remember failures."""
    with PROXIES[request.param](engines) as url:
        yield Place(url, engines)


def question(text: str = "What is it?", **extra: Any) -> bytes:
    """A body without spaces, as a program writes it that reads the body and writes it again."""
    body = {"model": "simulated", "messages": [{"role": "user", "content": text}], **extra}
    return json.dumps(body, separators=(",", ":")).encode()


def stream(events: int) -> bytes:
    return question(stream=True, max_tokens=events)


def soon(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


@pytest.mark.parametrize("size", [0, 1_000, 220_000, 3_000_000])
def test_bodies_arrive_unchanged(place: Place, size: int) -> None:
    body = question("0123456789" * (size // 10))
    with posting(place.proxy, CHAT, body) as answer:
        assert answer.status == 200
        assert answer.headers["x-fovea-body-sha256"] == hashlib.sha256(body).hexdigest()
        assert json.load(answer)["choices"]


def test_every_engine_gets_requests(place: Place) -> None:
    """The questions differ, because a proxy may send equal ones to one engine."""
    names = set()
    for number in range(32):
        with posting(place.proxy, CHAT, question(f"What is {number}?")) as answer:
            names.add(answer.headers["x-fovea-backend-id"])
    assert names == {"backend-0", "backend-1"}


def test_streams_arrive_completely(place: Place) -> None:
    with posting(place.proxy, CHAT, stream(500)) as answer:
        text = answer.read()
    assert text.count(b'"content":" word"') == 499
    assert text.endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_ends_its_stream_at_the_engine(place: Place) -> None:
    before = place.counts("cut")
    place.behave(gap_ms=20)
    with posting(place.proxy, CHAT, stream(100_000)) as answer:
        assert answer.readline().startswith(b"data: ")
    soon(lambda: place.counts("cut") == before + 1)


def test_events_are_not_held_back(failing: Place) -> None:
    """The engine stops after three events without an end. All three reach the client meanwhile."""
    failing.behave(mode="stall", after=3)
    with posting(failing.proxy, CHAT, stream(10)) as answer:
        lines = [answer.readline() for _ in range(6)]
    assert [line.startswith(b"data: ") for line in lines] == [True, False] * 3


def test_a_stream_that_breaks_does_not_look_complete(failing: Place) -> None:
    """The connection breaks, or the stream ends without its last event."""
    failing.behave(mode="kill", after=3)
    with posting(failing.proxy, CHAT, stream(10)) as answer:
        try:
            text = answer.read()
        except http.client.IncompleteRead as broken:
            text = broken.partial
        except ConnectionResetError:
            text = b""
    assert b"[DONE]" not in text
    assert b'"finish_reason":"stop"' not in text


def test_an_engine_that_resets_connections_is_a_bad_gateway(failing: Place) -> None:
    failing.behave(mode="kill")
    with posting(failing.proxy, CHAT, question()) as answer:
        assert answer.status in (502, 503)


@pytest.mark.parametrize("status", [429, 503])
def test_refusals_are_passed_on(failing: Place, status: int) -> None:
    failing.behave(mode="refuse", status=status)
    with posting(failing.proxy, CHAT, question()) as answer:
        assert answer.status in (429, 503)
        assert int(answer.headers["retry-after"]) >= 1
        assert json.load(answer)["error"]["code"]
