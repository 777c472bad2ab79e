"""/v1/predict: Vertex AI's contract for containers, and /v1/embeddings, which is refused with the reason."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from fovea.api.wire import Body
from fovea.core.errors import InvalidRequest
from fovea.server.answer import while_connected
from fovea.server.batches.call import Reply, call
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import ERRORS
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


@router.post("/v1/predict", responses=ERRORS)
async def predict(body: PredictRequest, http: Request) -> dict[str, Any]:
    """Answer several requests. The first that fails ends them all, with its error."""
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
