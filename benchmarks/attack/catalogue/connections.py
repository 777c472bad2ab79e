"""Attacks with connections, headers and framing. None of them needs a key."""

from __future__ import annotations

import asyncio

from serving import ATTACKER_KEY, Setup
from wire import Battle, request

from catalogue.base import Attack

CROWD = 2000
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


async def endless_trailers(battle: Battle) -> None:
    head = request("/v1/chat/completions", key="", headers=CHUNKED)
    await battle.hold(8, head + b"2\r\n{}\r\n0\r\n", b"X-Trailer: aaaaaaaa\r\n" * 4000, pause=0.01)


async def endless_extensions(battle: Battle) -> None:
    head = request("/v1/chat/completions", key="", headers=CHUNKED)
    await battle.hold(8, head + b"2;", b"extension=aaaaaaaa;" * 4000, pause=0.01)


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
    """Try keys: 5,000 of them, or as many as the time allows."""

    async def guess(number: int) -> None:
        if number < 5000:
            await battle.ask(request("/v1/chat/completions", b"{}", key=f"guess-{number}"))
        else:
            await battle.ask(request("/v1/models", method="GET", key=f"guess-{number}"))

    await battle.crowd(10, guess)


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
    Attack("trailers", "no key", "8 chunked bodies end with trailers that never end", endless_trailers),
    Attack(
        "chunk-extensions",
        "no key",
        "8 chunked bodies have a chunk extension that never ends",
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
    Attack("wrong-keys", "no key", "10 clients guess API keys, as fast as they can", wrong_keys),
]
