"""The fixed workloads: each asks one question about a server, on content that no cache has seen."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fovea.bench.context import Stage
from fovea.bench.measure import Round
from fovea.bench.sample import Failure, Sample

BEFORE = 24
"""Events of a stream before the image arrives that is to disturb it."""
STREAM_TOKENS = 1024
"""Longer than any image takes; the stream is left as soon as the image has its answer."""
BESIDE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """title: what it asks, in words. sends: requests of a round; 0: as many as go at once. play: one round."""

    title: str
    sends: int
    play: Callable[[Stage], Awaitable[Round]]


async def cold(stage: Stage) -> Round:
    return Round([await stage.send(stage.about(await stage.picture()))])


async def images(stage: Stage) -> Round:
    urls = [await stage.picture() for _ in range(stage.shape.concurrency)]
    return Round(await stage.together([stage.about(url) for url in urls]))


async def questions(stage: Stage) -> Round:
    url = await stage.picture()
    return Round(await stage.together([stage.about(url) for _ in range(stage.shape.concurrency)]))


async def followup(stage: Stage) -> Round:
    ask = stage.about(await stage.picture())
    first = await stage.send(ask)
    return Round([await stage.send(stage.after(ask, first)) if first.whole else first])


async def known(stage: Stage) -> Round:
    """The new text stands before the image, so that its KV can not be that of the first question."""
    url = await stage.picture()
    first = await stage.send(stage.about(url))
    return Round([await stage.send(stage.about(url, text_first=True)) if first.whole else first])


async def text(stage: Stage) -> Round:
    return Round(await stage.together([stage.about() for _ in range(stage.shape.concurrency)]))


async def stall(stage: Stage) -> Round:
    """The samples are those of the image's requests; the stream's stall is in the values."""
    url = await stage.picture()
    arrives, answered = asyncio.Event(), False

    def heard(sample: Sample) -> bool:
        if len(sample.events) >= BEFORE:
            arrives.set()
        return answered

    stream = asyncio.create_task(stage.send(stage.about(max_tokens=STREAM_TOKENS), heard=heard))
    waiting = asyncio.create_task(arrives.wait())
    await asyncio.wait((stream, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not arrives.is_set():
        return Round([await stream])
    image = await stage.send(stage.about(url, max_tokens=BESIDE_TOKENS))
    answered = True
    return stalled(await stream, image)


def stalled(stream: Sample, image: Sample) -> Round:
    """The image's request with the stream's stall, or whichever of the two went wrong."""
    if image.failure is not None:
        return Round([image])
    if stream.failure is None:
        stream.failure = Failure("short stream", "it ended before the image had its answer")
    return Round([image], stall_values(stream, image)) if stream.failure.kind == "left" else Round([stream])


def stall_values(stream: Sample, image: Sample) -> dict[str, float]:
    """Of the stream, milliseconds: the longest gap while the image's first token was awaited, the median gap before."""
    first = image.events[0]
    gaps = list(zip(stream.events, stream.events[1:], strict=False))
    during = [b - a for a, b in gaps if b > image.scheduled and a < first]
    before = [b - a for a, b in gaps if b <= image.scheduled]
    longest, median = max(during, default=0.0), statistics.median(before)
    return {"stall_ms": longest * 1e3, "median_gap_before_ms": median * 1e3}


SUITE = {
    "cold": Workload("one request, new image", 1, cold),
    "images": Workload("concurrent requests, each its own new image", 0, images),
    "questions": Workload("concurrent questions about one new image", 0, questions),
    "followup": Workload("the next question of a conversation about an image", 2, followup),
    "known": Workload("a known image behind new text", 2, known),
    "text": Workload("concurrent requests without images", 0, text),
    "stall": Workload("longest gap of a running stream while an image arrives", 2, stall),
}
