"""Clients of a cluster: they send requests, and note for each how it ended and which replica answered."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from PIL import Image

WHOLE, REFUSED, VISIBLE, SILENT = (
    "whole",
    "error before the first byte",
    "visible error after it",
    "silent cut",
)
"""Ends of a request. visible: the stream says that it failed, or the connection breaks. silent: it looks
whole, and is not."""
LONGEST = aiohttp.ClientTimeout(total=90)


@dataclass
class Ends:
    """How requests ended.

    replicas: the replica of each whole answer, in the order of the answers, by the request's name.
    """

    counts: Counter[str] = field(default_factory=Counter)
    replicas: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def affinity(self) -> float:
        """The share of repeats that were answered by the replica that answered the same thing before."""
        repeats = [
            now == before for one in self.replicas.values() for before, now in zip(one, one[1:], strict=False)
        ]
        return sum(repeats) / len(repeats) if repeats else 0.0


def picture(number: int, side: int = 64) -> str:
    """Return a picture of its own for each number, as a data: URL."""
    image = Image.new("RGB", (side, side), (number * 37 % 256, number * 91 % 256, number * 151 % 256))
    image.putpixel((0, 0), (number % 256, number // 256 % 256, 7))
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def body(
    model: str, *, tokens: int = 1, image: str = "", text: str = "What is it?", stream: bool = False
) -> Any:
    """Return the body of a chat request."""
    content: list[Any] = [{"type": "text", "text": text}]
    if image:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return {
        "model": model, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True,
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip


async def send(
    session: aiohttp.ClientSession,
    url: str,
    content: Any,
    ends: Ends,
    *,
    name: str = "",
    headers: Mapping[str, str] | None = None,
) -> float:
    """Send a request, note its end, and return its seconds. name: of what repeats."""
    begun, started = time.perf_counter(), False
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=content, headers=headers, timeout=LONGEST
        ) as answer:
            if answer.status != 200:
                ends.counts[REFUSED] += 1
                ends.notes.append(f"{answer.status} {(await answer.text())[:300]}")
                return time.perf_counter() - begun
            replica = answer.headers.get("x-fovea-replica", "")
            text = b""
            async for piece in answer.content.iter_any():
                started = True
                text += piece
    except (aiohttp.ClientError, TimeoutError) as error:
        ends.counts[VISIBLE if started else REFUSED] += 1
        ends.notes.append(repr(error)[:300])
        return time.perf_counter() - begun
    if content["stream"] and b'"error"' in text:
        ends.counts[VISIBLE] += 1
    elif content["stream"] and b"[DONE]" not in text:
        ends.counts[SILENT] += 1
    else:
        ends.counts[WHOLE] += 1
        ends.replicas.setdefault(name, []).append(replica)
    return time.perf_counter() - begun


async def at_once(jobs: list[Any], most: int) -> list[Any]:
    """Run coroutines, at most so many at once, in their order."""
    gate = asyncio.Semaphore(most)

    async def one(job: Any) -> Any:
        async with gate:
            return await job

    return await asyncio.gather(*map(one, jobs))
