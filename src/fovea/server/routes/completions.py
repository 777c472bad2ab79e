"""/v1/completions: continuation of text or token ids, without a chat template."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fovea.api.bodies.base import BodyOptions
from fovea.api.bodies.text import CompletionBodies, best_choices, with_prompt
from fovea.api.convert import completion_prompts, sampling, wire_names
from fovea.api.schema import CompletionRequest
from fovea.core.errors import InvalidRequest
from fovea.core.types import Completion, GenerationRequest, Prompt, TextPrompt
from fovea.server.answer import collect_answer, while_connected
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import GENERATES
from fovea.server.json_answers import answer_response
from fovea.server.reservations import Reservation
from fovea.server.state import ServerState, cache_scope_of, state_of
from fovea.server.streaming import stream_response

router = APIRouter(route_class=BodyRoute)
WHOLE = ("best_of", "echo")
"""Fields whose answers cannot be streamed."""
MOST_SCORED = 256
"""Most prompts times entries for each of their tokens, of requests for log probabilities of prompts."""
USUAL_TOKENS = 16
"""Longest answer if `max_tokens` is omitted: OpenAI's default at this route."""


@router.post("/v1/completions", responses=GENERATES)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue each prompt."""
    state = state_of(http)
    options = BodyOptions.of(body, state.system_fingerprint)
    bodies = CompletionBodies(state.check_model(body.model), options)
    with wire_names(body):
        requests = _requests(state, body, cache_scope_of(http, body.cache_salt).salt)
        with state.reservations.reserve(sum(request.sampling.n for request in requests)) as reservation:
            if not body.stream:
                answers = await while_connected(http, _answer_all(state, requests, reservation))
                answers = [
                    await _finished(state, body, request.prompt, answer)
                    for request, answer in zip(requests, answers, strict=True)
                ]
                return await answer_response(bodies, answers)
            if len(requests) > 1:
                raise InvalidRequest("a stream takes one prompt", param="prompt")
            usage = bool(body.stream_options and body.stream_options.include_usage)
            unstreamed = [name for name in WHOLE if getattr(body, name)]
            if unstreamed:
                raise InvalidRequest(f"{unstreamed[0]} needs stream: false", param=unstreamed[0])
            return await stream_response(state, http, requests[0], reservation, bodies, usage)


def _requests(state: ServerState, body: CompletionRequest, salt: str) -> list[GenerationRequest]:
    params = sampling(_asked(body), state.client.info.default_sampling)
    prompts = completion_prompts(body)
    if params.prompt_logprobs is not None and len(prompts) * (1 + params.prompt_logprobs) > MOST_SCORED:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {params.prompt_logprobs} most likely tokens each; accepted: "
            f"prompts times one more than these up to {MOST_SCORED}",
            param="prompt",
        )
    return [
        GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=params,
            cache_salt=salt,
            timeout=state.timeout(body.timeout),
            priority=body.priority or 0,
            usual_tokens=None if body.max_tokens == -1 else USUAL_TOKENS,
            return_prompt_ids=bool(body.return_token_ids or body.echo),
        )
        for prompt in prompts
    ]


def _asked(body: CompletionRequest) -> CompletionRequest:
    """The request as the engine has to answer it, so that `_finished` can give what was asked for."""
    changes: dict[str, Any] = {}
    if body.max_tokens == 0:
        if not body.echo:
            raise InvalidRequest("max_tokens is 0; accepted: at least 1 without echo", param="max_tokens")
        changes["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.best_of is not None and body.best_of != (body.n or 1):
        if body.best_of < (body.n or 1):
            raise InvalidRequest(f"best_of is {body.best_of}; accepted: at least n", param="best_of")
        changes |= {"n": body.best_of, "logprobs": body.logprobs or 0}
    return body.model_copy(update=changes)


async def _finished(
    state: ServerState, body: CompletionRequest, prompt: Prompt, answer: Completion
) -> Completion:
    """Leave out the choices that are not among the best, and put the prompt before the text."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        answer = best_choices(answer, body.n or 1, logprobs=body.logprobs is not None)
    if body.echo:
        if isinstance(prompt, TextPrompt):
            text = prompt.text  # tokens may stand for other characters (NFC)
        else:
            text = await state.client.detokenize(answer.prompt_ids)
        first = await state.client.detokenize(answer.prompt_ids[:1])
        answer = with_prompt(answer, text, first, generated=body.max_tokens != 0)
    return answer


async def _answer_all(
    state: ServerState, requests: list[GenerationRequest], reservation: Reservation
) -> list[Completion]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect_answer(state, request, reservation)) for request in requests]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
