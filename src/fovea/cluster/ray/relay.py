"""Passes requests on to the engine of a replica, and its answers back, as an ASGI application.

Bodies and answers pass in pieces, as they come. If the engine cannot be reached, the client gets an error
that a gateway tries again elsewhere; after the first byte the connection is cut, so that no client takes a
part of an answer for the whole.

This module does not import ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from fovea.core.errors import EngineError

if TYPE_CHECKING:
    import aiohttp

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
REPLICA_HEADER = b"x-fovea-replica"
"""Header of an answer with the replica that gave it."""
HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
     b"transfer-encoding", b"upgrade", b"host")
)  # fmt: skip
"""Headers that are about one connection."""
ADDED = frozenset((b"date", b"server", b"x-request-id"))
"""Headers of an answer that Ray Serve adds; the request id is that of the request, which the engine keeps."""
READ_BYTES = 1 << 18
REFUSE_AFTER_S = 2.0


class Relay:
    """One replica's way to its engine. To be made within the event loop that uses it."""

    def __init__(self, address: str, replica: str, refuse_after_s: float = REFUSE_AFTER_S) -> None:
        """address: URL of the engine. replica: name of the replica, for REPLICA_HEADER.

        refuse_after_s: seconds until a request is refused whose engine cannot be reached.
        """
        import aiohttp

        self._address, self._refuse_after_s = address, refuse_after_s
        self._replica = replica.encode()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self._lost = aiohttp.ClientError

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections to the engine."""
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        elif scope["type"] == "http":
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("raw_path") or scope["path"].encode()
        root = scope.get("root_path", "").encode()
        path = path[len(root) :] if root and path.startswith(root) else path
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        begun = False
        try:
            async with self._session.request(
                scope["method"],
                self._url(path + query),
                headers=[
                    (name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in scope["headers"]
                    if name not in HOP
                ],
                data=_body(receive) if _has_body(scope) else None,
                allow_redirects=False,
            ) as answer:
                await send(
                    {
                        "type": "http.response.start",
                        "status": answer.status,
                        "headers": [
                            *_answer_headers(answer.raw_headers),
                            (REPLICA_HEADER, self._replica),
                        ],
                    }
                )
                begun = True
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except self._lost as error:
            if begun:
                raise EngineError(f"the engine of this replica was lost within an answer: {error}") from error
            await self._refuse(send, error)

    def _url(self, target: bytes) -> Any:
        from yarl import URL

        return URL(self._address + target.decode("latin-1"), encoded=True)

    async def _refuse(self, send: Send, error: Exception) -> None:
        """Answer for an engine that cannot be reached.

        If the engine has ended, this process ends meanwhile, and a proxy sends the request elsewhere.
        """
        await asyncio.sleep(self._refuse_after_s)
        body = json.dumps(
            {
                "error": {
                    "message": f"the engine of this replica cannot be reached: {type(error).__name__}",
                    "type": "server_error",
                    "code": "engine_unreachable",
                }
            }
        ).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (REPLICA_HEADER, self._replica),
        ]
        await send({"type": "http.response.start", "status": 502, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _answer_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lower if name not in HOP and name not in ADDED]


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the pieces of a request's body."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client left within its request")
        if piece := message.get("body", b""):
            yield piece
        if not message.get("more_body", False):
            return
