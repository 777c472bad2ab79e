"""A real server on a loopback port, pictures to send to it, and a way to block its engine."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from PIL import Image

from fovea import Engine
from fovea.core.protocols import CacheStage, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt, Rendered
from fovea.server.app import App, create_app
from fovea.server.clients import Caller
from fovea.server.request import Inside, Request
from fovea.server.run import serving
from fovea.server.settings import ServerSettings

PATIENCE = 60.0
Json = dict[str, Any]


class SharedEngine:
    """An engine that several servers share. Closing one of them does not close it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def status(self) -> EngineStatus:
        return self._engine.status

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        return self._engine.stream(request)

    def check_room(self, choices: int, reserved: int = 0) -> None:
        self._engine.check_room(choices, reserved)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return await self._engine.tokenize(prompt)

    async def render(self, request: GenerationRequest) -> Rendered:
        return await self._engine.render(request)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._engine.detokenize(ids)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    def clear_caches(self, *stages: CacheStage) -> None:
        self._engine.clear_caches(*stages)

    async def close(self, drain_s: float = 0.0) -> None:
        return None


@dataclass(frozen=True)
class Server:
    """A running server. files: the folder that file:// URLs may read."""

    url: str
    engine: Engine
    app: App
    files: Path

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def metrics(self) -> dict[str, float]:
        """All metrics without labels, by name."""
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.split(" ") for line in lines if "{" not in line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@contextlib.contextmanager
def running(engine: Engine, settings: ServerSettings, files: Path) -> Iterator[Server]:
    """Run a server on a free port, in a thread with an event loop of its own, until the block ends."""
    app = create_app(SharedEngine(engine), settings)
    with serving(app, uvloop.new_event_loop) as url:
        yield Server(url, engine, app, files)


def request_of(app: App, body: bytes = b"{}", path: str = "/v1/chat/completions") -> tuple[Request, Inside]:
    """A request to an application that is not sent over a socket, and its two ends."""
    inside = Inside(path, body, "test")
    return Request(app.state, inside.scope, inside.receive, inside.send, Caller()), inside


@contextlib.contextmanager
def frozen(engine: Engine) -> Iterator[None]:
    """Block the engine's thread. Running requests make no progress, and new ones stay in the queue."""
    reached, released = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        released.wait(PATIENCE)

    holder = threading.Thread(target=lambda: engine.loop.call(block), daemon=True)
    holder.start()
    assert reached.wait(PATIENCE)
    try:
        yield
    finally:
        released.set()
        holder.join(PATIENCE)


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true, at most PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


@cache
def picture(width: int = 96, height: int = 64, seed: int = 0) -> bytes:
    """A PNG of noise. Pictures of different seeds look different to a model."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def image(url: str, **extra: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": url, **extra}}


def user(*parts: Json | str) -> Json:
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def chat(*messages: Json, **extra: Any) -> Json:
    """A chat body: greedy sampling, and a short answer that ends only at max_tokens."""
    turns = list(messages) or [user("what is it?")]
    return {"messages": turns, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **extra}
