"""/v1/models, /tokenize, /detokenize, and routes for operators: /health, /ready, /version, /metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fovea import __version__
from fovea.api.convert import chat_prompt, wire_names
from fovea.api.explain import shorten
from fovea.api.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from fovea.core.errors import InvalidRequest, NotFound, Unavailable
from fovea.core.types import Prompt, TextPrompt
from fovea.server.media import load_media
from fovea.server.request import Request
from fovea.server.routing import Response, Routes
from fovea.server.state import ServerState

routes = Routes()


@routes.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the served model. There is always exactly one."""
    return {"object": "list", "data": [_model_object(request.state)]}


@routes.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe the served model."""
    state = request.state
    if name != state.engine.info.name:
        raise NotFound(
            f"model {shorten(name)} is not served here; served: {state.engine.info.name}",
            code="model_not_found",
        )
    return _model_object(state)


@routes.post("/tokenize", bodies=(TokenizeRequest,))
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Return the token ids of a prompt or of a conversation, visual tokens included.

    It loads and plans images like a request for an answer. So it takes a place, has the server's timeout, and
    ends when its client leaves.
    """
    state = request.state
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    deadline = request.deadline()
    with wire_names(body):
        request.reserve(1)
        prompt = await deadline.limit(_prompt(request, body))
        ids = await deadline.limit(state.engine.tokenize(prompt), "its prompt was tokenized")
    return {"tokens": ids, "count": len(ids), "max_model_len": state.engine.info.max_context}


@routes.post("/detokenize", bodies=(DetokenizeRequest,))
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """Return the text of token ids, special tokens included."""
    state = request.state
    state.check_model(body.model)
    return {"prompt": await state.engine.detokenize(body.tokens)}


async def _prompt(request: Request, body: TokenizeRequest) -> Prompt:
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
    images, videos = await load_media(request, chat.messages, request.cache_scope(body.cache_salt))
    return chat_prompt(chat, images.images, videos.videos)


@routes.page("/health")
@routes.page("/v2/health/live")
async def health(request: Request) -> dict[str, str] | None:
    """Tell whether the process runs, even if it is still loading: /ready tells whether it serves requests.

    The status is 503 only if the engine has stopped by itself, so that a supervisor restarts the process.
    """
    state = request.state
    if state.engine.status == "stopped" and not state.draining:
        await request.refuse_probe(Unavailable(state.unavailable() or "the engine has stopped"))
        return None
    return {"status": "ok"}


@routes.page("/ping")
@routes.page("/v2/health/ready")
@routes.page("/ready")
async def ready(request: Request) -> dict[str, str] | None:
    """Tell whether requests are served now: status 200, or 503 with the reason.

    SageMaker asks /ping, and sends requests as soon as the status is 200. While the model loads, `loading`
    has the loaded bytes of its weights, those of all, and the percentage.
    """
    state = request.state
    reason = state.unavailable()
    if reason is not None:
        await request.refuse_probe(Unavailable(reason), state.loaded)
        return None
    return {"status": "ready", "model": state.engine.info.name}


@routes.get("/version", shown=False)
async def version(request: Request) -> dict[str, str]:
    """Return the version of Fovea."""
    return {"version": __version__}


@routes.get("/metrics", shown=False)
async def scrape(request: Request) -> Response:
    """Return all metrics in the formats of Prometheus."""
    metrics = request.state.metrics
    await metrics.refresh()
    body, media_type = metrics.exposition(request.header(b"accept"))
    return Response(body, media_type)


def _model_object(state: ServerState) -> dict[str, Any]:
    info = state.engine.info
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
        "kv_dtype": info.kv_dtype,
    }
