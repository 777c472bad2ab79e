"""/v1/chat/completions: an answer to a conversation with images and videos, complete or as a stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fovea.api.bodies.base import BodyOptions
from fovea.api.bodies.chat import ChatBodies
from fovea.api.convert import chat_prompt, sampling, wire_names
from fovea.api.reading import Reading
from fovea.api.schema import ChatRequest
from fovea.api.tools import tool_use
from fovea.core.sampling import SamplingParams
from fovea.core.types import ChatPrompt, GenerationRequest, ImagePart, Prompt
from fovea.dialects.dialect import dialect_of
from fovea.dialects.grammar import request_format
from fovea.server import json_answers
from fovea.server.answer import Deadline, collect_answer, while_connected
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import GENERATES
from fovea.server.json_answers import answer_response
from fovea.server.media import image_paths, load_media
from fovea.server.state import CacheScope, ServerState, cache_scope_of, state_of
from fovea.server.streaming import Bodies, stream_response

IMAGES = "x-fovea-images"
"""Header of an answer with the identities of the request's images, in order, separated by commas."""
MOST_IDENTITIES = 16
"""Identities in that header at most: 64 digits each."""
router = APIRouter(route_class=BodyRoute)


class ChatWriter(json_answers.Bodies, Bodies, Protocol):
    """Writer of complete answers and of streams, in the form of one API."""


@router.post("/v1/chat/completions", responses=GENERATES)
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation of text, images and videos."""
    state = state_of(http)
    model = state.check_model(body.model)

    def bodies(reading: Reading) -> ChatBodies:
        return ChatBodies(model, BodyOptions.of(body, state.system_fingerprint), reading)

    return await answer_chat(state, http, body, bodies)


async def answer_chat(
    state: ServerState, http: Request, body: ChatRequest, make_bodies: Callable[[Reading], ChatWriter]
) -> Response:
    """Answer a conversation in the form of any API.

    make_bodies: returns the writer of the answer, for the way in which answers are read.
    """
    info = state.client.info
    with wire_names(body), image_paths(body.messages):
        dialect, use = dialect_of(info.tool_format, info.reasons), tool_use(body)
        params = sampling(body, info.default_sampling)
        params = replace(params, format=request_format(use, params.format, dialect))
        if use.offered and dialect.tools is not None and dialect.tools.special:
            params = replace(params, skip_special_tokens=False)
        bodies = make_bodies(Reading(dialect, use, body.include_reasoning is not False))
        state.caller.client.check_priority(body.priority or 0)
        with state.reservations.reserve(params.n) as reservation:
            request = await while_connected(
                http, _request(state, body, params, cache_scope_of(http, body.cache_salt))
            )
            if not body.stream:
                answer = await while_connected(http, collect_answer(state, request, reservation))
                response = await answer_response(bodies, [answer])
            else:
                usage = bool(body.stream_options and body.stream_options.include_usage)
                response = await stream_response(state, http, request, reservation, bodies, usage)
            if identities := _identities(request.prompt):
                response.headers[IMAGES] = identities
            return response


def _identities(prompt: Prompt) -> str:
    """The identities of a prompt's images, for gateways: they learn which picture is behind a URL."""
    messages = prompt.messages if isinstance(prompt, ChatPrompt) else ()
    parts = (part for message in messages for part in message.parts if isinstance(part, ImagePart))
    return ",".join(part.image.identity for part in islice(parts, MOST_IDENTITIES))


async def _request(
    state: ServerState, body: ChatRequest, params: SamplingParams, scope: CacheScope
) -> GenerationRequest:
    """Load the media of a request and build the request for the engine.

    The time for loading counts towards the request's timeout, so the engine gets the rest of it.
    """
    deadline = Deadline(state.timeout(body.timeout))
    images, videos = await deadline.limit_loading(load_media(state, body.messages, scope))
    state.metrics.count_images(len(images.images))
    state.metrics.count_videos(len(videos.videos))
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=chat_prompt(body, images.images, videos.videos),
        sampling=params,
        cache_salt=scope.salt,
        timeout=deadline.remaining,
        priority=body.priority or 0,
        return_prompt_ids=bool(body.return_token_ids),
        fetch_s=max(images.wait.fetch_s, videos.wait.fetch_s),
        media_decode_s=max(images.wait.decode_s, videos.wait.decode_s),
    )
