"""Traffic workloads: an open loop, a closed loop, conversations, and the replay of a trace."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fovea.bench.context import Message, WorkloadContext, user_message
from fovea.bench.drive import closed_loop, open_loop
from fovea.bench.measure import Round
from fovea.bench.sample import BenchRequest, Sample
from fovea.bench.settings import Traffic
from fovea.core.trace import Trace, TraceRequest, generate

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
    """Send requests from `traffic.clients` clients, each of which waits for its answer."""
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
