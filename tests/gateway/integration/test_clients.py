"""Clients that leave, read slowly, write slowly, or send what is not a request."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from fovea.gateway.settings import RouteSettings, TimeoutSettings
from tests.gateway.support import CHAT, PATIENCE_S, FakeEngine, Plan, Running, chat, running, soon, words

MIB = 1024 * 1024
JSON = {"content-type": "application/json"}


async def raw(gateway: Running, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send some bytes."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=64 * 1024)
    writer.write(data)
    await writer.drain()
    return reader, writer


def request(body: Any, *, length: int | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a chat request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(data) if length is None else length
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {size}",
    ]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def nothing_is_outstanding(gateway: Running, engine: FakeEngine) -> bool:
    shown = await gateway.backend(engine.name)
    services = gateway.gateway.services
    queued = await gateway.metric("queued")
    busy = await gateway.metric("backend_requests") + await gateway.metric("backend_tokens")
    state = (shown["requests"], shown["text_tokens"], shown["visual_tokens"], queued, busy)
    running_turns = sum(queue.queue.running for _, queue in services.queues)
    return not any(state) and not services.running and not running_turns


@pytest.mark.parametrize(
    "plan",
    [Plan(wait_s=math.inf), Plan(end="stall"), Plan(events=10**6, gap_s=0.01)],
    ids=["before the first byte", "in a silence", "in a stream"],
)
async def test_a_client_that_leaves_ends_its_request_at_the_backend(plan: Plan) -> None:
    async with FakeEngine(plan=plan) as engine, running(engine) as gateway:
        for stream in (True, False) if math.isinf(plan.wait_s) else (True,):
            before = engine.cut
            reader, writer = await raw(gateway, request(chat(stream=stream)))
            await soon(lambda seen=before: len(engine.received) > seen)
            if not math.isinf(plan.wait_s):
                await reader.readuntil(b"data: ")
            writer.transport.abort()
            await soon(lambda seen=before: engine.cut == seen + 1)
        await soon(lambda: nothing_is_outstanding(gateway, engine))
        assert await gateway.metric("requests_total", status="499") == engine.cut
        # No breaker counts it, and the next request is served.
        engine.plan = Plan()
        assert (await gateway.ask()).status_code == 200
        assert (await gateway.backend(engine.name))["breakers"]["text"] == "closed"
        assert await gateway.metric("attempts_total", outcome="broken") == 0


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    route = RouteSettings(requests_per_backend=1)
    async with FakeEngine(plan=Plan(wait_s=math.inf)) as engine, running(engine, route=route) as gateway:
        _, first = await raw(gateway, request(chat()))
        await soon(lambda: engine.received)
        _, second = await raw(gateway, request(chat("second")))
        await soon(lambda: _queued(gateway, 1))
        second.transport.abort()
        await soon(lambda: _queued(gateway, 0))
        assert len(engine.received) == 1
        first.transport.abort()
        await soon(lambda: nothing_is_outstanding(gateway, engine))


async def _queued(gateway: Running, count: int) -> bool:
    return await gateway.metric("queued") == count


@pytest.mark.parametrize("clients", [15, pytest.param(200, marks=pytest.mark.slow)])
async def test_clients_that_read_slowly_do_not_disturb_others_and_take_little_memory(clients: int) -> None:
    """Many clients read nothing of endless streams. The engine has to wait, and the memory stays bounded."""
    plan = Plan(events=10**6)
    async with FakeEngine(plan=plan) as engine, running(engine) as gateway:
        engine.name = "x" * 60_000  # long events fill the sockets soon
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        writers = [
            (await raw(gateway, request(chat(str(number), stream=True))))[1] for number in range(clients)
        ]
        for writer in writers:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        await soon(lambda: len(engine.received) == clients)
        engine.plan = Plan(events=2)
        for number in range(20):
            answer = await gateway.ask(f"other {number}")
            assert answer.status_code == 200
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
        assert grown < 64 + 2 * clients, "MiB, with the buffers of engine and clients in this process"
        for writer in writers:
            writer.transport.abort()
        await soon(lambda: engine.cut == clients)
        await soon(lambda: not gateway.gateway.services.running)


async def test_a_client_that_reads_nothing_is_disconnected_after_write_timeout_s() -> None:
    async with (
        FakeEngine(plan=Plan(events=10**6)) as engine,
        running(engine, http={"write_timeout_s": 0.5}) as gateway,
    ):
        engine.name = "x" * 60_000
        _, writer = await raw(gateway, request(chat(stream=True)))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await soon(lambda: engine.cut == 1)
        assert await gateway.metric("connection_timeouts_total") == 1
        writer.transport.abort()


async def test_a_pause_of_the_client_is_not_a_silence_of_the_backend() -> None:
    """The client reads nothing for longer than idle_s, then all the rest."""
    times = TimeoutSettings(idle_s=0.3)
    async with (
        FakeEngine("x" * 60_000, plan=Plan(events=300)) as engine,
        running(engine, timeouts=times) as gateway,
    ):
        reader, writer = await raw(gateway, request(chat(stream=True)))
        await reader.readuntil(b"data: ")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        end = b""
        while not end.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 20)
            assert data, "the stream was cut"
            end = (end + data)[-4096:]
        assert b"[DONE]" in end
        writer.close()


async def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    async with FakeEngine("x" * 60_000, plan=Plan(events=10**6)) as engine, asyncio.timeout(PATIENCE_S):
        async with running(engine, drain_seconds=0.2) as gateway:
            _, writer = await raw(gateway, request(chat(stream=True)))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await soon(lambda: engine.received)
        await soon(lambda: engine.cut == 1)
        writer.transport.abort()


async def test_a_body_that_arrives_slowly_is_answered_and_one_that_stops_is_refused() -> None:
    data = json.dumps(chat("slow")).encode()
    async with FakeEngine() as engine, running(engine, http={"body_timeout_s": 0.6}) as gateway:
        reader, writer = await raw(gateway, request(data[:1], length=len(data)))
        for at in range(1, len(data), 16):
            writer.write(data[at : at + 16])
            await asyncio.sleep(0.01)
        assert b" 200 " in await reader.readline()
        writer.close()
        reader, writer = await raw(gateway, request(data[:20], length=len(data)))
        assert b" 408 " in await reader.readline()
        writer.close()
        await soon(lambda: not gateway.gateway.services.running)
        assert gateway.gateway.services.bodies.held == 0
    assert len(engine.received) == 1


async def test_bodies_that_are_no_request_are_refused_by_name() -> None:
    async with FakeEngine() as engine, running(engine) as gateway:
        post = gateway.client.post

        reader, writer = await raw(gateway, request(b"{", length=70 * MIB))
        assert b" 413 " in await reader.readline()  # before any of it was sent
        writer.close()
        assert b" 413 " in await asyncio.to_thread(_send_too_much, gateway.url)
        packed = await post(CHAT, content=b"\x1f\x8b", headers={**JSON, "content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["error"]["code"]) == (415, "unsupported_encoding")
        for content in (
            b"",
            b"{",
            b"[]",
            b'"x"',
            b"\xff",
            b'{"a":' * 5000,
            b"1e999999",
            b'{"n":' + b"9" * 5000 + b"}",
        ):
            answer = await post(CHAT, content=content, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), content[:20]
        form = await post(CHAT, data={"model": "m"})
        assert form.status_code == 400
        unknown = await gateway.ask(model="other")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert not gateway.gateway.services.running
    assert not engine.received


def _send_too_much(url: str) -> bytes:
    """Send a body of 65 MiB that does not tell its length, and return the beginning of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
        sock.sendall(request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked"))
        for part in (b'{"model": "', *[b"x" * MIB] * 65):
            sock.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        return sock.recv(64)


ODD: list[Any] = [None, 5, "text", [], {}, [None], [5], [[]], ["text"], {"url": 5}, True, -1, 1e308]
FIELDS = {
    CHAT: ("model", "messages", "stream", "stream_options", "max_tokens", "n", "user", "tools"),
    "/v1/messages": ("model", "messages", "system", "max_tokens", "tools", "stream", "tool_choice"),
    "/v1/responses": ("model", "input", "instructions", "tools", "max_output_tokens", "text", "stream"),
    "/v1/completions": ("model", "prompt", "max_tokens", "n", "stream"),
}


@pytest.mark.parametrize("path", FIELDS)
async def test_a_field_of_any_form_is_answered_or_refused_and_never_a_defect(path: str) -> None:
    async with FakeEngine() as engine, running(engine) as gateway:
        for name in FIELDS[path]:
            for value in ODD:
                body = {
                    "model": "m",
                    "max_tokens": 5,
                    "messages": [{"role": "user", "content": "x"}],
                    name: value,
                }
                answer = await gateway.client.post(path, json=body)
                assert answer.status_code < 500, (name, value, answer.text)
        for content in ODD:
            for part in (
                content,
                [content],
                [{"type": "image_url", "image_url": content}],
                [{"type": content}],
            ):
                body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": part}]}
                body["input"] = body["messages"]
                answer = await gateway.client.post(path, json=body)
                assert answer.status_code < 500, (part, answer.text)
        await soon(lambda: nothing_is_outstanding(gateway, engine))


async def test_an_x_request_id_cannot_bring_headers_of_its_own() -> None:
    async with FakeEngine() as engine, running(engine) as gateway:
        good = await gateway.ask(headers={"x-request-id": "trace-1.2:3_4"})
        assert good.headers["x-request-id"] == "trace-1.2:3_4"
        assert engine.received[-1].headers["x-request-id"] == "trace-1.2:3_4"
        for bad in ("a b", "a\tset-cookie: b", "<script>", "x" * 129, '"'):
            answer = await gateway.ask(headers={"x-request-id": bad})
            assert answer.status_code == 200
            assert answer.headers["x-request-id"].startswith("req_")
            assert "set-cookie" not in answer.headers
            assert engine.received[-1].headers["x-request-id"] == answer.headers["x-request-id"]
        broken = {"x-request-id": "a\r\nset-cookie: b=c"}
        reader, writer = await raw(gateway, request(chat(), headers=broken))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"set-cookie" not in head.lower()
        writer.close()


async def test_an_engine_cannot_bring_headers_of_its_own() -> None:
    plan = Plan(headers={"x-fovea-images": "a", "set-cookie": "b=c", "x-fovea-backend": "forged"})
    async with FakeEngine("real", plan=plan) as engine, running(engine) as gateway:
        answer = await gateway.ask()
    assert answer.headers["x-fovea-backend"] == "real"
    assert "set-cookie" not in answer.headers


async def test_unknown_routes_and_methods_are_refused() -> None:
    async with FakeEngine() as engine, running(engine) as gateway:
        send = gateway.client.request
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", CHAT, 405),
            ("OPTIONS", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("PUT", "/health", 405),
            ("GET", "/v1/models/none", 404),
            ("GET", "/admin/none", 404),
            ("POST", "/admin/backends/none/drain", 404),
            ("GET", "/v1/models/m", 200),
            ("GET", "//v1/models", 404),
        ):
            answer = await send(method, path)
            assert answer.status_code == status, (method, path, answer.text)
            if status != 200:
                assert answer.json()["error"]["message"]
        for path in ("/health", "/ready", "/v1/models"):
            full, head = await send("GET", path), await send("HEAD", path)
            assert (full.status_code, head.status_code, head.content) == (200, 200, b"")
    assert not engine.received


async def test_text_of_any_kind_arrives_as_it_was_sent() -> None:
    """Also escapes, lone surrogates and the placeholders that the gateway uses inside."""
    texts = ["Köln 🌞 \u0000 \ud83d", "x" * 300 + '\\"\n', '"' * 500, "\ud83d" * 300, "f" * 32 + ":0"]
    async with FakeEngine() as engine, running(engine) as gateway:
        for text in texts:
            body = json.dumps(chat(text)).encode()
            answer = await gateway.client.post(CHAT, content=body, headers=JSON)
            assert answer.status_code == 200, answer.text
            assert engine.received[-1].json["messages"][0]["content"] == text
        answer = await gateway.ask(stream=True)
        assert words(answer.text) == ["a", "a", "a"]
