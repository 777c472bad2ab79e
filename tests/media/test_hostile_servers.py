"""Servers that attack whoever downloads from them: each download ends, and the event loop turns meanwhile."""

from __future__ import annotations

import asyncio
import ssl

import h11
import pytest

from fovea.core.errors import InvalidImage
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.fetch.wire import WireTransport, _client_tls
from fovea.media.limits import MediaLimits
from tests.media.hostile import flood, heartbeat
from tests.media.internet import PNG, Internet, fails
from tests.media.web import Answer, serve

LIMITS = MediaLimits(allow_private_hosts=True, max_bytes=1 << 20, fetch_timeout_s=60)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(PNG), PNG)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the events that are read from a connection. The list holds one number."""
    count = [0]
    next_event = h11.Connection.next_event

    def counting(self: h11.Connection) -> object:
        count[0] += 1
        return next_event(self)

    monkeypatch.setattr(h11.Connection, "next_event", counting)
    return count


@pytest.mark.parametrize(
    ("head", "unit", "fragment"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "sends more than 16 informational responses"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", "informational responses"),
        (OK, b"a: b\r\n", "sends more than 32768 bytes before the body"),
        (OK + b"a: ", b"b", "sends more than 32768 bytes before the body"),
        (OK, b" folded\r\n", "sends more than 32768 bytes before the body"),
        (b"", b"<html>old as the web</html>", "sends more than 32768 bytes before the body"),
        (b"", b"<html>\n", "sends more than 32768 bytes before the body"),
        (b"", b"\0", "failed (RemoteProtocolError)"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", b"x", "failed (RemoteProtocolError)"),
        (OK + b"a:\r\n" * 201 + b"\r\n", b"x", "sends 201 headers; accepted: 200"),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", b"x", "failed (RemoteProtocolError)"),
        (OK + b"Transfer-Encoding: gzip\r\n\r\n", b"x", "failed (RemoteProtocolError)"),
        (CHUNKED, b"1\r\nx\r\n", "parts of few bytes each"),
        (CHUNKED, b"1;" + b"x" * 20_000 + b"\r\nx\r\n", "sends more framing than data"),
        (CHUNKED + b"0\r\n", b"a: b\r\n", "failed (RemoteProtocolError)"),
        (CHUNKED + b"0\r\na: ", b"b", "failed (RemoteProtocolError)"),
        (CHUNKED, b"fffffffffffffffff", "failed (RemoteProtocolError)"),
        (CHUNKED + b"ffffffffffffffff\r\n", b"x", "sends more; accepted: at most 1048576 bytes"),
        (OK + b"\r\n" + PNG, b"x", "sends more; accepted: at most 1048576 bytes"),
        (b"HTTP/1.1 302 Found\r\nLocation: /" + b"a" * 20_000 + b"\r\n\r\n", b"x", "of 20001 characters"),
    ],
    ids=range(20),
)
async def test_a_flood_ends_and_starves_nobody(head: bytes, unit: bytes, fragment: str) -> None:
    """A server that sent 100 Continue without end took the event loop for itself until the timeout."""
    with flood(head, unit) as server:
        async with heartbeat() as beat:
            error = await fails(Fetcher(LIMITS), server.url(), InvalidImage, fragment)
        assert await asyncio.to_thread(server.closed.wait, 30)  # the connection is closed
    assert beat.ticks > 1
    assert error.code in ("image_fetch_failed", "image_too_large")


@pytest.mark.parametrize("unit", [b"HTTP/1.1 100 \r\n\r\n", b"1\r\nx\r\n"])
async def test_few_events_are_read_in_one_turn_of_the_loop(
    unit: bytes, events: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB hold 3,800 informational responses or 10,900 chunks. They were all read in one turn."""
    head = CHUNKED if unit.startswith(b"1") else b""
    with flood(head, unit) as server:
        async with heartbeat() as beat:
            count = h11.Connection.next_event

            def step(self: h11.Connection) -> object:
                beat.step()
                return count(self)

            monkeypatch.setattr(h11.Connection, "next_event", step)
            await fails(Fetcher(LIMITS), server.url(), InvalidImage)
    assert beat.most <= 70
    assert events[0] < 5000


