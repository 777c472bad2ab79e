"""Hostile and broken backends: clients get a whole answer or an error, soon, and the gateway stays well."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.backends.watch import LONGEST_NAME, MOST_MODELS, Watch
from fovea.gateway.config import BackendConfig
from fovea.gateway.generate.ends import LONGEST_EVENT, EventStream
from fovea.gateway.metrics import Metrics
from fovea.gateway.settings import ResilienceSettings, TimeoutSettings
from fovea.gateway.usage.prices import MOST, Consumption, consumption_of
from tests.gateway.hostile import (
    ANSWER,
    EVENT,
    RawBackend,
    Write,
    answer,
    chunk,
    keys_file,
    running,
    sends,
    stream_head,
)

DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
QUICK = TimeoutSettings(connect_s=1, first_byte_s=1, idle_s=0.3, total_s=1)
SECRET = b"the-text-of-an-answer"


NO_ANSWERS = [
        b"", b"\r\n\r\n", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 1_000_000, b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{}", b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\n{}", b"HTTP/1.1 700 X\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 000 X\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 X\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 304 X\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, SECRET * 100,
        answer({"error": {"message": "Incorrect API key provided: sk-ab***"}}, 401),
        answer(ANSWER, 200, "content-encoding: gzip"), b"HTTP/1.1 200 OK\r\n\x00: a\r\n\r\n{}",
]  # fmt: skip


# The kind of the request matters only after the head of the answer.
@pytest.mark.parametrize(
    ("data", "stream"),
    [
        pytest.param(data, stream, marks=pytest.mark.slow if stream and number % 3 else [])
        for stream in (False, True)
        for number, data in enumerate(NO_ANSWERS)
    ],
)
async def test_what_is_no_answer_becomes_an_error(data: bytes, stream: bool, caplog: Any) -> None:
    """Whatever a backend sends instead of an answer: an error soon, and nothing of it in message or log."""
    caplog.set_level(logging.INFO, "fovea")
    async with (
        RawBackend(sends(data)).listening() as backend,
        running(backend, timeouts=QUICK) as gateway,
    ):
        got = await gateway.ask(stream=stream)
        assert got.status_code in (502, 503, 504, 408), (data[:60], got.text)
        assert got.json()["error"]["message"]
        for leaked in (SECRET.decode(), "sk-ab", "127.0.0.1", "169.254"):
            assert leaked not in got.text + caplog.text
        backend.behave = sends(answer())
        assert (await gateway.ask()).status_code == 200


async def test_headers_of_a_backend_do_not_replace_those_of_the_gateway() -> None:
    lies = [
        "x-fovea-backend: other", "x-fovea-cache: hit", "x-fovea-experiment: a=b", "x-fovea-fallback: a -> b",
        "x-fovea-model: gpt", "x-fovea-attempts: 9", "x-fovea-degraded: x", "x-fovea-route: y",
        "x-request-id: theirs", "set-cookie: a=b", "X-FOVEA-Cache: hit", f"x-fovea-long: {'a' * 20_000}",
        "x-fovea-ignored: seed",
    ]  # fmt: skip
    async with (
        RawBackend(sends(answer(ANSWER, 200, *lies))).listening() as backend,
        running(backend) as gateway,
    ):
        got = await gateway.ask()
    assert got.headers["x-fovea-backend"] == "b0"
    assert got.headers["x-fovea-model"] == "m"
    assert got.headers["x-fovea-route"] == "only"
    assert got.headers["x-request-id"] != "theirs"
    assert got.headers["x-fovea-ignored"] == "seed"
    assert got.headers["x-fovea-cache"] == "bypass"
    for name in ("experiment", "fallback", "attempts", "degraded", "long"):
        assert f"x-fovea-{name}" not in got.headers
    assert "set-cookie" not in got.headers


async def test_streams_that_go_wrong_end_with_an_error_event() -> None:
    head = stream_head()
    broken: list[tuple[bytes, ...]] = [
        (head, chunk(EVENT)), (head, chunk(EVENT), b"zz\r\n"), (head, chunk(EVENT), b"5\r\nab"),
        (head, chunk(EVENT), b"0\r\n\r\n"), (head, chunk(EVENT), chunk(b"data: " + b"[" * 50_000 + b"\n\n")),
        (head, chunk(EVENT), chunk(b'data: {"error": ' + b"[" * 50_000 + b"\n\n")),
        (head, chunk(EVENT), chunk(b'data: {"response": null, "x": {"usage":{}}}\n\n')),
        (head, chunk(EVENT), chunk(b"data: \xff\xfe\x00\n\n")),
    ]  # fmt: skip
    async with RawBackend().listening() as backend, running(backend, timeouts=QUICK) as gateway:
        for parts in broken:
            backend.behave = sends(*parts)
            got = await gateway.ask(stream=True)
            assert got.status_code in (200, 502)  # 502: the end arrived with the beginning
            last = got.text.strip().splitlines()[-1]
            assert "error" in json.loads(last.removeprefix("data: ")), (parts[2:], got.text[-300:])
            assert "[DONE]" not in got.text
            next(iter(gateway.gateway.services.fleet)).breakers["text"].succeed()
        assert not gateway.gateway.services.running


async def test_a_bad_chunk_in_an_open_connection_ends_with_idle_s() -> None:
    """aiohttp's reader waits for ever after a chunk that is not HTTP."""

    async def behave(write: Write, _: dict[str, Any]) -> None:
        await write(stream_head() + chunk(EVENT))
        await asyncio.sleep(0.1)
        await write(b"this is no chunk\r\n")
        await asyncio.sleep(30)

    async with RawBackend(behave).listening() as backend, running(backend, timeouts=QUICK) as gateway:
        got = await asyncio.wait_for(gateway.ask(stream=True), 10)
        assert '"error"' in got.text
        got = await asyncio.wait_for(gateway.ask(stream=False), 10)
        assert got.status_code in (408, 502, 504)


