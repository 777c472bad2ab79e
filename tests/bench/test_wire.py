"""Connections of the load generator: what it sends, how it names each way in which a connection fails."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fovea.bench import client as wire
from fovea.bench.client import Client
from fovea.bench.measure import BenchRequest, Failure, Sample
from fovea.bench.settings import Target
from fovea.core.errors import Unavailable
from tests.bench.support import Scripted, scripted

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
REQUEST = BenchRequest(({"role": "user", "content": "hello"},), 5)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
LAST = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = CHUNKED + chunk(PIECE) + chunk(LAST) + chunk(b"")


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Listen on a free port, and run `serve` for each connection. Yields HOST:PORT."""
    tasks: list[asyncio.Task[None]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(
        lambda reader, writer: tasks.append(asyncio.create_task(connected(reader, writer))), "127.0.0.1", 0
    )
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def raw_server(answer: Answer) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers each request by `answer`. Yields its URL and the heads of the requests."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await answer(await reader.readexactly(int(length or 0)), writer)

    async with listening(serve) as address:
        yield f"http://{address}", heads


def fixed(data: bytes, *, end: str = "") -> Answer:
    """Answer with fixed bytes. end: "close" or "reset" the connection then; "": keep it open."""

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if end == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if end:
            writer.close()

    return answer


async def failure_of(answer: Answer) -> Failure | None:
    async with raw_server(answer) as (url, _), Client(Target(url, model="m")) as client:
        return (await client.send(REQUEST)).failure


BROKEN_OFF = "peer closed connection without sending complete message body"
NO_ANSWER = "Server disconnected without sending a response."


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (fixed(b"", end="close"), NO_ANSWER),
        (fixed(b"HTTP/1.1 200 OK\r\nContent-Ty", end="close"), NO_ANSWER),
        (fixed(b"", end="reset"), "Connection reset by peer"),
        (fixed(CHUNKED + chunk(PIECE) + b"50\r\nda", end="close"), BROKEN_OFF),
        (fixed(CHUNKED + chunk(PIECE), end="close"), BROKEN_OFF),
        (fixed(HEAD + b"Content-Length: 5000\r\n\r\n" + PIECE, end="close"), BROKEN_OFF),
        (fixed(b"SSH-2.0-OpenSSH\r\n"), "the answer is not HTTP: Bad status line"),
        (fixed(b"HTTP/1.1 200 OK\r\nno header\r\n\r\n"), "the answer is not HTTP: Invalid header"),
        (
            fixed(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"),
            "the answer cannot be decoded: ",
        ),
    ],
)
async def test_connections_that_break_off(answer: Answer, text: str) -> None:
    failure = await failure_of(answer)
    assert failure is not None
    assert failure.kind == "broken stream"
    assert failure.text.startswith(text)


async def test_reset_within_the_answer_and_a_chunk_that_is_no_http() -> None:
    """The server waits until the client has read the first piece, so that the rest is another read."""
    for rest in (b"", b"zz\r\n"):
        seen = asyncio.Event()

        async def answer(
            _: bytes, writer: asyncio.StreamWriter, rest: bytes = rest, seen: asyncio.Event = seen
        ) -> None:
            await fixed(CHUNKED + chunk(PIECE))(b"", writer)
            await seen.wait()
            await fixed(rest, end="" if rest else "reset")(b"", writer)

        def on_progress(sample: Sample, seen: asyncio.Event = seen) -> bool:
            seen.set()
            return False

        async with raw_server(answer) as (url, _), Client(Target(url, model="m")) as client:
            sample = await client.send(REQUEST, on_progress=on_progress)
        assert len(sample.events) == 1
        assert sample.failure is not None
        assert sample.failure.kind == "broken stream"
        assert sample.failure.text == ("a chunk of the answer is not HTTP" if rest else BROKEN_OFF)


async def test_whole_answer_with_a_chunk_that_is_no_http() -> None:
    async with raw_server(fixed(CHUNKED + b"zz\r\n")) as (url, _), Client(Target(url)) as client:
        with pytest.raises(Unavailable, match="is not HTTP"):
            await client.connect()


async def test_tls_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def be_silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    monkeypatch.setattr(wire, "CONNECT_S", 0.05)
    for serve, text in ((refuse, "[SSL: "), (be_silent, "no connection within 0.05 s")):
        async with listening(serve) as address, Client(Target(f"https://{address}", model="m")) as client:
            failure = (await client.send(REQUEST)).failure
        assert failure is not None
        assert failure.kind == "unreachable"
        assert failure.text.startswith(text)


async def test_unknown_host_and_closed_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
        for url, text in ((closed, "Connection refused"), ("http://1.2.3.4.5.6", "not a canonical IPv4")):
            async with Client(Target(url, model="m")) as client:
                failure = (await client.send(REQUEST)).failure
            assert failure is not None
            assert failure.kind == "unreachable"
            assert text in failure.text


async def test_connection_is_reused_without_cookies_compression_or_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    connections: set[object] = set()

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        await fixed(STREAM.replace(b"\r\n", b"\r\nSet-Cookie: a=b\r\n", 1))(b"", writer)

    async with raw_server(answer) as (url, heads), Client(Target(url, model="m", api_key="k")) as client:
        assert [(await client.send(REQUEST)).failure for _ in range(3)] == [None, None, None]
    assert len(connections) == 1
    for head in heads:
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
        assert b"Accept-Encoding: identity" in lines
        assert b"Authorization: Bearer k" in lines
        assert b"Content-Type: application/json" in lines
        assert not any(line.lower().startswith(b"cookie") for line in lines)


async def test_compressed_stream_is_read_and_a_redirection_is_not_followed() -> None:
    body = gzip.compress(PIECE + LAST)
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert await failure_of(fixed(head + body)) is None
    moved = await failure_of(
        fixed(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /else\r\nContent-Length: 0\r\n\r\n")
    )
    assert moved == Failure("http 307", "no further message")


async def test_long_header_lines_are_read() -> None:
    head = STREAM.replace(b"\r\n", b"\r\nX-Long: " + b"a" * 20_000 + b"\r\n", 1)
    assert await failure_of(fixed(head)) is None


@pytest.mark.parametrize("size", [10, wire.LARGE_BODY, 5 * wire.LARGE_BODY])
async def test_bodies_of_any_size_arrive_whole(size: int) -> None:
    text = "ä\U0001f600" + "x" * size
    script = Scripted()
    with scripted(script):
        async with Client(Target(script.url, model="m")) as client:
            sample = await client.send(BenchRequest(({"role": "user", "content": text},), 5))
    assert sample.failure is None
    assert script.bodies[0]["messages"] == [{"role": "user", "content": text}]


def test_body_with_half_a_surrogate_pair() -> None:
    body = wire.json_body({"a": "\ud83d!"})
    assert isinstance(body, bytes)
    assert json.loads(body) == {"a": "?!"}


async def test_events_in_any_cut_of_the_stream() -> None:
    """The events are the same whether the server sends chunks of whole events or of single bytes."""
    stream = PIECE * 3 + LAST
    for size in (1, 7, len(stream)):
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        data = CHUNKED + b"".join(map(chunk, pieces)) + chunk(b"")
        async with raw_server(fixed(data)) as (url, _), Client(Target(url, model="m")) as client:
            sample = await client.send(REQUEST)
        assert sample.failure is None
        assert (sample.text_pieces, sample.finish_reason) == (["a"] * 3, "stop")
