"""/v1/completions: text as it is, no template."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fovea.api.convert import completion_prompts, sampling, wire_names
from fovea.api.responses import CompletionBodies
from fovea.api.schema import CompletionRequest
from fovea.core.errors import InvalidRequest
from fovea.core.types import Completion, GenerationRequest
from fovea.server.answer import while_connected, whole
from fovea.server.docs import GENERATES
from fovea.server.room import Room
from fovea.server.state import ServerState, share_of, state_of
from fovea.server.streaming import stream_response

router = APIRouter()
MAX_PROMPTS = 64
USUAL_TOKENS = 16
"""OpenAI's default of max_tokens at this route."""


@router.post("/v1/completions", responses=GENERATES)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Text that continues each prompt."""
    state = state_of(http)
    bodies = CompletionBodies(state.check_model(body.model))
    with wire_names(body):
        requests = _requests(state, body, share_of(http, body.cache_salt).salt)
        with state.rooms.hold(sum(request.sampling.n for request in requests)) as room:
            if not body.stream:
                answers = await while_connected(http, _all(state, requests, room))
                return JSONResponse(bodies.complete(answers))
            if len(requests) > 1:
                raise InvalidRequest("a stream takes one prompt", param="prompt")
            return await stream_response(state, http, requests[0], room, bodies, body)


def _requests(state: ServerState, body: CompletionRequest, salt: str) -> list[GenerationRequest]:
    params = sampling(body, state.client.info.default_sampling)
    prompts = completion_prompts(body)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompts)} prompts; accepted: at most {MAX_PROMPTS}", param="prompt")
    return [
        GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=params,
            cache_salt=salt,
            timeout=state.timeout(body.timeout),
            priority=body.priority or 0,
            usual_tokens=USUAL_TOKENS,
        )
        for prompt in prompts
    ]


async def _all(state: ServerState, requests: list[GenerationRequest], room: Room) -> list[Completion]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(whole(state, request, room)) for request in requests]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
