"""/v1/responses: OpenAI's Responses API, in front of the same engine as chat completions."""

from __future__ import annotations

from typing import Any

from fovea.api.completion_bodies import message_body
from fovea.api.content import ChatMessage
from fovea.api.explain import explained, shorten
from fovea.api.reading import Answer, Reading
from fovea.api.responses_answer import ResponsesBodies
from fovea.api.responses_request import ResponsesRequest, chat_request, responses_names
from fovea.core.errors import NotFound
from fovea.server.request import Request
from fovea.server.response_store import KeptAnswer, copy_messages
from fovea.server.routes.chat import answer_chat
from fovea.server.routing import Routes

routes = Routes()


@routes.post("/v1/responses", bodies=(ResponsesRequest,), streams=True)
async def create(request: Request, body: ResponsesRequest) -> None:
    """Answer items: messages with text and images, tool calls and their results."""
    state = request.state
    model, owner = state.check_model(body.model), request.caller.owner
    earlier: tuple[ChatMessage, ...] = ()
    if body.previous_response_id is not None:
        previous = _kept(request, body.previous_response_id, "previous_response_id")
        earlier = copy_messages(previous.messages)
    with explained():
        chat, conversation = chat_request(body, earlier)
    instructions = body.instructions is not None
    keeps = body.store is not False and state.response_store.cache.capacity > 0
    kept = copy_messages(chat.messages[instructions:]) if keeps else ()
    items = _items(body) if keeps else ()

    def keep(answer_body: dict[str, Any], answer: Answer) -> None:
        if keeps:
            message = ChatMessage.model_validate(message_body(answer))
            state.response_store.put(KeptAnswer(owner, answer_body, (*kept, message), items))

    def bodies(reading: Reading) -> ResponsesBodies:
        return ResponsesBodies(model, body, reading, keep)

    with responses_names(conversation.places, instructions):
        await answer_chat(request, chat, bodies)


@routes.get("/v1/responses/{name}")
async def retrieve(request: Request, name: str) -> dict[str, Any]:
    """Return an answer that is kept."""
    return _kept(request, name, None).body


@routes.get("/v1/responses/{name}/input_items")
async def input_items(request: Request, name: str) -> dict[str, Any]:
    """List the items of the request of an answer that is kept. Images are left out."""
    items = list(_kept(request, name, None).items)
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    return {"object": "list", "data": items, "has_more": False, **ends}


@routes.delete("/v1/responses/{name}")
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Forget an answer that is kept."""
    _kept(request, name, None)
    request.state.response_store.drop(name, request.caller.owner)
    return {"id": name, "object": "response", "deleted": True}


def _kept(request: Request, name: str, param: str | None) -> KeptAnswer:
    answer = request.state.response_store.get(name, request.caller.owner)
    if answer is None:
        raise NotFound(
            f"there is no response {shorten(name)}: it was not stored, was deleted, had to make room, or "
            "belongs to another client",
            param=param,
            code="response_not_found",
        )
    return answer


def _items(body: ResponsesRequest) -> tuple[dict[str, Any], ...]:
    """The items of a request as it sent them, each with a name, and without the bytes of images."""
    items = []
    for number, item in enumerate(body.input):
        value = item.model_dump(exclude_none=True, warnings=False)  # a Payload is not text
        for field in ("content", "output"):
            parts = value.get(field)
            if isinstance(parts, list):
                for part in parts:
                    part.pop("annotations", None)
                    part.pop("logprobs", None)
                    if "image_url" in part and not isinstance(part["image_url"], str):
                        part["image_url"] = "data:"
        items.append({"id": f"item_{number}", **value})
    return tuple(items)
