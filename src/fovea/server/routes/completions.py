"""/v1/completions: continuation of text or token ids, without a chat template."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fovea.api.bodies import CompletionBodies
from fovea.api.convert import completion_prompts, sampling, wire_names
from fovea.api.schema import CompletionRequest
from fovea.core.errors import InvalidRequest
from fovea.core.types import Completion, GenerationRequest
from fovea.server.answer import collect_answer, while_connected
from fovea.server.bodies.answers import answer_response
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import GENERATES
from fovea.server.reservations import Reservation
from fovea.server.state import ServerState, cache_scope_of, state_of
from fovea.server.streaming import stream_response

router = APIRouter(route_class=BodyRoute)
USUAL_TOKENS = 16
"""Longest answer if `max_tokens` is omitted: OpenAI's default at this route."""


@router.post("/v1/completions", responses=GENERATES)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue each prompt."""
    state = state_of(http)
    bodies = CompletionBodies(state.check_model(body.model), state.system_fingerprint)
    with wire_names(body):
        requests = _requests(state, body, cache_scope_of(http, body.cache_salt).salt)
        with state.reservations.reserve(sum(request.sampling.n for request in requests)) as reservation:
            if not body.stream:
                answers = await while_connected(http, _answer_all(state, requests, reservation))
                return await answer_response(bodies, answers)
            if len(requests) > 1:
                raise InvalidRequest("a stream takes one prompt", param="prompt")
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return await stream_response(state, http, requests[0], reservation, bodies, usage)


def _requests(state: ServerState, body: CompletionRequest, salt: str) -> list[GenerationRequest]:
    params = sampling(body, state.client.info.default_sampling)
    prompts = completion_prompts(body)
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


async def _answer_all(
    state: ServerState, requests: list[GenerationRequest], reservation: Reservation
) -> list[Completion]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect_answer(state, request, reservation)) for request in requests]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
