"""Bodies, demands and backends for the tests of the gateway's core."""

from __future__ import annotations

import asyncio
import base64
import json
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from fovea.api.cutter import Cutter
from fovea.gateway.backends.backend import Backend, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.config import BackendConfig, ModelConfig
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.inspect.fields import MediaPart, media_parts
from fovea.gateway.inspect.images import RequestImage
from fovea.gateway.settings import ResilienceSettings

T = TypeVar("T")
MODEL = ModelConfig("m")


def cut(data: bytes, size: int = 64 * 1024) -> Body:
    """Parse a body that arrives in slices of a size."""
    cutter = Cutter()
    for at in range(0, len(data), size):
        cutter.feed(data[at : at + size])
    return Body.parse(cutter)


def body(value: Any) -> Body:
    """Parse a body from its value."""
    return cut(json.dumps(value).encode())


def parts(value: Any) -> list[MediaPart]:
    """The images and videos of a value."""
    return list(media_parts(value))


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chat(*urls: str, text: str = "Describe them.", **fields: Any) -> dict[str, Any]:
    """A chat request with images."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": text})
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def image(identity: str, part: MediaPart | None = None) -> RequestImage:
    """The facts about an image."""
    owner = {"url": identity}
    part = part or MediaPart(owner, "url", "messages[0].content[0].image_url.url", False, "", owner)
    return RequestImage(identity, b"", 64, 64, False, part)


def demand(text: str = "hello", *images: str, session: str = "", **fields: Any) -> Demand:
    """The demand of a chat request with images of these identities."""
    given = body({"model": "m", "messages": [{"role": "user", "content": text}], **fields})
    return Demand(given, [image(identity) for identity in images], session)


def backend(name: str, settings: ResilienceSettings | None = None, **options: Any) -> Backend:
    """A backend of the model "m" that has its full weight at time 0."""
    config = BackendConfig(f"http://{name}:8000", name, **{"models": ("m",), **options})
    return Backend(config, settings or ResilienceSettings(), 0.0)


def backends(count: int, **options: Any) -> list[Backend]:
    return [backend(f"b{number}", **options) for number in range(count)]


def fleet(configs: Sequence[BackendConfig], settings: ResilienceSettings | None = None) -> Fleet:
    """A fleet whose backends have their full weights at time 0."""
    made = Fleet(settings or ResilienceSettings())
    made.update(configs, 0.0)
    return made


def busy(one: Backend, tokens: int, visual: int = 0) -> None:
    """Give a backend one more outstanding request."""
    one.begin(Load(tokens, visual), 0.0, vision=bool(visual))


class _Selector(selectors.DefaultSelector):
    """A selector that never waits; it moves the clock of its loop instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the test waits for something that never happens")
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that no test waits."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop with a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)
