"""The fault proxy on real sockets: every kind of fault takes effect, and bytes are otherwise as they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.client import Outcome, send
from tests.chaos.plan import FLIPPED, KINDS, Window, plan
from tests.chaos.proxy import FaultProxy

SEED = 5
PATIENCE_S = 10.0
BODY = bytes(range(32, 127)) * 60


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[FaultProxy, list[bytes]]]:
    """A proxy in front of a server that answers each request with its body; the list has what arrived."""
    received: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            received.append(await reader.readexactly(length))
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n".encode() + received[-1])
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            received.append(b"cut")
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = FaultProxy("127.0.0.1", server.sockets[0].getsockname()[1], SEED)
    await proxy.start()
    try:
        yield proxy, received
    finally:
        await proxy.stop()
        server.close()


async def ask(proxy: FaultProxy, timeout_s: float = PATIENCE_S) -> Outcome:
    return await send(proxy.port, "POST", "/", {}, BODY, timeout_s)


async def first_with_fault(proxy: FaultProxy, direction: str, timeout_s: float = PATIENCE_S) -> Outcome:
    """Skip connections until the plan gives one a fault of this direction, then ask with that connection."""
    window = proxy.window
    proxy.window = None
    number = 1
    while (fault := plan(SEED, number, window)) is None or fault.direction != direction:
        assert (await ask(proxy)).ending == "complete"
        number += 1
    proxy.window = window
    return await ask(proxy, timeout_s)


async def test_without_a_window_bytes_pass_unchanged() -> None:
    async with proxied() as (proxy, received):
        outcome = await ask(proxy)
        assert (outcome.ending, outcome.status, outcome.body) == ("complete", 200, BODY)
        assert received == [BODY]
        assert proxy.connections[outcome.peer].injected == set()


@pytest.mark.parametrize("kind", ["latency", "slices", "bandwidth"])
async def test_slow_connections_lose_nothing(kind: str) -> None:
    async with proxied() as (proxy, received):
        proxy.window = Window(1, kind)
        outcome = await first_with_fault(proxy, "response")
        assert (outcome.ending, outcome.body) == ("complete", BODY)
        assert proxy.connections[outcome.peer].injected == {kind}


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("kind", ["reset", "close"])
async def test_connections_are_ended_in_the_middle(kind: str, direction: str) -> None:
    async with proxied() as (proxy, received):
        proxy.window = Window(1, kind)
        outcome = await first_with_fault(proxy, direction)
        assert outcome.ending == "cut"
        assert proxy.counts == {kind: 1}
        if direction == "response":
            assert received[-1] == BODY


@pytest.mark.parametrize("kind", ["silent", "one-way"])
async def test_half_open_connections_say_nothing_until_the_client_leaves(kind: str) -> None:
    async with proxied() as (proxy, received):
        proxy.window = Window(1, kind)
        outcome = await first_with_fault(proxy, "request", timeout_s=0.2)
        assert outcome.ending == "timeout"
        assert outcome.body == b""
        assert proxy.counts == {kind: 1}


@pytest.mark.parametrize("kind", ["silent", "one-way"])
async def test_stopped_connections_are_reset_at_the_end_of_the_window(kind: str) -> None:
    """If they went on, bytes would be missing in the middle, which no network does."""
    async with proxied() as (proxy, received):
        proxy.window = Window(1, kind)

        async def end_of_window() -> None:
            while not proxy.counts:
                await asyncio.sleep(0.01)
            proxy.window = None

        ending = asyncio.create_task(end_of_window())
        outcome = await first_with_fault(proxy, "request")
        await ending
        assert outcome.ending == "cut"
        assert (await ask(proxy)).ending == "complete"


@pytest.mark.parametrize("direction", ["request", "response"])
async def test_one_byte_of_a_body_is_damaged(direction: str) -> None:
    async with proxied() as (proxy, received):
        proxy.window = Window(1, f"flip-{direction}")
        outcome = await first_with_fault(proxy, direction)
        damaged = received[-1] if direction == "request" else outcome.body
        assert (outcome.ending, len(damaged)) == ("complete", len(BODY))
        places = [place for place, byte in enumerate(damaged) if byte != BODY[place]]
        assert [damaged[place] for place in places] == [FLIPPED]
        assert len(places) == 1
        with pytest.raises(UnicodeDecodeError):
            damaged.decode()


def test_every_kind_is_tested() -> None:
    flips = {"flip-request", "flip-response"}
    assert set(KINDS) == {"latency", "slices", "bandwidth", "reset", "close", "silent", "one-way"} | flips
