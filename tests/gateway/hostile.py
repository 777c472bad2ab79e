"""A backend that answers with any bytes, and a gateway in front of it, in the event loop of a test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fovea.access.keys import digest
from fovea.gateway.app import Gateway
from fovea.gateway.build import Setup, create_gateway
from fovea.gateway.config import BackendConfig, Tables
from fovea.gateway.experiments.config import ExperimentConfig
from fovea.gateway.settings import GatewaySettings, ResilienceSettings
from fovea.http.listener import bind
from fovea.http.server import Hooks, Server
from fovea.http.settings import HttpSettings
from fovea.http.table import Connections

CHAT = "/v1/chat/completions"
ANSWER: dict[str, Any] = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}  # fmt: skip
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
Write = Callable[[bytes], Awaitable[None]]
Behave = Callable[[Write, dict[str, Any]], Awaitable[None]]
"""Answers one request: it gets a function that sends bytes, and the JSON of the request."""


def answer(value: Any = ANSWER, status: int = 200, *headers: str) -> bytes:
    """The bytes of a complete answer of JSON. headers: whole lines."""
    body = json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


def stream_head(*headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sends(*parts: bytes) -> Behave:
    """A behaviour that sends some bytes and closes the connection."""

    async def behave(write: Write, _: dict[str, Any]) -> None:
        for part in parts:
            await write(part)

    return behave


class RawBackend:
    """A backend that does to the connection of a request what `behave` says, and then closes it.

    received: bodies of the requests that it got. gone: whether the gateway has left before the end.
    """

    def __init__(self, behave: Behave | None = None) -> None:
        self.behave = behave or sends(answer())
        self.received: list[dict[str, Any]] = []
        self.raw = b""
        self.gone = asyncio.Event()
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[RawBackend]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                await write(answer({}))
                return
            lines = dict(line.lower().split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:-2])
            self.raw = await reader.readexactly(int(lines["content-length"]))
            self.received.append(json.loads(self.raw))
            watch = asyncio.ensure_future(reader.read(1))
            behaving = asyncio.ensure_future(self.behave(write, self.received[-1]))
            await asyncio.wait((watch, behaving), return_when=asyncio.FIRST_COMPLETED)
            if not behaving.done() or behaving.exception() is not None:
                self.gone.set()
                behaving.cancel()
            watch.cancel()
            await asyncio.gather(behaving, watch, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()


@dataclass(frozen=True)
class Running:
    """A running gateway."""

    gateway: Gateway
    client: httpx.AsyncClient
    port: int

    async def ask(self, path: str = CHAT, *, key: str = "", **body: Any) -> httpx.Response:
        value = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **body}
        return await self.raw(json.dumps(value).encode(), path, key=key)

    async def raw(self, data: bytes, path: str = CHAT, *, key: str = "", **headers: str) -> httpx.Response:
        given = {"content-type": "application/json", **headers}
        if key:
            given["authorization"] = f"Bearer {key}"
        return await self.client.post(path, content=data, headers=given)


@asynccontextmanager
async def running(*backends: RawBackend, **settings: Any) -> AsyncIterator[Running]:
    """Run a gateway in front of some backends until the block ends. settings: of the gateway."""
    values = {
        "drain_seconds": 0.1,
        "resilience": ResilienceSettings(probe_every_s=0, outlier_factor=0, retry_share=0),
        **settings,
    }
    own = GatewaySettings(http=HttpSettings(lame_duck_s=0), **values)
    tables = Tables(
        tuple(
            BackendConfig(f"http://127.0.0.1:{one.port}", f"b{number}", ("m",), health="/health")
            for number, one in enumerate(backends)
        )
    )
    gateway = create_gateway(Setup(own, tables, ExperimentConfig(), lambda name: None), time.monotonic)
    for backend in backends:
        backend.received.clear()
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    table = Connections(100, 100, observer=gateway.services.metrics)
    hooks = Hooks(on_drain=lambda: None, on_cut=gateway.cut, drain_s=0.1)
    server = Server(gateway, sockets, own.http, table, hooks)
    task = asyncio.create_task(server.serve())
    try:
        await soon(lambda: server.started or task.done())
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False, verify=False
        ) as client:
            yield Running(gateway, client, port)
    finally:
        server.should_exit = True
        await task


async def soon(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; fail if it never does."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never held")


def keys_file(folder: Path, tenants: Sequence[tuple[str, str]]) -> Path:
    """Write a keys file. tenants: name, and lines of limits; the key of NAME is "NAME-key"."""
    path = folder / "keys.toml"
    text = ""
    for name, limits in tenants:
        hashed = digest(f"{name}-key".encode()).hex()
        text += f'[[key]]\nname = "{name}"\nhash = "sha256:{hashed}"\n{limits}\n'
    path.write_text(text)
    path.chmod(0o600)
    return path
