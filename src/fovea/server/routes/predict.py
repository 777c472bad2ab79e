"""/v1/predict and /invocations: the contracts of Vertex AI and SageMaker for containers.

Both take the same bodies: several requests at once as `instances`, or one chat or text completion, which can
be streamed. /v1/embeddings is refused with the reason.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from pydantic import Field

from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.api.wire import Body
from fovea.core.errors import InvalidRequest
from fovea.server.request import Reply, Request
from fovea.server.routes.chat import chat_completions
from fovea.server.routes.completions import completions
from fovea.server.routing import Routes

routes = Routes()
MAX_INSTANCES = 64


class PredictRequest(Body):
    """Several requests at once, in Vertex AI's form."""

    instances: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_INSTANCES)] = Field(
        description="Bodies of chat completions, or of text completions if they have a `prompt`."
    )
    parameters: dict[str, Any] | None = Field(
        default=None, description="Fields for every instance that does not have them itself."
    )


class EmbeddingsRequest(Body):
    """A request for embeddings, which this server does not make."""


@routes.post("/invocations", bodies=(PredictRequest, CompletionRequest, ChatRequest), streams=True)
@routes.post("/v1/predict", bodies=(PredictRequest, CompletionRequest, ChatRequest), streams=True)
async def predict(
    request: Request, body: PredictRequest | CompletionRequest | ChatRequest
) -> dict[str, Any] | None:
    """Answer one completion, or several requests at once. If one fails, the answer is its error."""
    if isinstance(body, ChatRequest):
        await chat_completions(request, body)
        return None
    if isinstance(body, CompletionRequest):
        await completions(request, body)
        return None
    return await _predictions(request, body)


async def _predictions(request: Request, body: PredictRequest) -> dict[str, Any]:
    size, most = len(json.dumps(body.parameters or {})), 1 << 20
    if size * len(body.instances) > most:
        raise InvalidRequest(
            f"parameters have {size} characters for each of {len(body.instances)} instances; accepted: "
            f"{most} in all",
            param="parameters",
        )
    replies = await _answer_all(request, body)
    return {"predictions": [json.loads(reply.body) for reply in replies]}


@routes.post("/v1/embeddings", bodies=(EmbeddingsRequest,), shown=False)
async def embeddings(request: Request, body: EmbeddingsRequest) -> None:
    """Refuse: a model that was trained to write has no embeddings that mean anything to compare."""
    raise InvalidRequest(
        "this model makes no embeddings: it was trained to write text, and its inner states do not tell how "
        "alike two inputs are; use a model that was trained for embeddings",
        code="unsupported_route",
    )


async def _answer_all(request: Request, body: PredictRequest) -> list[Reply]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_answer(request, number, {**(body.parameters or {}), **instance}))
                for number, instance in enumerate(body.instances)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _answer(request: Request, number: int, instance: dict[str, Any]) -> Reply:
    if instance.get("stream"):
        raise InvalidRequest(
            f"instances[{number}].stream: predictions are not streamed", param=f"instances[{number}].stream"
        )
    path = "/v1/completions" if "prompt" in instance else "/v1/chat/completions"
    reply = await request.state.app.call(
        path, json.dumps(instance).encode(), request.caller, request.request_id, request.speaks_for
    )
    request.prompt_tokens += reply.prompt_tokens
    request.completion_tokens += reply.completion_tokens
    if reply.status == 200:
        return reply
    error = json.loads(reply.body)["error"]
    refused = InvalidRequest(f"instances[{number}]: {error['message']}", code=error["code"])
    refused.status, refused.kind = reply.status, error["type"]
    refused.param = f"instances[{number}]" + (f".{error['param']}" if error["param"] else "")
    raise refused
