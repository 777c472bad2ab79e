"""A scriptable engine and a running gateway, both within the event loop of a test, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx
import openai
from PIL import Image

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
PATIENCE_S = 20.0
SEND_BYTES = 64 * 1024
"""Size of an engine's send buffers: it soon notices that its client reads slowly."""
ENDS = ("done", "bare", "mute", "stall", "reset", "close", "error")
Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The way in which an engine answers a request.

    status: HTTP status; from 400 on, the answer is an error.
    events: words of the answer; a stream has one event for each.
    wait_s: seconds before the first byte. Infinite: nothing is ever sent.
    gap_s: seconds between two events.
    end: what follows the events of a stream. done: the end; bare: the finish reason, and no [DONE]; mute: not
        even a finish reason; stall: silence; reset: a TCP reset; close: the connection ends as if by a crash;
        error: an event that reports an error. With reset and close, nothing at all is sent if there are 0
        events.
    error: fields of the event that reports an error.
    headers: further headers of the answer.
    usage: whether the answer tells its usage.
    """

    status: int = 200
    events: int = 3
    wait_s: float = 0.0
    gap_s: float = 0.0
    end: str = "done"
    error: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    usage: bool = True

    def __post_init__(self) -> None:
        assert self.end in ENDS, self.end


@dataclass(frozen=True)
class Received:
    """A request as an engine got it. headers: names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        value: Json = json.loads(self.body)
        return value


