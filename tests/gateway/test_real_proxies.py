"""A proxy passes everything on, in time: real nginx and real Envoy in front of simulated engines."""

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

from tests.support.servers import envoy_proxy, nginx_proxy, simulated_backends

PATIENCE_S = 20.0
PROXIES: dict[str, Callable[[Sequence[str]], AbstractContextManager[str]]] = {
    "nginx": nginx_proxy,
    "envoy": envoy_proxy,
}
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Place:
    """A proxy and the engines behind it, as base URLs."""

    proxy: str
    engines: Sequence[str]

    def behave(self, **behaviour: Any) -> None:
        """Let all engines answer in a certain way."""
        for url in self.engines:
            with posting(url, "/behaviour", json.dumps(behaviour)) as answer:
                assert answer.status == 200, answer.read()

    def counts(self, name: str) -> int:
        """The sum of a counter over all engines."""
        total = 0
        for url in self.engines:
            with posting(url, "/counts", "{}") as answer:
                total += json.load(answer)[name]
        return total


@contextlib.contextmanager
def posting(url: str, path: str, body: str | bytes) -> Iterator[http.client.HTTPResponse]:
    """Send a body and give the answer, whose connection is closed at the end."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


@pytest.fixture(scope="module", params=PROXIES)
def running(request: pytest.FixtureRequest) -> Iterator[Place]:
    with simulated_backends(2, "--digest") as engines, PROXIES[request.param](engines) as url:
        yield Place(url, engines)


@pytest.fixture
def place(running: Place) -> Place:
    running.behave(mode="answer", after=0, status=503, gap_ms=0, first_ms=0)
    return running


def stream(events: int) -> str:
    return json.dumps({"model": "simulated", "stream": True, "max_tokens": events, "messages": []})


def soon(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


@pytest.mark.parametrize("size", [0, 1_000, 220_000, 3_000_000])
def test_bodies_arrive_unchanged(place: Place, size: int) -> None:
    body = json.dumps({"model": "simulated", "messages": [], "padding": "0123456789" * (size // 10)}).encode()
    with posting(place.proxy, CHAT, body) as answer:
        assert answer.status == 200
        assert answer.headers["x-fovea-body-sha256"] == hashlib.sha256(body).hexdigest()
        assert json.load(answer)["choices"]


def test_every_engine_gets_requests(place: Place) -> None:
    names = set()
    for _ in range(8):
        with posting(place.proxy, CHAT, "{}") as answer:
            names.add(answer.headers["x-fovea-backend-id"])
    assert names == {"backend-0", "backend-1"}


def test_events_are_not_held_back(place: Place) -> None:
    """The engine stops after three events without an end. All three reach the client meanwhile."""
    place.behave(mode="stall", after=3)
    with posting(place.proxy, CHAT, stream(10)) as answer:
        lines = [answer.readline() for _ in range(6)]
    assert [line.startswith(b"data: ") for line in lines] == [True, False] * 3


def test_streams_arrive_completely(place: Place) -> None:
    with posting(place.proxy, CHAT, stream(500)) as answer:
        text = answer.read()
    assert text.count(b"data: ") == 501
    assert text.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_breaks_does_not_look_complete(place: Place) -> None:
    place.behave(mode="kill", after=3)
    with (
        posting(place.proxy, CHAT, stream(10)) as answer,
        pytest.raises((http.client.IncompleteRead, ConnectionResetError)),
    ):
        answer.read()


def test_an_engine_that_resets_connections_is_a_bad_gateway(place: Place) -> None:
    place.behave(mode="kill")
    with posting(place.proxy, CHAT, "{}") as answer:
        assert answer.status in (502, 503)


@pytest.mark.parametrize("status", [429, 503])
def test_refusals_are_passed_on(place: Place, status: int) -> None:
    place.behave(mode="refuse", status=status)
    with posting(place.proxy, CHAT, "{}") as answer:
        assert (answer.status, answer.headers["retry-after"]) == (status, "1")
        assert json.load(answer)["error"]["code"] == "unavailable"


def test_a_client_that_leaves_ends_its_stream_at_the_engine(place: Place) -> None:
    before = place.counts("cut")
    place.behave(gap_ms=20)
    with posting(place.proxy, CHAT, stream(100_000)) as answer:
        assert answer.readline().startswith(b"data: ")
    soon(lambda: place.counts("cut") == before + 1)
