"""/v1/predict and /invocations: the contracts of Vertex AI and SageMaker for containers.

Both take the same bodies: several requests at once as `instances`, or one chat or text completion, which can
be streamed. /v1/embeddings is refused with the reason.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.api.wire import Body
from fovea.core.errors import InvalidRequest
from fovea.server.answer import while_connected
from fovea.server.batch_runner import Reply, call
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import ERRORS, GENERATES
from fovea.server.json_answers import OneLineResponse
from fovea.server.routes.chat import chat_completions
from fovea.server.routes.completions import completions
from fovea.server.state import caller_of

router = APIRouter(route_class=BodyRoute)
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


@router.post("/invocations", responses=GENERATES)
@router.post("/v1/predict", responses=GENERATES)
async def predict(body: PredictRequest | CompletionRequest | ChatRequest, http: Request) -> Response:
    """Answer one completion, or several requests at once. If one fails, the answer is its error."""
    if isinstance(body, ChatRequest):
        return await chat_completions(body, http)
    if isinstance(body, CompletionRequest):
        return await completions(body, http)
    return OneLineResponse(await _predictions(body, http))


async def _predictions(body: PredictRequest, http: Request) -> dict[str, Any]:
    size, most = len(json.dumps(body.parameters or {})), 1 << 20
    if size * len(body.instances) > most:
        raise InvalidRequest(
            f"parameters have {size} characters for each of {len(body.instances)} instances; accepted: "
            f"{most} in all",
            param="parameters",
        )
    replies = await while_connected(http, _answer_all(body, http))
    return {"predictions": [json.loads(reply.body) for reply in replies]}


@router.post("/v1/embeddings", responses=ERRORS, include_in_schema=False)
async def embeddings(body: EmbeddingsRequest) -> None:
    """Refuse: a model that was trained to write has no embeddings that mean anything to compare."""
    raise InvalidRequest(
        "this model makes no embeddings: it was trained to write text, and its inner states do not tell how "
        "alike two inputs are; use a model that was trained for embeddings",
        code="unsupported_route",
    )


async def _answer_all(body: PredictRequest, http: Request) -> list[Reply]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_answer(number, {**(body.parameters or {}), **instance}, http))
                for number, instance in enumerate(body.instances)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _answer(number: int, instance: dict[str, Any], http: Request) -> Reply:
    if instance.get("stream"):
        raise InvalidRequest(
            f"instances[{number}].stream: predictions are not streamed", param=f"instances[{number}].stream"
        )
    path = "/v1/completions" if "prompt" in instance else "/v1/chat/completions"
    reply = await call(http.app, path, json.dumps(instance).encode(), caller_of(http))
    if reply.status == 200:
        return reply
    error = json.loads(reply.body)["error"]
    refused = InvalidRequest(f"instances[{number}]: {error['message']}", code=error["code"])
    refused.status, refused.kind = reply.status, error["type"]
    refused.param = f"instances[{number}]" + (f".{error['param']}" if error["param"] else "")
    raise refused
