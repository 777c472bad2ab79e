"""The workload of the routing benchmark: questions about images, repeated, and what came back.

first      the first question about an image in a round
repeat     the same question about the same image again
follow-up  a second turn of that conversation
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from PIL import Image

from fovea.api import sse

SIZES = ((224, 224), (320, 224), (320, 320), (448, 320), (320, 448))
"""Width and height of the images, in turn: 49 to 140 visual tokens of fovea-tiny."""
GRAIN = 24
"""Pixels a side of the random picture that is enlarged to an image."""
QUESTION, FURTHER = "What is in the picture?", "And what is beside it?"
ANSWER = "A picture of many colours."
MAX_TOKENS = 8
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to send.

    image: number of the image.
    kind: "first", "repeat" or "follow-up".
    """

    image: int
    kind: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One request and its answer.

    sent: number of the request in the order of sending.
    backend, route: headers of the gateway; "": the engine was asked itself, or there was no answer.
    error: why there was no complete answer; "": there was one.
    ttft_s, seconds: from sending to the first text, and to the end.
    prompt, cached, visual: tokens that the engine counted.
    """

    ask: Ask
    sent: int
    backend: str = ""
    route: str = ""
    error: str = ""
    ttft_s: float = 0.0
    seconds: float = 0.0
    prompt: int = 0
    cached: int = 0
    visual: int = 0


def picture(seed: int, size: tuple[int, int] | None = None) -> str:
    """A data: URL of an image of smooth random colours: PNG if the seed is even, JPEG if it is odd."""
    small = Image.frombytes("RGB", (GRAIN, GRAIN), random.Random(seed).randbytes(GRAIN * GRAIN * 3))
    image = small.resize(size or SIZES[seed % len(SIZES)], Image.Resampling.BICUBIC)
    file, kind = io.BytesIO(), ("JPEG" if seed % 2 else "PNG")
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def body(model: str, url: str, kind: str, *, stream: bool = True) -> bytes:
    """The JSON of a request about an image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if kind == "follow-up":
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": FURTHER}]
    request = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "min_tokens": MAX_TOKENS}
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(request).encode()


def first_phase(images: int, times: int, seed: int) -> list[Ask]:
    """Ask about every image so many times, in random order."""
    order = [image for image in range(images) for _ in range(times)]
    random.Random(seed).shuffle(order)
    seen: set[int] = set()
    asks = []
    for image in order:
        asks.append(Ask(image, "repeat" if image in seen else "first"))
        seen.add(image)
    return asks


def follow_ups(images: int, seed: int) -> list[Ask]:
    """One second turn for every image, in random order."""
    order = random.Random(seed).sample(range(images), images)
    return [Ask(image, "follow-up") for image in order]


class Client:
    """Sends requests to one server, and measures the answers. Use it as an async context manager.

    url: base URL of the server.
    model: name of the model.
    pictures: data: URLs by the number of the image.
    stream: whether answers are wanted as events. Otherwise the time to the first text is not known.
    """

    def __init__(self, url: str, model: str, pictures: Sequence[str], *, stream: bool = True) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._pictures = pictures
        self._stream = stream
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def play(
        self, asks: Iterable[Ask], concurrency: int, after: Callable[[int], None] = lambda count: None
    ) -> list[Reply]:
        """Send requests in order, with so many in flight. after: called with the number of answers so far."""
        waiting = enumerate(asks)
        replies: list[Reply] = []

        async def work() -> None:
            for number, ask in waiting:
                replies.append(await self.send(ask, number))
                after(len(replies))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return sorted(replies, key=lambda reply: reply.sent)

    async def send(self, ask: Ask, number: int = 0) -> Reply:
        """Send one request. Failures are part of the reply."""
        assert self._session is not None
        data = body(self._model, self._pictures[ask.image], ask.kind, stream=self._stream)
        began = time.perf_counter()
        try:
            async with self._session.post(
                self._url, data=data, headers={"content-type": "application/json"}
            ) as answer:
                if answer.status != 200:
                    return Reply(ask, number, error=f"{answer.status}: {(await answer.text())[:200]}")
                names = {name: answer.headers.get(f"x-fovea-{name}", "") for name in ("backend", "route")}
                read = _read_stream if self._stream else _read_whole
                first, usage = await read(answer)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Reply(ask, number, error=f"{type(error).__name__}: {error}"[:200])
        ended = time.perf_counter()
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            ask, number, **names, ttft_s=(first or ended) - began, seconds=ended - began,
            prompt=usage.get("prompt_tokens", 0), cached=details.get("cached_tokens", 0),
            visual=details.get("image_tokens", 0),
        )  # fmt: skip


async def _read_stream(answer: aiohttp.ClientResponse) -> tuple[float, dict[str, Any]]:
    """Return the time of the first text and the usage of a stream. Raises ValueError if it is not whole."""
    decoder, first, usage, done = sse.Decoder(), 0.0, {}, False
    async for data in answer.content.iter_any():
        for payload in decoder.feed(data):
            if payload == "[DONE]":
                done = True
                continue
            event = json.loads(payload)
            if "error" in event:
                raise ValueError(f"the stream has an error: {event['error']}")
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = time.perf_counter()
            usage = event.get("usage") or usage
    if not done:
        raise ValueError("the stream ended without [DONE]")
    return first, usage


async def _read_whole(answer: aiohttp.ClientResponse) -> tuple[float, dict[str, Any]]:
    return 0.0, json.loads(await answer.read())["usage"]


def warm(replies: Sequence[Reply]) -> tuple[int, int]:
    """Count the requests about known images: those that reached a warm backend, and all of them.

    A backend is warm for an image if an earlier request about the image went there.
    """
    asked: dict[int, set[str]] = {}
    hits = known = 0
    for reply in replies:
        if reply.error:
            continue
        backends = asked.setdefault(reply.ask.image, set())
        known += bool(backends)
        hits += reply.backend in backends
        backends.add(reply.backend)
    return hits, known
