"""/v1/models, /tokenize, /detokenize, and routes for operators: /health, /ready, /version, /metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fovea import __version__
from fovea.api.convert import chat_prompt, wire_names
from fovea.api.explain import shorten
from fovea.api.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from fovea.core.errors import InvalidRequest, NotFound, Unavailable
from fovea.core.types import Prompt, TextPrompt
from fovea.server.answer import Deadline, while_connected
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import ERRORS, NAMED
from fovea.server.errors import response
from fovea.server.media import load_media
from fovea.server.state import ServerState, cache_scope_of, state_of

router = APIRouter(route_class=BodyRoute)


@router.get("/v1/models", responses=NAMED)
async def models(http: Request) -> dict[str, Any]:
    """List the served model. There is always exactly one."""
    return {"object": "list", "data": [_model_object(state_of(http))]}


@router.get("/v1/models/{name:path}", responses=NAMED)
async def model(name: str, http: Request) -> dict[str, Any]:
    """Describe the served model."""
    state = state_of(http)
    if name != state.client.info.name:
        raise NotFound(
            f"model {shorten(name)} is not served here; served: {state.client.info.name}",
            code="model_not_found",
        )
    return _model_object(state)


@router.post("/tokenize", responses=ERRORS)
async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
    """Return the token ids of a prompt or of a conversation, visual tokens included.

    It loads and plans images like a request for an answer. So it takes a place, has the server's timeout, and
    ends when its client leaves.
    """
    state = state_of(http)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    deadline = Deadline(state.timeout(None))
    with wire_names(body), state.reservations.reserve(1):
        prompt = await while_connected(http, deadline.limit_loading(_prompt(state, body, http)))
        tokens = deadline.limit(state.client.tokenize(prompt), "its prompt was tokenized")
        ids = await while_connected(http, tokens)
    return {"tokens": ids, "count": len(ids), "max_model_len": state.client.info.max_context}


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, Any]:
    """Return the text of token ids, special tokens included."""
    state = state_of(http)
    state.check_model(body.model)
    return {"prompt": await while_connected(http, state.client.detokenize(body.tokens))}


async def _prompt(state: ServerState, body: TokenizeRequest, http: Request) -> Prompt:
    """Load the images and videos of the messages, if there are any, and build the prompt."""
    if body.messages is None:
        return TextPrompt(body.prompt or "")
    chat = ChatRequest(
        messages=body.messages,
        max_pixels=body.max_pixels,
        min_pixels=body.min_pixels,
        video_pruning_rate=body.video_pruning_rate,
        visual_tokens=body.visual_tokens,
    )
    images, videos = await load_media(state, chat.messages, cache_scope_of(http, body.cache_salt))
    return chat_prompt(chat, images.images, videos.videos)


@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/v2/health/live", methods=["GET", "HEAD"], include_in_schema=False)
async def health(http: Request) -> Response:
    """Tell whether the process runs, even if it is still loading: /ready tells whether it serves requests.

    The status is 503 only if the engine has stopped by itself, so that a supervisor restarts the process.
    """
    state = state_of(http)
    if state.client.status == "stopped" and not state.draining:
        return response(Unavailable(state.unavailable() or "the engine has stopped"))
    return JSONResponse({"status": "ok"})


@router.api_route("/ping", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/v2/health/ready", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/ready", methods=["GET", "HEAD"], include_in_schema=False)
async def ready(http: Request) -> Response:
    """Tell whether requests are served now: status 200, or 503 with the reason.

    SageMaker asks /ping, and sends requests as soon as the status is 200.
    """
    state = state_of(http)
    reason = state.unavailable()
    if reason is not None:
        return response(Unavailable(reason))
    return JSONResponse({"status": "ready", "model": state.client.info.name})


@router.get("/version", include_in_schema=False)
async def version() -> dict[str, str]:
    """Return the version of Fovea."""
    return {"version": __version__}


@router.get("/metrics", include_in_schema=False)
async def scrape(http: Request) -> Response:
    """Return all metrics in the formats of Prometheus."""
    metrics = state_of(http).metrics
    await metrics.refresh()
    body, media_type = metrics.exposition(http.headers.get("accept", ""))
    return Response(body, media_type=media_type)


def _model_object(state: ServerState) -> dict[str, Any]:
    info = state.client.info
    return {
        "id": info.name,
        "object": "model",
        "type": "model",
        "display_name": info.name,
        "created": info.created,
        "created_at": datetime.fromtimestamp(info.created, UTC).isoformat(),
        "owned_by": "fovea",
        "max_model_len": info.max_context,
        "input_modalities": list(info.input_modalities),
        "output_modalities": ["text"],
        "architecture": info.architecture,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "quantization": info.quantization,
    }
