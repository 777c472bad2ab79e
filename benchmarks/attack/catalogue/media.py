"""Attacks with pictures, videos and hostile origins. All of them need a key."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import bombs
from origin import Origin
from serving import Setup
from wire import Battle, chat, images

from catalogue.base import Attack

MIB = 1 << 20
PRIVATE = Setup(flags=("--allow-private-hosts", "true"))
RESOLVER = "127.0.77.53"


def _video() -> bytes:
    url = bombs.data_url(bombs.video(), "video/webm")
    sampling = {"fps": 0.02, "min_frames": 4, "max_frames": 8, "max_pixels": 65536}
    return chat(
        [{"type": "video_url", "video_url": {"url": url, **sampling}}, {"type": "text", "text": "What?"}]
    )


async def video(battle: Battle) -> None:
    await battle.crowd(8, lambda _: battle.ask(battle.payload))


async def pixels(battle: Battle) -> None:
    """Send 4 pictures of 50 megapixels per request, 40 requests at once. All pictures differ."""

    async def act(number: int) -> None:
        urls = [bombs.data_url(bombs.black_png(4 * number + place), "image/png") for place in range(4)]
        await battle.ask(images(urls))

    await battle.crowd(40, act)


async def fill_bytes(battle: Battle) -> None:
    """Send 16 JPEGs per request that together nearly fill the largest body, all of fill bytes."""
    size = 60 * MIB * 3 // 4 // 16

    async def act(number: int) -> None:
        urls = [
            bombs.data_url(bombs.filled_jpeg(16 * number + place, size), "image/jpeg") for place in range(16)
        ]
        await battle.ask(images(urls))

    await battle.crowd(3, act)


async def fill_bytes_remote(battle: Battle) -> None:
    async with Origin() as origin:

        async def act(number: int) -> None:
            await battle.ask(images([origin.url("fill", 16 * number + place) for place in range(16)]))

        await battle.crowd(3, act)


async def hostile_origin(battle: Battle) -> None:
    async with Origin() as origin:

        async def act(number: int) -> None:
            kind = ("continue", "headers", "drip", "silent")[number % 4]
            await battle.ask(images([origin.url(kind, 4 * number + place) for place in range(4)]))

        await battle.crowd(40, act)


async def scans(battle: Battle) -> None:
    async def act(number: int) -> None:
        urls = [
            bombs.data_url(_numbered(battle.payload, 8 * number + place), "image/jpeg") for place in range(8)
        ]
        await battle.ask(images(urls))

    await battle.crowd(8, act)


def _numbered(jpeg: bytes, number: int) -> bytes:
    """The picture with another number in its comment."""
    return jpeg[:6] + b"%08d" % number + jpeg[14:]


async def mutants(battle: Battle) -> None:
    async def act(number: int) -> None:
        data, media_type = battle.payload[number % len(battle.payload)]
        await battle.ask(images([bombs.data_url(data, media_type)]))

    await battle.crowd(4, act)


async def video_mutants(battle: Battle) -> None:
    async def act(number: int) -> None:
        data, media_type = battle.payload[number % len(battle.payload)]
        part = {"type": "video_url", "video_url": {"url": bombs.data_url(data, media_type)}}
        await battle.ask(chat([part, {"type": "text", "text": "What?"}]))

    await battle.crowd(4, act)


async def hanging_names(battle: Battle) -> None:
    """Name a new host in every picture; the only DNS server never answers."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as resolver:
        resolver.bind((RESOLVER, 53))

        async def act(number: int) -> None:
            await battle.ask(
                images([f"http://host-{number}-{place}.example.com/a.png" for place in range(4)])
            )

        await battle.crowd(40, act)


def _mutants() -> Any:
    return list(bombs.mutants(600))


def _video_mutants() -> Any:
    return list(bombs.video_mutants(300))


async def nothing(battle: Battle) -> None:
    await asyncio.sleep(battle.left)


ATTACKS = [
    Attack("quiet", "nothing", "no attack: the figures to compare with", nothing),
    Attack(
        "video",
        "key",
        "8 clients send a video of 36,000 frames of 2944x2944 with one key frame, 3 MiB",
        video,
        _video,
    ),
    Attack(
        "pixels",
        "key",
        "40 clients send 4 PNGs of 50 megapixels each, 0.6 MB in all",
        pixels,
        lambda: bombs.black_png(0),
    ),
    Attack("fill-bytes", "key", "3 clients send 16 JPEGs of fill bytes, 45 MiB in all", fill_bytes),
    Attack(
        "fill-bytes-remote",
        "key",
        "3 clients name 16 JPEGs of 20 MiB of fill bytes on a server of the attacker",
        fill_bytes_remote,
        setup=PRIVATE,
    ),
    Attack(
        "hostile-origin",
        "key",
        "40 clients name 4 URLs of a server that sends endless interim answers or "
        "headers, drips, or is silent",
        hostile_origin,
        setup=PRIVATE,
    ),
    Attack(
        "scans",
        "key",
        "8 clients send 8 progressive JPEGs of 16 megapixels with 99 scans",
        scans,
        lambda: bombs.many_scans(0),
    ),
    Attack("broken-images", "key", "4 clients send damaged pictures of all formats", mutants, _mutants),
    Attack(
        "broken-videos",
        "key",
        "4 clients send damaged videos of several codecs",
        video_mutants,
        _video_mutants,
    ),
    Attack(
        "hanging-names",
        "key",
        "40 clients name 4 hosts each that a silent DNS server should resolve",
        hanging_names,
        setup=Setup(flags=("--allow-private-hosts", "true"), nameserver=RESOLVER),
    ),
]
