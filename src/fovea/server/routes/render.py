"""Renders: which token ids, images and places in the prompt the engine would compute for a request now.

Routers ask before they forward a request. Images are fetched, but never decoded; no place in the engine's
queue is taken, and no tokens are counted. `max_renders` limits them separately.
"""

from __future__ import annotations

from fovea.api.convert import wire_names
from fovea.api.messages_request import MessagesRequest, messages_names
from fovea.api.render import render_body
from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.core.errors import InvalidRequest
from fovea.core.types import GenerationRequest, Rendered
from fovea.server.media import image_paths
from fovea.server.request import Deadline, Request
from fovea.server.routes.chat import chat_params, generation_request
from fovea.server.routes.completions import generation_requests
from fovea.server.routes.messages import conversation_of
from fovea.server.routing import Response, Routes

routes = Routes()
MOST_PROMPTS = 1024
"""Most prompts of one request, which are rendered one after the other."""


@routes.post("/v1/chat/completions/render", bodies=(ChatRequest,))
async def render_chat(request: Request, body: ChatRequest) -> Response:
    """Return the prompt of a conversation as token ids, with names and places of its images, for routers."""
    return await _render(request, body, request.state.check_model(body.model))


@routes.post("/v1/messages/render", bodies=(MessagesRequest,))
async def render_messages(request: Request, body: MessagesRequest) -> Response:
    """Return the prompt of a conversation in Anthropic's form as token ids, for routers."""
    model = request.state.check_model(body.model)
    chat, conversation = conversation_of(body)
    with messages_names(conversation.places, older=body.output_format is not None):
        return await _render(request, chat, model)


@routes.post("/v1/completions/render", bodies=(CompletionRequest,))
async def render_completions(request: Request, body: CompletionRequest) -> Response:
    """Return each prompt as token ids, in a list, for routers."""
    model = request.state.check_model(body.model)
    with wire_names(body), request.state.renders.place(request.caller.owner):
        asked = generation_requests(request, body)
        if len(asked) > MOST_PROMPTS:
            raise InvalidRequest(
                f"{len(asked)} prompts; accepted: at most {MOST_PROMPTS} in a render", param="prompt"
            )
        deadline = Deadline(asked[0].timeout)
        bodies = [
            render_body("cmpl", body, model, one, await _rendered(request, one, deadline)) for one in asked
        ]
    return Response(f"[{','.join(bodies)}]".encode())


async def _render(request: Request, body: ChatRequest, model: str) -> Response:
    """Render a conversation of any API."""
    with (
        wire_names(body),
        image_paths(body.messages),
        request.state.renders.place(request.caller.owner),
    ):
        params, _ = chat_params(request, body)
        asked = await generation_request(request, body, params, headers_only=True)
        rendered = await _rendered(request, asked, Deadline(asked.timeout))
        text = render_body("chatcmpl", body, model, asked, rendered)
    return Response(text.encode())


async def _rendered(request: Request, asked: GenerationRequest, deadline: Deadline) -> Rendered:
    return await deadline.limit(request.state.engine.render(asked), "its prompt was rendered")
