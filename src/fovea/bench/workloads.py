"""Workloads: fixed ones, and traffic as an open loop, a closed loop, conversations or the replay of a trace.

Each of the fixed ones measures one property of a server, with contents that no cache holds yet. In an open
loop requests are sent at given times, however slow the server is. A request that is sent late is timed from
when it was due, so a server that stalls is charged for all requests that were due meanwhile (no "coordinated
omission"). In a closed loop a client sends its next request when it has its answer, so a slow server gets
fewer requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from fovea.bench.context import Message, WorkloadContext, user_message
from fovea.bench.measure import BenchRequest, Failure, Round, Sample
from fovea.bench.settings import Traffic
from fovea.core.trace import Trace, TraceRequest, generate

T = TypeVar("T")
Request = TypeVar("Request")
LEAD_S = 0.05
"""Seconds from the start of an open loop to its time 0, so that the first tasks can be created before they
are due.
"""
TICK_S = 0.02
"""Seconds between two measurements of the event loop's lag and processor time."""


async def open_loop(
    requests: Sequence[tuple[float, Request]],
    send: Callable[[Request, float], Awaitable[T]],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[T]:
    """Send every request at its time and return the results in the order of the requests.

    requests: (seconds from the start, request), ordered by time.
    send: called with a request and the time on `clock` at which it was due.
    """
    start = clock() + LEAD_S
    tasks: list[asyncio.Task[T]] = []

    async def send_one(request: Request, due: float) -> T:
        return await send(request, due)

    async with asyncio.TaskGroup() as group:
        for at, request in requests:
            while (wait := start + at - clock()) > 0:
                await sleep(wait)
            tasks.append(group.create_task(send_one(request, start + at)))
            # Let the new task run now. Otherwise requests due at one moment are sent only after all tasks
            # exist.
            await sleep(0)
    return [task.result() for task in tasks]


async def closed_loop(calls: Iterable[Callable[[], Awaitable[T]]], clients: int) -> list[T]:
    """Run all calls, `clients` at a time, and return the results in the order of the calls.

    Each client takes the next call when its previous one has returned.
    """
    queue = enumerate(calls)
    results: dict[int, T] = {}

    async def client() -> None:
        for number, call in queue:
            results[number] = await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [results[number] for number in sorted(results)]


@dataclass(slots=True)
class Lag:
    """Delays of the load generator's own event loop, and its processor time, while requests ran.

    Measured times may be too long by as much as the delays.

    delays: one value per tick, in seconds.
    seconds, cpu_s: time that passed, and processor time of this process, in all these ticks.
    """

    delays: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def core_share(self) -> float:
        """Share of one core that the load generator used while requests ran; nan without any tick."""
        return self.cpu_s / self.seconds if self.seconds else math.nan


@contextlib.asynccontextmanager
async def measure_lag(
    clock: Callable[[], float], busy: Callable[[], bool], cpu: Callable[[], float] = time.process_time
) -> AsyncIterator[Lag]:
    """Measure the event loop's lag and processor time every TICK_S seconds until the block ends.

    busy: whether a request is running. Other times do not count: generating pictures also blocks the loop,
        but falsifies no measurement.
    cpu: processor time of this process, in seconds.
    """
    lag = Lag()

    async def tick() -> None:
        while True:
            before, cpu_before, was_busy = clock(), cpu(), busy()
            await asyncio.sleep(TICK_S)
            if was_busy and busy():
                seconds = clock() - before
                lag.delays.append(max(0.0, seconds - TICK_S))
                lag.seconds += seconds
                lag.cpu_s += cpu() - cpu_before

    task = asyncio.create_task(tick())
    try:
        yield lag
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


FIRST_TURN, LATER_TURNS = "first turn", "later turns"


async def play_open(context: WorkloadContext, traffic: Traffic, rate: float) -> Round:
    """Send requests at generated arrival times. rate: requests per second."""
    return await play_trace(context, generate(traffic.load(context.shape, rate)))


async def play_trace(context: WorkloadContext, trace: Trace) -> Round:
    """Send the requests of a trace at its times."""
    requests = await build_requests(context, trace)
    times = [request.at for request in trace]
    schedule = list(zip(times, requests, strict=True))
    return Round(await open_loop(schedule, context.send, clock=context.client.clock))


async def play_closed(context: WorkloadContext, traffic: Traffic) -> Round:
    """Send requests from `traffic.clients` clients; each waits for its answer."""
    requests = await build_requests(context, generate(traffic.load(context.shape, 1.0)))
    return Round(await closed_loop([partial(context.send, request) for request in requests], traffic.clients))


async def play_chat(context: WorkloadContext, traffic: Traffic) -> Round:
    """Hold conversations, each about a new image, that contain the server's own answers.

    A conversation ends early when one of its requests fails.
    """
    count = math.ceil(traffic.requests / traffic.turns)
    first_turns = [replace(context.about(await context.picture()), label=FIRST_TURN) for _ in range(count)]
    calls = [partial(_converse, context, traffic, request) for request in first_turns]
    conversations = await closed_loop(calls, traffic.clients)
    return Round([sample for conversation in conversations for sample in conversation])


async def _converse(context: WorkloadContext, traffic: Traffic, request: BenchRequest) -> list[Sample]:
    samples = [await context.send(request)]
    for _ in range(1, traffic.turns):
        if not samples[-1].succeeded:
            break
        await asyncio.sleep(traffic.think)
        request = replace(context.after(request, samples[-1]), label=LATER_TURNS)
        samples.append(await context.send(request))
    return samples


async def build_requests(context: WorkloadContext, trace: Trace) -> list[BenchRequest]:
    """Build all requests of a trace, pictures included, so that each can be sent as soon as it is due."""
    urls: dict[tuple[str, int], str] = {}
    requests = []
    for request in trace:
        label = class_of(request, urls)
        for key, tokens in request.images:
            if (key, tokens) not in urls:
                urls[key, tokens] = await context.picture(key, tokens)
        requests.append(_build_request(context, request, label, [urls[image] for image in request.images]))
    return requests


def class_of(request: TraceRequest, urls: dict[tuple[str, int], str]) -> str:
    """The class in which a request is counted: "text", "known image" or "new image".

    urls: the pictures of earlier requests in this run. A request with any picture that is not among them
        counts as "new image".
    """
    if not request.images:
        return "text"
    return "known image" if all(image in urls for image in request.images) else "new image"


def _build_request(
    context: WorkloadContext, request: TraceRequest, label: str, urls: Sequence[str]
) -> BenchRequest:
    message = user_message(context.content.text(request.text), urls)
    system: tuple[Message, ...] = ()
    if request.system:
        system = ({"role": "system", "content": context.content.system(request.system)},)
    return BenchRequest(
        (*system, message), request.output, label, len(urls), request.timeout, request.priority
    )


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
