"""/v1/completions: continuation of text or token ids, without a chat template."""

from __future__ import annotations

import uuid
from typing import Any

from fovea.api.completion_bodies import BodyOptions, CompletionBodies, best_choices, with_prompt
from fovea.api.convert import completion_prompts, sampling, wire_names
from fovea.api.schema import CompletionRequest
from fovea.core.errors import InvalidRequest
from fovea.core.types import Completion, GenerationRequest, Prompt, TextPrompt
from fovea.server.generation import answer_all, stream
from fovea.server.json_answers import send_answers
from fovea.server.request import Request
from fovea.server.routing import Routes
from fovea.server.state import ServerState

routes = Routes()
WHOLE = ("best_of", "echo")
"""Fields whose answers cannot be streamed."""
MOST_SCORED = 256
"""Most prompts times entries for each of their tokens, of requests for log probabilities of prompts."""
USUAL_TOKENS = 16
"""Longest answer if `max_tokens` is omitted: OpenAI's default at this route."""


@routes.post("/v1/completions", bodies=(CompletionRequest,), streams=True)
async def completions(request: Request, body: CompletionRequest) -> None:
    """Continue each prompt."""
    state = request.state
    options = BodyOptions.of(body, state.system_fingerprint)
    bodies = CompletionBodies(state.check_model(body.model), options)
    with wire_names(body):
        asked = generation_requests(request, body)
        request.reserve(sum(one.sampling.n for one in asked), body.priority or 0)
        if not body.stream:
            answers = [
                await _finished(state, body, one.prompt, answer)
                for one, answer in zip(asked, await answer_all(request, asked), strict=True)
            ]
            await send_answers(request, bodies, answers)
            return
        if len(asked) > 1:
            raise InvalidRequest("a stream takes one prompt", param="prompt")
        usage = bool(body.stream_options and body.stream_options.include_usage)
        unstreamed = [name for name in WHOLE if getattr(body, name)]
        if unstreamed:
            raise InvalidRequest(f"{unstreamed[0]} needs stream: false", param=unstreamed[0])
        await stream(request, asked[0], bodies, include_usage=usage)


def generation_requests(request: Request, body: CompletionRequest) -> list[GenerationRequest]:
    """Return the requests for the engine, one for each prompt. Raises InvalidRequest."""
    params = sampling(_as_computed(body), request.state.engine.info.default_sampling)
    prompts = completion_prompts(body)
    if params.prompt_logprobs is not None and len(prompts) * (1 + params.prompt_logprobs) > MOST_SCORED:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {params.prompt_logprobs} most likely tokens each; accepted: "
            f"prompts times one more than these up to {MOST_SCORED}",
            param="prompt",
        )
    timeout = request.deadline(body.timeout).remaining
    salt = request.cache_scope(body.cache_salt).salt
    return [
        GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=params,
            cache_salt=salt,
            timeout=timeout,
            kv_keep=body.kv_keep,
            speculate=body.speculate is not False,
            priority=body.priority or 0,
            usual_tokens=None if body.max_tokens == -1 else USUAL_TOKENS,
            return_prompt_ids=bool(body.return_token_ids or body.echo),
        )
        for prompt in prompts
    ]


def _as_computed(body: CompletionRequest) -> CompletionRequest:
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
            raise InvalidRequest(
                f"best_of is {body.best_of}; accepted: at least {body.n or 1} (n)", param="best_of"
            )
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
            text = await state.engine.detokenize(answer.prompt_ids)
        first = await state.engine.detokenize(answer.prompt_ids[:1])
        answer = with_prompt(answer, text, first, generated=body.max_tokens != 0)
    return answer
