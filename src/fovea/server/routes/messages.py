"""/v1/messages: Anthropic's Messages API, in front of the same engine as chat completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fovea.api.convert import chat_prompt, wire_names
from fovea.api.explain import explained
from fovea.api.messages.bodies import MessagesBodies
from fovea.api.messages.convert import Conversation, chat_request, messages_names
from fovea.api.messages.request import CountRequest, MessagesRequest
from fovea.api.reading import Reading
from fovea.api.schema import ChatRequest
from fovea.server.answer import Deadline, while_connected
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import ERRORS, GENERATES
from fovea.server.media import load_media
from fovea.server.routes.chat import answer_chat
from fovea.server.state import cache_scope_of, state_of

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/messages", responses=GENERATES)
async def create(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation of text, images, tool calls and their results."""
    state = state_of(http)
    model = state.check_model(body.model)
    chat, conversation = _chat(body)
    chat.model = None

    def bodies(reading: Reading) -> MessagesBodies:
        return MessagesBodies(model, reading)

    older = body.output_format is not None
    with messages_names(conversation.places, older=older):
        return await answer_chat(state, http, chat, bodies)


@router.post("/v1/messages/count_tokens", responses=ERRORS)
async def count_tokens(body: CountRequest, http: Request) -> dict[str, Any]:
    """Count the tokens of a prompt, visual tokens included."""
    state = state_of(http)
    state.check_model(body.model)
    chat, conversation = _chat(body)
    deadline = Deadline(state.timeout(None))
    with messages_names(conversation.places), wire_names(chat), state.reservations.reserve(1):
        loading = load_media(state, chat.messages, cache_scope_of(http, None))
        images, videos = await while_connected(http, deadline.limit_loading(loading))
        prompt = chat_prompt(chat, images.images, videos.videos)
        tokens = deadline.limit(state.client.tokenize(prompt), "its prompt was tokenized")
        return {"input_tokens": len(await while_connected(http, tokens))}


def _chat(body: CountRequest) -> tuple[ChatRequest, Conversation]:
    with explained():
        return chat_request(body)
