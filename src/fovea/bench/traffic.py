"""Loads: requests at their times (open loop), by so many clients (closed loop), in conversations, or from a trace."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fovea.bench.context import Stage, turn
from fovea.bench.drive import closed_loop, open_loop
from fovea.bench.measure import Round
from fovea.bench.sample import Ask, Sample
from fovea.bench.settings import Traffic
from fovea.core.trace import Trace, TraceRequest
from fovea.core.workload import generate

FIRST_TURN, LATER_TURNS = "first turn", "later turns"


async def play_open(stage: Stage, traffic: Traffic, rate: float) -> Round:
    return await play_trace(stage, generate(traffic.load(stage.shape, rate)))


async def play_trace(stage: Stage, trace: Trace) -> Round:
    asks = await asks_of(stage, trace)
    times = [request.at for request in trace]
    return Round(await open_loop(list(zip(times, asks, strict=True)), stage.send, clock=stage.client.clock))


async def play_closed(stage: Stage, traffic: Traffic) -> Round:
    asks = await asks_of(stage, generate(traffic.load(stage.shape, 1.0)))
    return Round(await closed_loop([partial(stage.send, ask) for ask in asks], traffic.clients))


async def play_chat(stage: Stage, traffic: Traffic) -> Round:
    """Conversations about a new image each, on the server's own answers; one ends early when a request fails."""
    count = math.ceil(traffic.requests / traffic.turns)
    openings = [replace(stage.about(await stage.picture()), label=FIRST_TURN) for _ in range(count)]
    talks = await closed_loop([partial(_converse, stage, traffic, ask) for ask in openings], traffic.clients)
    return Round([sample for talk in talks for sample in talk])


async def _converse(stage: Stage, traffic: Traffic, ask: Ask) -> list[Sample]:
    samples = [await stage.send(ask)]
    for _ in range(1, traffic.turns):
        if not samples[-1].whole:
            break
        await asyncio.sleep(traffic.think)
        ask = replace(stage.after(ask, samples[-1]), label=LATER_TURNS)
        samples.append(await stage.send(ask))
    return samples


async def asks_of(stage: Stage, trace: Trace) -> list[Ask]:
    """The requests, with all pictures made: nothing is left to do when one is due."""
    urls: dict[tuple[str, int], str] = {}
    asks = []
    for request in trace:
        label = class_of(request, urls)
        for key, tokens in request.images:
            if (key, tokens) not in urls:
                urls[key, tokens] = await stage.picture(key, tokens)
        asks.append(_ask(stage, request, label, [urls[image] for image in request.images]))
    return asks


def class_of(request: TraceRequest, asked: dict[tuple[str, int], str]) -> str:
    """A picture is new to the server when it is asked about for the first time in this run."""
    if not request.images:
        return "text"
    return "known image" if all(image in asked for image in request.images) else "new image"


def _ask(stage: Stage, request: TraceRequest, label: str, urls: Sequence[str]) -> Ask:
    message = turn(stage.content.text(request.text), urls)
    system = ({"role": "system", "content": stage.content.system(request.system)},) if request.system else ()
    return Ask((*system, message), request.output, label, len(urls), request.timeout, request.priority)
