"""/v1/chat/completions: images and videos in, text out, whole or as a stream."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fovea.api.convert import chat_prompt, image_references, sampling, video_references, wire_names
from fovea.api.responses import ChatBodies
from fovea.api.schema import ChatRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import GenerationRequest
from fovea.server.answer import Deadline, while_connected, whole
from fovea.server.docs import GENERATES
from fovea.server.images import load_images
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
                return JSONResponse(bodies.whole(answer))
            return await stream_response(state, http, request, room, bodies, body)


async def _request(
    state: ServerState, body: ChatRequest, params: SamplingParams, share: Share
) -> GenerationRequest:
    """Images and videos count against the request's timeout; the engine gets what they left of it."""
    deadline = Deadline(state.timeout(body.timeout))
    pictures, clips = image_references(body.messages), video_references(body.messages)
    loaded = await deadline.reading(
        load_images(state, [r.url for r in pictures], [r.param for r in pictures], share)
    )
    opened = await deadline.reading(
        state.media.open_videos([r.url for r in clips], [r.param for r in clips], share.salt)
    )
    state.metrics.images(len(pictures))
    state.metrics.videos(len(clips))
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=chat_prompt(body, loaded.images, opened.videos),
        sampling=params,
        cache_salt=share.salt,
        timeout=deadline.left,
        priority=body.priority or 0,
        fetch_s=loaded.waited.fetch_s + opened.waited.fetch_s,
        media_decode_s=loaded.waited.decode_s + opened.waited.decode_s,
    )
