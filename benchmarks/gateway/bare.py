"""Pass requests on to backends in turn: the least that an ASGI application on uvicorn and aiohttp can do.

    BARE_BACKENDS=http://127.0.0.1:9001 python -m uvicorn --app-dir benchmarks/gateway bare:app --port 8000

It holds the body of a request until it is complete, because a gateway has to read it before it chooses a
backend, and passes every piece of an answer on as it arrives. It checks, limits and repairs nothing. A
gateway of this kind cannot cost less processor time.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import aiohttp

DROPPED = {b"host", b"connection", b"transfer-encoding", b"content-length"}
LIMIT = 1024
"""Connections to the backends."""

backends = itertools.cycle(os.environ.get("BARE_BACKENDS", "http://127.0.0.1:9001").split(","))
sessions: list[aiohttp.ClientSession] = []


async def lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            connector = aiohttp.TCPConnector(limit=LIMIT)
            sessions.append(
                aiohttp.ClientSession(
                    connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout()
                )
            )
            await send({"type": "lifespan.startup.complete"})
        else:
            await sessions.pop().close()
            await send({"type": "lifespan.shutdown.complete"})
            return


async def read(receive: Any) -> bytes:
    """The body of a request."""
    message = await receive()
    if not message.get("more_body"):
        return bytes(message.get("body", b""))
    parts = [message["body"]]
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    body = await read(receive)
    headers = [(name.decode(), value.decode()) for name, value in scope["headers"] if name not in DROPPED]
    url = next(backends) + scope["path"]
    payload = aiohttp.BytesPayload(body, headers=None) if body else None
    async with sessions[0].request(scope["method"], url, data=payload, headers=headers) as response:
        answer = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if name.lower() not in DROPPED or name.lower() == b"content-length"
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": answer})
        async for piece in response.content.iter_any():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})
