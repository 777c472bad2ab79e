"""/v1/chat/completions: images and videos in, text out, whole or as a stream."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fovea.api.convert import chat_prompt, sampling, wire_names
from fovea.api.responses import ChatBodies
from fovea.api.schema import ChatRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import GenerationRequest
from fovea.server.answer import Deadline, while_connected, whole
from fovea.server.docs import GENERATES
from fovea.server.media import load_media
from fovea.server.state import ServerState, Share, share_of, state_of
from fovea.server.streaming import stream_response

router = APIRouter()


@router.post("/v1/chat/completions", responses=GENERATES)
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """An answer about the images and text of a conversation."""
    state = state_of(http)
    bodies = ChatBodies(state.check_model(body.model))
    with wire_names(body):
        params = sampling(body, state.client.info.default_sampling)
        with state.rooms.hold(params.n) as room:
            request = await while_connected(
                http, _request(state, body, params, share_of(http, body.cache_salt))
            )
            if not body.stream:
                answer = await while_connected(http, whole(state, request, room))
                return JSONResponse(bodies.complete(answer))
            return await stream_response(state, http, request, room, bodies, body)


async def _request(
    state: ServerState, body: ChatRequest, params: SamplingParams, share: Share
) -> GenerationRequest:
    """Images and videos count against the request's timeout; the engine gets what they left of it."""
    deadline = Deadline(state.timeout(body.timeout))
    loaded, opened = await deadline.reading(load_media(state, body.messages, share))
    state.metrics.count_images(len(loaded.images))
    state.metrics.count_videos(len(opened.videos))
    read, watched = loaded.wait, opened.wait
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=chat_prompt(body, loaded.images, opened.videos),
        sampling=params,
        cache_salt=share.salt,
        timeout=deadline.left,
        priority=body.priority or 0,
        fetch_s=max(read.fetch_s, watched.fetch_s),
        media_decode_s=max(read.decode_s, watched.decode_s),
    )
