"""/v1/chat/completions: images and videos in, text out, whole or as a stream."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fovea.api.convert import chat_prompt, image_references, sampling, video_references, wire_names
from fovea.api.responses import ChatBodies
from fovea.api.schema import ChatRequest
from fovea.core.types import GenerationRequest
from fovea.server.answer import while_connected, whole, within
from fovea.server.docs import GENERATES
from fovea.server.images import load_images
from fovea.server.state import ServerState, state_of
from fovea.server.streaming import stream_response

router = APIRouter()


@router.post("/v1/chat/completions", responses=GENERATES)
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """An answer about the images and text of a conversation."""
    state = state_of(http)
    bodies = ChatBodies(state.check_model(body.model))
    with wire_names(body):
        request = await while_connected(http, _request(state, body))
        if not body.stream:
            answer = await while_connected(http, whole(state, request))
            return JSONResponse(bodies.whole(answer))
        return await stream_response(state, http, request, bodies, body)


async def _request(state: ServerState, body: ChatRequest) -> GenerationRequest:
    """Images and videos count against the request's timeout; the engine gets what they left of it."""
    params = sampling(body, state.client.info.default_sampling)
    state.client.check_room(params.n)
    references = image_references(body.messages)
    timeout = state.timeout(body.timeout)
    started = time.monotonic()
    urls, places = [r.url for r in references], [r.param for r in references]
    loaded = await within(timeout, load_images(state, urls, places))
    clips = video_references(body.messages)
    left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
    videos, opening_s = await within(
        left, state.media.open_videos([r.url for r in clips], [r.param for r in clips])
    )
    left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
    state.metrics.images(len(references))
    slowest = max((timing.fetch_s + timing.decode_s for timing in loaded.timings), default=0.0)
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=chat_prompt(body, loaded.images, videos),
        sampling=params,
        cache_salt=body.cache_salt or "",
        timeout=left,
        priority=body.priority or 0,
        media_s=slowest + opening_s,
    )