async def test_a_slow_drip_ends_with_total_s() -> None:
    """A byte now and then is no silence; the whole time of a request bounds it. The breaker stays closed."""

    async def behave(write: Write, _: dict[str, Any]) -> None:
        await write(stream_head())
        while True:
            await write(chunk(EVENT))
            await asyncio.sleep(0.05)

    times = TimeoutSettings(idle_s=1, total_s=0.6)
    async with RawBackend(behave).listening() as backend, running(backend, timeouts=times) as gateway:
        got = await asyncio.wait_for(gateway.ask(stream=True), 10)
        assert '"error"' in got.text
        assert next(iter(gateway.gateway.services.fleet)).breakers["text"].failures == 0


async def test_an_endless_line_is_bounded() -> None:
    """A stream without line ends is passed on in pieces: no more than one event's room is held."""
    stream = EventStream()
    piece, passed, held = b"x" * 65536, 0, 0
    for _ in range(100):
        held += len(piece)
        out = len(stream.feed(piece))
        passed, held = passed + out, held - out
        assert held <= LONGEST_EVENT + len(piece)
    assert passed >= 100 * 65536 - LONGEST_EVENT - len(piece)


async def test_a_huge_complete_answer_is_refused() -> None:
    async def behave(write: Write, _: dict[str, Any]) -> None:
        await write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        for _ in range(1 << 10):
            await write(b" " * (1 << 20))

    async with RawBackend(behave).listening() as backend, running(backend) as gateway:
        got = await gateway.ask()
        assert got.status_code == 502
        await asyncio.wait_for(backend.gone.wait(), 5)


async def test_a_compressed_stream_is_refused() -> None:
    data = stream_head("content-encoding: gzip") + chunk(gzip.compress(EVENT)) + DONE
    async with RawBackend(sends(data)).listening() as backend, running(backend) as gateway:
        assert (await gateway.ask(stream=True)).status_code == 502


@pytest.mark.parametrize("usage", [
    {"prompt_tokens": 10**30, "completion_tokens": 10**30}, {"prompt_tokens": -5, "completion_tokens": -5},
    {"prompt_tokens": "x"}, {"prompt_tokens": 1e300},
    {"prompt_tokens": 3, "prompt_tokens_details": [1]}, [], "x",
])  # fmt: skip
async def test_usage_that_cannot_be_true_harms_no_account(usage: Any, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, [("alice", "requests_per_minute = 2")])
    async with (
        RawBackend(sends(answer({**ANSWER, "usage": usage}))).listening() as backend,
        running(backend, keys_file=keys) as gateway,
    ):
        statuses = [(await gateway.ask(key="alice-key")).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert consumption_of({"prompt_tokens": MOST}, Consumption()).estimated


async def test_a_backend_cannot_list_models_without_end() -> None:
    fleet = Fleet(ResilienceSettings())
    fleet.update([BackendConfig("http://a:1", "a")], 0.0)
    backend = fleet.get("a")
    assert backend is not None
    names: list[Any] = [None, 5, "", "a\nb", "x" * (LONGEST_NAME + 1), *(f"m{n}" for n in range(5000))]

    async def get(url: str, key: str, timeout_s: float, /) -> tuple[int, bytes]:
        return 200, json.dumps({"data": [{"id": name} for name in names]}).encode()

    async def deep(url: str, key: str, timeout_s: float, /) -> tuple[int, bytes]:
        return 200, b"[" * 100_000

    def watch(getter: Any) -> Watch:
        return Watch(fleet, getter, ResilienceSettings(), lambda: 0.0, lambda: None, lambda one: None)

    await watch(get).check(backend)
    assert len(backend.models) == MOST_MODELS
    assert "m0" in backend.models
    await watch(deep).check(backend)
    assert len(backend.models) == MOST_MODELS


def test_metrics_are_bounded_and_forget_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.gateway.metrics.MOST_BACKENDS", 20)
    metrics = Metrics()
    for number in range(100):
        metrics.count("attempts", f"pod-{number}", "answered")
        metrics.observe("first_byte_seconds", 0.1, f"pod-{number}")
    text = metrics.exposition().body.decode()
    assert text.count("fovea_gateway_attempts_total{") == 20 + 1
    assert 'backend="other"' in text
    metrics.refresh = lambda into: into.set("backend_up", 1.0, "gone")
    assert 'backend_up{backend="gone"}' in metrics.exposition().body.decode()
    metrics.refresh = lambda into: into.set("backend_up", 1.0, "here")
    text = metrics.exposition().body.decode()
    assert 'backend="gone"' not in text
    assert 'backend_up{backend="here"}' in text


async def test_endless_answers_of_one_client_open_no_breaker() -> None:
    """A complete answer that takes too long is the request's doing, if others are answered meanwhile."""

    async def behave(write: Write, body: dict[str, Any]) -> None:
        if body["max_tokens"] > 1000:
            await asyncio.sleep(30)
        await write(answer())

    times = TimeoutSettings(total_s=0.5)
    async with RawBackend(behave).listening() as backend, running(backend, timeouts=times) as gateway:
        endless = [asyncio.create_task(gateway.ask(max_tokens=100_000)) for _ in range(6)]
        await asyncio.sleep(0.2)
        assert (await gateway.ask()).status_code == 200
        assert {got.status_code for got in await asyncio.gather(*endless)} <= {408, 502, 503, 504}
        assert (await gateway.ask()).status_code == 200
