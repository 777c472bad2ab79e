"""/peer/work and /peer/release: work for another engine, which fetches the results when they are offered.

The answer is a stream of lines of JSON, see `engine.peers.client`. The key of peers opens it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from fovea.api.peers import PeerRelease, PeerWork
from fovea.core.errors import Forbidden, FoveaError, InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import Delta, GenerationRequest, Offering, PlannedPart, PlannedPrompt
from fovea.server.generation import Generation
from fovea.server.request import Request
from fovea.server.routing import Routes

NEWS_S = 1.0
"""Seconds without an offer after which the asking engine is told that this one is still there."""
LINE_OFFERS = 64
"""Most offers of a line. The asking engine has the values of one line in memory at a time, and refuses long
lines; after a prefix that is cached here, thousands of values are ready at once."""
HEADERS = {"content-type": "application/x-ndjson", "cache-control": "no-store"}
PREFILLING = ("all", "prefill", "prefill-decode")
ROLES = {"encode": (*PREFILLING, "encode"), "prefill": PREFILLING}
"""Roles of engines that take each kind of work."""
routes = Routes()
log = logging.getLogger("fovea.server")


@routes.post("/peer/work", bodies=(PeerWork,), shown=False)
async def work(request: Request, body: PeerWork) -> None:
    """Encode images or compute a prompt, and offer the results."""
    state = request.state
    role = state.settings.role
    if role not in ROLES[body.kind]:
        raise Forbidden(f"this engine has the role {role}, which does no {body.kind}", code="role")
    prefills = body.kind == "prefill"
    if prefills and (body.first is None or not body.ids):
        raise InvalidRequest("prefill needs ids, and the number of the first token in first", param="first")
    request.reserve(1)
    urls, names = [image.url for image in body.images], [f"images[{i}].url" for i in range(len(body.images))]
    deadline = request.deadline(body.timeout)
    bundle = await deadline.limit(state.media.load_timed(urls, names, body.salt))
    parts = zip(bundle.images, (image.plan for image in body.images), strict=True)
    asked = GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=PlannedPrompt(tuple(body.ids), tuple(PlannedPart(*part) for part in parts)),
        sampling=SamplingParams(temperature=0, max_tokens=1),
        cache_salt=body.salt,
        speculate=False,
        timeout=deadline.remaining,
        encode_only=not prefills,
        priority=body.priority,
        fetch_s=bundle.wait.fetch_s,
        client=body.client,
        offering=Offering(body.layout, body.road, body.first if prefills else None, tuple(body.outputs)),
    )
    await _answer(request, Generation(request, asked).deltas())


@routes.post("/peer/release", bodies=(PeerRelease,), shown=False)
async def release(request: Request, body: PeerRelease) -> dict[str, Any]:
    """End offers whose values were fetched, for connectors that do not notice it."""
    await request.state.engine.release_offers(body.offers)
    return {}


async def _answer(request: Request, deltas: AsyncGenerator[Delta, None]) -> None:
    """Send the offers. An error before the first of them becomes a status, a later one a line."""
    try:
        async with aclosing(deltas):
            await _send_offers(request, deltas)
    except Exception as error:
        if not request.status:
            raise
        if not isinstance(error, FoveaError):
            log.error("work for a peer failed", exc_info=error)
        text = error.message if isinstance(error, FoveaError) else "the work failed; see the peer's log"
        refused = isinstance(error, InvalidRequest)  # another request may be done as well as ever
        await _send(request, {"error": text, "refused": refused}, more=False)


async def _send_offers(request: Request, deltas: AsyncGenerator[Delta, None]) -> None:
    cached, task = 0, asyncio.ensure_future(anext(deltas, None))
    try:
        while True:
            await asyncio.wait({task}, timeout=NEWS_S)
            if not task.done():
                await _send(request, {})
                continue
            delta = task.result()
            if delta is None:
                break
            cached = delta.cached_tokens
            for first in range(0, len(delta.offers), LINE_OFFERS):
                await _send(request, {"offers": delta.offers[first : first + LINE_OFFERS]})
            task = asyncio.ensure_future(anext(deltas, None))
    finally:
        if not task.done():  # a generator cannot be closed while it computes a delta
            task.cancel()
            with suppress(asyncio.CancelledError, FoveaError):
                await task
    await _send(request, {"done": True, "cached": cached}, more=False)


async def _send(request: Request, line: dict[str, Any], *, more: bool = True) -> None:
    if not request.status:
        await request.start(200, HEADERS)
    await request.write(json.dumps(line).encode() + b"\n", more=more)
