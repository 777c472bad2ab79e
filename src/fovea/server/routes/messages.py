"""/v1/messages: Anthropic's Messages API, in front of the same engine as chat completions."""

from __future__ import annotations

from typing import Any

from fovea.api.convert import chat_prompt, wire_names
from fovea.api.explain import explained
from fovea.api.messages_answer import MessagesBodies
from fovea.api.messages_request import (
    Conversation,
    CountRequest,
    MessagesRequest,
    chat_request,
    messages_names,
)
from fovea.api.reading import Reading
from fovea.api.schema import ChatRequest
from fovea.server.media import load_media
from fovea.server.request import Request
from fovea.server.routes.chat import answer_chat
from fovea.server.routing import Routes

routes = Routes()


@routes.post("/v1/messages", bodies=(MessagesRequest,), streams=True)
async def create(request: Request, body: MessagesRequest) -> None:
    """Answer a conversation of text, images, tool calls and their results."""
    state = request.state
    model = state.check_model(body.model)
    chat, conversation = conversation_of(body)
    chat.model = None

    def bodies(reading: Reading) -> MessagesBodies:
        return MessagesBodies(model, reading)

    older = body.output_format is not None
    with messages_names(conversation.places, older=older):
        await answer_chat(request, chat, bodies)


@routes.post("/v1/messages/count_tokens", bodies=(CountRequest,))
async def count_tokens(request: Request, body: CountRequest) -> dict[str, Any]:
    """Count the tokens of a prompt, visual tokens included."""
    state = request.state
    state.check_model(body.model)
    chat, conversation = conversation_of(body)
    deadline = request.deadline()
    with messages_names(conversation.places), wire_names(chat):
        request.reserve(1)
        images, videos = await deadline.limit(load_media(request, chat.messages, request.cache_scope()))
        prompt = chat_prompt(chat, images.images, videos.videos)
        tokens = await deadline.limit(state.engine.tokenize(prompt), "its prompt was tokenized")
        return {"input_tokens": len(tokens)}


def conversation_of(body: CountRequest) -> tuple[ChatRequest, Conversation]:
    """Return the conversation as a chat request, and where its parts were. Raises InvalidRequest."""
    with explained():
        return chat_request(body)
