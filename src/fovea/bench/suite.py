"""The fixed workloads. Each measures one property of a server, with contents that no cache holds yet."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fovea.bench.context import WorkloadContext
from fovea.bench.measure import Round
from fovea.bench.sample import Failure, Sample

EVENTS_BEFORE = 24
"""Events of the stream after which the image's request is sent (workload stall)."""
STREAM_TOKENS = 1024
"""Length of the stream: longer than any image takes.

The client closes the stream when the image has its answer.
"""
BESIDE_TOKENS = 8
"""Length of the answer about the image."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A fixed workload.

    title: a description for people.
    requests: requests per round; 0: as many as run concurrently (`Shape.concurrency`).
    play: runs one round.
    """

    title: str
    requests: int
    play: Callable[[WorkloadContext], Awaitable[Round]]


async def cold(context: WorkloadContext) -> Round:
    """Send one request about a new image."""
    return Round([await context.send(context.about(await context.picture()))])


async def images(context: WorkloadContext) -> Round:
    """Send concurrent requests, each about a new image of its own."""
    urls = [await context.picture() for _ in range(context.shape.concurrency)]
    return Round(await context.together([context.about(url) for url in urls]))


async def questions(context: WorkloadContext) -> Round:
    """Send concurrent questions about one new image."""
    url = await context.picture()
    return Round(await context.together([context.about(url) for _ in range(context.shape.concurrency)]))


async def followup(context: WorkloadContext) -> Round:
    """Measure the second question of a conversation about an image."""
    request = context.about(await context.picture())
    first = await context.send(request)
    return Round([await context.send(context.after(request, first)) if first.succeeded else first])


async def known(context: WorkloadContext) -> Round:
    """Measure a second request about an image.

    Its new text comes before the image, so it cannot use the KV of the first request, only the encoder
    output.
    """
    url = await context.picture()
    first = await context.send(context.about(url))
    return Round([await context.send(context.about(url, text_first=True)) if first.succeeded else first])


async def text(context: WorkloadContext) -> Round:
    """Send concurrent requests without images."""
    return Round(await context.together([context.about() for _ in range(context.shape.concurrency)]))


async def stall(context: WorkloadContext) -> Round:
    """Send a request about an image while a text stream runs, and measure the stream's longest gap.

    The round's samples are the image's requests. The stream's stall is in its values.
    """
    url = await context.picture()
    running, answered = asyncio.Event(), False

    def on_progress(sample: Sample) -> bool:
        if len(sample.events) >= EVENTS_BEFORE:
            running.set()
        return answered

    request = context.about(max_tokens=STREAM_TOKENS)
    stream = asyncio.create_task(context.send(request, on_progress=on_progress))
    waiting = asyncio.create_task(running.wait())
    await asyncio.wait((stream, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not running.is_set():
        return Round([await stream])
    image = await context.send(context.about(url, max_tokens=BESIDE_TOKENS))
    answered = True
    return stall_round(await stream, image)


def stall_round(stream: Sample, image: Sample) -> Round:
    """The round of a stall: the image's sample with the stream's stall, or only the sample that failed."""
    if image.failure is not None:
        return Round([image])
    if stream.failure is None:
        stream.failure = Failure("short stream", "it ended before the image had its answer")
    return Round([image], stall_values(stream, image)) if stream.failure.kind == "left" else Round([stream])


def stall_values(stream: Sample, image: Sample) -> dict[str, float]:
    """Gaps of the stream in milliseconds.

    stall_ms: the longest gap that overlaps the time from when the image's request was due to its first token.
    median_gap_before_ms: the median gap before that time.
    """
    first = image.events[0]
    gaps = list(zip(stream.events, stream.events[1:], strict=False))
    during = [b - a for a, b in gaps if b > image.due_at and a < first]
    before = [b - a for a, b in gaps if b <= image.due_at]
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