class FakeEngine:
    """An OpenAI-compatible engine that does what its plans say.

    models: the models that it lists.
    plan: the way in which it answers.
    plans: plans of the next requests, which are used before `plan`.
    received: the requests for answers that it got.
    cut: answers whose client left before their end.
    health: status of its health check.
    prompt_tokens: tokens that it reports for every prompt.
    """

    def __init__(
        self, name: str = "a", *models: str, plan: Plan | None = None, degrade: str = "auto"
    ) -> None:
        self.name = name
        self.models = models or ("m",)
        self.plan = plan or Plan()
        self.plans: deque[Plan] = deque()
        self.received: list[Received] = []
        self.cut = 0
        self.health = 200
        self.prompt_tokens = 7
        self.port = 0
        self._degrade = degrade
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> BackendConfig:
        return BackendConfig(self.url, self.name, self.models, degrade=self._degrade)

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def start(self) -> None:
        """Listen, on the port of the last time if there was one."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """End at once, with all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the client left, or the engine dies
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        data = await reader.read(65536)
        while data:
            request, data = await _read(reader, data)
            if request is None:
                return
            watch = asyncio.ensure_future(reader.read(65536))
            answer = asyncio.ensure_future(self._answer(request, writer))
            try:
                await asyncio.wait({watch, answer}, return_when=asyncio.FIRST_COMPLETED)
                gone = not answer.done() or isinstance(answer.exception(), OSError)
                self.cut += gone
                if gone or not answer.result():
                    return
                data += await watch
            finally:
                for task in (watch, answer):
                    task.cancel()
                await asyncio.gather(watch, answer, return_exceptions=True)

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Returns whether the connection goes on."""
        if request.method == "GET":
            listed = [{"id": name, "object": "model"} for name in self.models]
            pages = {"/health": (self.health, {}), "/v1/models": (200, {"data": listed})}
            status, page = pages.get(request.path, (404, {}))
            await _send(writer, status, page)
            return True
        self.received.append(request)
        plan = self.plans.popleft() if self.plans else self.plan
        await asyncio.sleep(3600 if math.isinf(plan.wait_s) else plan.wait_s)
        if plan.status >= 400:
            error = {"error": {"message": f"{self.name} refuses", "type": "x", "code": "planned"}}
            await _send(writer, plan.status, error, plan.headers)
            return True
        if plan.end in ("reset", "close") and not plan.events:
            _break(writer, reset=plan.end == "reset")
            return False
        if request.json.get("stream") is True:
            return await self._stream(plan, request, writer)
        await _send(writer, 200, self._complete(plan), plan.headers)
        return True

    def _complete(self, plan: Plan) -> Json:
        message = {"role": "assistant", "content": " ".join([self.name] * plan.events)}
        answer: Json = {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": self.models[0],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }  # fmt: skip
        return {**answer, "usage": self._usage(plan)} if plan.usage else answer

    async def _stream(self, plan: Plan, request: Received, writer: asyncio.StreamWriter) -> bool:
        head = _head(
            200, {"content-type": "text/event-stream", "transfer-encoding": "chunked", **plan.headers}
        )
        writer.write(head)
        word = _event(self._chunk([_choice(self.name + " ")]))
        for number in range(plan.events):
            await asyncio.sleep(plan.gap_s if number else 0)
            writer.write(word)
            await writer.drain()
        if plan.end == "stall":
            await asyncio.sleep(3600)
        if plan.end in ("reset", "close"):
            await asyncio.sleep(0.05)  # so that the events arrive before the connection ends
            _break(writer, reset=plan.end == "reset")
            return False
        if plan.end == "error":
            error = {"message": f"{self.name} failed", "type": "server_error", **plan.error}
            writer.write(_event({"error": error}))
        elif plan.end == "bare":
            writer.write(_event(self._chunk([_choice("", "stop")])))
        elif plan.end == "done":
            writer.write(_event(self._chunk([_choice("", "stop")])))
            options = request.json.get("stream_options") or {}
            if plan.usage and options.get("include_usage"):
                writer.write(_event({**self._chunk([]), "usage": self._usage(plan)}))
            writer.write(_chunked(b"data: [DONE]\n\n"))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _usage(self, plan: Plan) -> Json:
        prompt = self.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": plan.events,
            "total_tokens": prompt + plan.events,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": self.models[0]}
        return {**head, "choices": choices}


async def _read(reader: asyncio.StreamReader, data: bytes) -> tuple[Received | None, bytes]:
    """Return the next request and the bytes after it. data: its first bytes."""
    while b"\r\n\r\n" not in data:
        more = await reader.read(65536)
        if not more:
            return None, b""
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    parts = [rest]
    while (missing := length - sum(map(len, parts))) > 0:
        parts.append(await reader.readexactly(missing))
    body = b"".join(parts)
    method, path, _ = first.split(" ")
    return Received(method, path, headers, body[:length]), body[length:]


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{n}: {v}" for n, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _send(
    writer: asyncio.StreamWriter, status: int, value: Json, headers: Mapping[str, str] | None = None
) -> None:
    body = json.dumps(value).encode()
    kind = {"content-type": "application/json", "content-length": str(len(body))}
    writer.write(_head(status, {**kind, **(headers or {})}) + body)
    await writer.drain()


def _break(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """End a connection without the end of its answer."""
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def _choice(text: str, reason: str | None = None) -> Json:
    return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(value: Json) -> bytes:
    return _chunked(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def resilience(**values: Any) -> ResilienceSettings:
    """Settings without health checks and ejections, which a test turns on if it is about them."""
    return ResilienceSettings(**{"probe_every_s": 0, "outlier_factor": 0, **values})


@dataclass(frozen=True)
class Running:
    """A running gateway.

    client: an HTTP client of it. server: ends it, as a signal does.
    """

    url: str
    gateway: Gateway
    client: httpx.AsyncClient
    server: Server

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        """The official client, to be closed by the test. It does not repeat requests itself."""
        http: Any = openai.DefaultAsyncHttpxClient(verify=False)  # reads no certificates, which takes 20 ms
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http)

    async def says(self, text: str = "hello", **body: Any) -> str:
        """Send a chat request by the official client, and return the answer's text. Raises its errors."""
        async with self.openai() as client:
            answer: Any = await client.chat.completions.create(**chat(text, **body))
            if not body.get("stream"):
                return str(answer.choices[0].message.content)
            return "".join([one.choices[0].delta.content or "" async for one in answer if one.choices])

    async def ask(
        self, text: str = "hello", *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """Send a chat request, and return its complete answer, or all of its stream."""
        return await self.client.post(CHAT, json=chat(text, **body), headers=headers)

    async def backend(self, name: str) -> Json:
        """The state of a backend, as /admin/backends shows it."""
        listed = (await self.client.get("/admin/backends")).json()["backends"]
        return next((one for one in listed if one["name"] == name), {})

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that have these labels."""
        total = 0.0
        for line in (await self.client.get("/metrics")).text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == f"fovea_gateway_{name}" and all(
                f'{label}="{wanted}"' in sample for label, wanted in labels.items()
            ):
                total += float(value)
        return total


def chat(text: str = "hello", **body: Any) -> Json:
    """The body of a chat request for the model m."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 16, **body}


def picture(shade: int = 0, size: int = 32) -> bytes:
    """A PNG of one colour. shade: 0 to 255."""
    out = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def about(*urls: str, **more: Any) -> list[Json]:
    """The messages of a question about images. more: further fields of each image."""
    images = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": "What is it?"}]}]


def words(stream: str) -> list[str]:
    """The texts of the events of a chat stream."""
    values = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    found = [choice["delta"].get("content") for value in values for choice in value.get("choices", ())]
    return [text.strip() for text in found if text]


def error_of(stream: str) -> Json:
    """The error event at the end of a chat stream. Fails if another one is the last."""
    last: Json = json.loads(stream.strip().splitlines()[-1].removeprefix("data: "))
    error: Json = last["error"]
    return error


async def soon(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; fail if it never does. It may be a coroutine function."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(
    *engines: FakeEngine,
    tables: Tables | None = None,
    experiments: ExperimentConfig | None = None,
    http: Mapping[str, Any] | None = None,
    setup: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Run a gateway in front of some engines until the block ends.

    tables: backends and models; None: one backend for each engine.
    http, settings: of the gateway. setup: further fields of its `Setup`.
    """
    values = {"drain_seconds": 1.0, "resilience": resilience(), "remote_images": "resolve", **settings}
    own = GatewaySettings(http=HttpSettings(**{"lame_duck_s": 0, **(http or {})}), **values)
    given = Setup(
        own,
        tables or Tables(tuple(engine.config for engine in engines)),
        experiments or ExperimentConfig(),
        lambda name: None,
        **(setup or {}),
    )
    gateway = create_gateway(given, time.monotonic)
    services, sockets = gateway.services, bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    def drain() -> None:
        services.draining = True

    hooks = Hooks(on_drain=drain, on_cut=gateway.cut, drain_s=own.drain_seconds)
    table = Connections(
        own.http.max_connections, own.http.max_connections_per_address, observer=services.metrics
    )
    server = Server(gateway, sockets, own.http, table, hooks)
    task = asyncio.create_task(server.serve())
    try:
        await soon(lambda: server.started or task.done())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        async with httpx.AsyncClient(
            base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False, verify=False
        ) as client:
            yield Running(url, gateway, client, server)
    finally:
        server.should_exit = True
        await task


def tables(engines: Sequence[FakeEngine], **others: Any) -> Tables:
    """Tables with a backend for each engine. others: further fields of `Tables`."""
    return Tables(tuple(engine.config for engine in engines), **others)
