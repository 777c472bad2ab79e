"""Request bodies become values without stopping other clients.

Bodies with more than `LARGE` bytes besides data: URLs are parsed and validated in one thread, in steps that
are short, because no other thread runs during a call of Python's parser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from fovea.api.content import ChatMessage
from fovea.api.cut_texts import json_errors, restore
from fovea.api.cutter import Cutter
from fovea.api.explain import explained, fields_of
from fovea.api.schema import ChatRequest, TokenizeRequest
from fovea.api.unknown import HEADER, header, ignored_fields
from fovea.api.wire import MAX_ITEMS, Wire, check_count
from fovea.core.errors import InvalidRequest
from fovea.server.request import Request

LARGE = 64 * 1024
WITH_URLS = 4 * 1024 * 1024
"""Largest body that is parsed at once because most of it are data: URLs, which are only looked through."""
# One thread: several would take the interpreter in turns, and the event loop would wait for all of them.
_PARSER = ThreadPoolExecutor(1, "fovea-bodies")


async def receive(request: Request, models: Sequence[type[Wire]]) -> Wire:
    """Receive, cut, parse and validate the body of a request.

    models: the kinds of bodies that the route takes.
    Raises InvalidRequest, PayloadTooLarge, Overloaded, and ClientGone if the client disconnects.
    """
    state = request.state
    arrived = [await request.receive_json(state.bodies, request.caller.client.name)]
    value, ignored = await _parse(request, arrived.pop(), models)  # nothing else holds the bytes any more
    if ignored:
        request.extra[HEADER] = header(ignored)
        state.metrics.count_ignored_fields(len(ignored))
    return value


async def _parse(request: Request, cutter: Cutter, models: Sequence[type[Wire]]) -> tuple[Wire, list[str]]:
    """Return the validated body, and its fields that were ignored. Raises InvalidRequest."""
    if not cutter.size:
        raise InvalidRequest("the body is required", code="missing_field")
    assert request.body_memory is not None  # it has counted the body
    shrink, strict = request.body_memory.shrink, request.state.settings.bodies.strict_requests
    if cutter.size <= LARGE or (cutter.size <= WITH_URLS and cutter.text_bytes <= LARGE):
        return _validated(cutter, models, shrink, strict)
    return await asyncio.get_running_loop().run_in_executor(
        _PARSER, _validated, cutter, models, shrink, strict
    )


def _validated(
    cutter: Cutter, models: Sequence[type[Wire]], on_drop: Callable[[int], None], strict: bool
) -> tuple[Wire, list[str]]:
    """Return the validated body, and its fields that were ignored. Raises InvalidRequest.

    on_drop: called when an image or video of it was read.
    """
    with json_errors():
        value = restore(cutter.finish(), on_drop)
    check_count(value)
    model = _model_of(value, models)
    if issubclass(model, ChatRequest | TokenizeRequest):
        _validate_messages(value)
    with explained():
        body = model.model_validate(value, extra="allow")
    return body, ignored_fields(body, fields_of(model), strict=strict)


def _model_of(value: Any, models: Sequence[type[Wire]]) -> type[Wire]:
    """Return the first model with a required field that the body has; the last model if there is none."""
    names = value if isinstance(value, dict) else ()
    for model in models[:-1]:
        if any(field.is_required() and name in names for name, field in model.model_fields.items()):
            return model
    return models[-1]


def _validate_messages(value: Any) -> None:
    """Replace the messages of a body by validated ones, up to the first that is wrong.

    Other threads run between two of them. The validation of the whole body takes them as they are, and
    reports the wrong one.
    """
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list):
        with suppress(ValidationError):
            for index, message in enumerate(messages[:MAX_ITEMS]):
                messages[index] = ChatMessage.model_validate(message, extra="allow")