@pytest.mark.parametrize(
    ("head", "fragment"),
    [
        (b"", "did not arrive within 0.3 s"),
        (OK, "did not arrive within 0.3 s"),
        (OK + b"Content-Length: 100\r\n\r\n" + PNG[:50], "did not arrive within 0.3 s"),
        (CHUNKED, "did not arrive within 0.3 s"),
        (CHUNKED + b"0\r\n", "did not arrive within 0.3 s"),
    ],
)
async def test_silence_ends_with_the_timeout(head: bytes, fragment: str) -> None:
    limits = MediaLimits(allow_private_hosts=True, fetch_timeout_s=0.3)
    with flood(head) as server:
        await fails(Fetcher(limits), server.url(), InvalidImage, fragment)
        assert await asyncio.to_thread(server.closed.wait, 30)


async def test_a_slow_head_ends_with_the_timeout() -> None:
    """One byte at a time keeps every single read short. The timeout is for the whole download."""
    limits = MediaLimits(allow_private_hosts=True, fetch_timeout_s=0.3)
    with flood(OK + b"a: ", b"b", pause_s=0.02) as server:
        await fails(Fetcher(limits), server.url(), InvalidImage, "did not arrive within 0.3 s")
        assert await asyncio.to_thread(server.closed.wait, 30)
    assert server.sent < 1000


@pytest.mark.parametrize(
    ("unit", "fragment"),
    [
        (b"", "did not answer in time"),
        (b"\x16\x03\x03\x00\x04\x00\x00\x00\x00", ""),  # requests to begin the handshake again
        (b"\x15\x03\x03\x00\x02\x01\x00", ""),  # warnings
        (b"\x16\x03\x03\x3f\xff\x0b\xff\xff\xff" + bytes(0x3FFC), ""),  # one certificate without end
        (b"\x14\x03\x03\x00\x01\x01", ""),
        (b"no TLS at all", "failed (ConnectError)"),
    ],
)
async def test_a_handshake_without_end(unit: bytes, fragment: str) -> None:
    """A TLS handshake is not part of the response, and has a timeout of its own."""
    limits = MediaLimits(allow_private_hosts=True, connect_timeout_s=0.3, fetch_timeout_s=60)
    net = Internet({"images.example": ["127.0.0.1"]})
    with flood(b"", unit) as server:
        async with heartbeat() as beat:
            fetcher = Fetcher(limits, resolve=net.resolve, transport=WireTransport())
            await fails(fetcher, f"https://images.example:{server.port}/", InvalidImage, fragment)
        assert await asyncio.to_thread(server.closed.wait, 30)
    assert beat.ticks > 1


def test_tls_offers_no_key_exchange_whose_cost_the_server_chooses() -> None:
    """In DHE the server chooses the modulus, of up to 10,000 bits, and the client calculates with it."""
    context = _client_tls()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.options & ssl.OP_NO_RENEGOTIATION
    names = [cipher["name"] for cipher in context.get_ciphers()]
    assert names
    assert all(name.startswith(("ECDHE-", "TLS_")) for name in names)


async def test_ordinary_informational_responses_are_skipped() -> None:
    response = OK + b"Content-Length: %d\r\n\r\n" % len(PNG) + PNG
    with flood(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3 + response) as server:
        assert await Fetcher(LIMITS).fetch(server.url()) == PNG


@pytest.mark.parametrize("step", [1, 300, 4096])
async def test_a_large_body_in_small_pieces_is_accepted(step: int) -> None:
    body = PNG + bytes(3900 if step == 1 else 1_000_000)
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[at : at + step]), body[at : at + step])
        for at in range(0, len(body), step)
    )
    answer = Answer(chunks + b"0\r\nTrailer: x\r\n\r\n", headers=("Transfer-Encoding: chunked",), length=-1)
    async with serve({"/": answer}) as web:
        assert await Fetcher(LIMITS).fetch(web.url("/")) == body
