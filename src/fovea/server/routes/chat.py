"""/v1/chat/completions: an answer to a conversation with images and videos, complete or as a stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Protocol

from fovea.api.completion_bodies import BodyOptions, ChatBodies
from fovea.api.content import tool_use
from fovea.api.convert import chat_prompt, image_references, sampling, video_references, wire_names
from fovea.api.reading import Reading
from fovea.api.schema import ChatRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import ChatPrompt, GenerationRequest, ImagePart, Prompt
from fovea.dialects.dialect import Dialect, dialect_of
from fovea.dialects.grammar import request_format
from fovea.server.generation import Generation, StreamWriter, stream
from fovea.server.json_answers import Bodies, send_answers
from fovea.server.media import image_paths, load_media
from fovea.server.request import Request
from fovea.server.routing import Routes

IMAGES = "x-fovea-images"
"""Header of an answer with the identities of the request's images, in order, separated by commas."""
MOST_IDENTITIES = 16
"""Identities in that header at most: 64 digits each."""
routes = Routes()


class ChatWriter(Bodies, StreamWriter, Protocol):
    """Writer of complete answers and of streams, in the form of one API."""


@routes.post("/v1/chat/completions", bodies=(ChatRequest,), streams=True)
async def chat_completions(request: Request, body: ChatRequest) -> None:
    """Answer a conversation of text, images and videos."""
    state = request.state
    model = state.check_model(body.model)

    def bodies(reading: Reading) -> ChatBodies:
        return ChatBodies(model, BodyOptions.of(body, state.system_fingerprint), reading)

    await answer_chat(request, body, bodies)


async def answer_chat(
    request: Request, body: ChatRequest, make_bodies: Callable[[Reading], ChatWriter]
) -> None:
    """Answer a conversation in the form of any API.

    make_bodies: returns the writer of the answer, for the way in which answers are read.
    """
    with wire_names(body), image_paths(body.messages):
        params, dialect = chat_params(request, body)
        bodies = make_bodies(Reading(dialect, tool_use(body), body.include_reasoning is not False))
        request.reserve(params.n, body.priority or 0)
        asked = await generation_request(request, body, params)
        request.state.metrics.count_images(len(image_references(body.messages)))
        request.state.metrics.count_videos(len(video_references(body.messages)))
        if identities := _identities(asked.prompt):
            request.extra[IMAGES] = identities
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            await stream(request, asked, bodies, include_usage=usage)
        else:
            await send_answers(request, bodies, [await Generation(request, asked).answer()])


def chat_params(request: Request, body: ChatRequest) -> tuple[SamplingParams, Dialect]:
    """Return the sampling parameters of a conversation, and the dialect in which the model answers it.

    Raises InvalidRequest, which names the wrong field.
    """
    info = request.state.engine.info
    dialect, use = dialect_of(info.tool_format, info.reasons), tool_use(body)
    params = sampling(body, info.default_sampling)
    form = request_format(use, params.format, dialect)
    marks = bool(use.offered and dialect.tools is not None and dialect.tools.special)
    if form is not params.format or marks:
        params = replace(params, format=form, skip_special_tokens=params.skip_special_tokens and not marks)
    return params, dialect


def _identities(prompt: Prompt) -> str:
    """The identities of a prompt's images, for gateways: they learn which picture is behind a URL."""
    messages = prompt.messages if isinstance(prompt, ChatPrompt) else ()
    parts = (part for message in messages for part in message.parts if isinstance(part, ImagePart))
    return ",".join(part.image.identity for part in islice(parts, MOST_IDENTITIES))


async def generation_request(
    request: Request, body: ChatRequest, params: SamplingParams, *, headers_only: bool = False
) -> GenerationRequest:
    """Load the media of a request and build the request for the engine.

    The time for loading counts towards the request's timeout, so the engine gets the rest of it.

    headers_only: whether images have no pixels, because the request is only rendered.
    """
    deadline, scope = request.deadline(body.timeout), request.cache_scope(body.cache_salt)
    images, videos = await deadline.limit(
        load_media(request, body.messages, scope, headers_only=headers_only)
    )
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=chat_prompt(body, images.images, videos.videos),
        sampling=params,
        cache_salt=scope.salt,
        timeout=deadline.remaining,
        kv_keep=body.kv_keep,
        prediction="" if body.prediction is None else body.prediction.text,
        speculate=body.speculate is not False,
        priority=body.priority or 0,
        return_prompt_ids=bool(body.return_token_ids),
        fetch_s=max(images.wait.fetch_s, videos.wait.fetch_s),
        media_decode_s=max(images.wait.decode_s, videos.wait.decode_s),
    )
