"""Routes whose bodies are received, cut, parsed and validated without stopping other clients.

FastAPI would join a body, parse it and validate it in the event loop. These routes give FastAPI a body that
is validated already. A route that takes several kinds of bodies declares a union of their models. Bodies over
`LARGE` are parsed and validated in one thread, in steps that are short, because no other thread runs during a
call of Python's parser.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast, get_args

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from fovea.api.content import ChatMessage
from fovea.api.cut_texts import restore
from fovea.api.cutter import Cutter
from fovea.api.explain import explained, fields_of
from fovea.api.schema import ChatRequest, TokenizeRequest
from fovea.api.unknown import HEADER, header, ignored_fields
from fovea.api.wire import MAX_ITEMS, Wire, check_count
from fovea.core.errors import InvalidRequest
from fovea.http.bodies import Claim, check_body_headers, receive_body
from fovea.server.state import caller_of, state_of

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
LARGE = 64 * 1024
# One thread: several would take the interpreter in turns, and the event loop would wait for all of them.
_PARSER = ThreadPoolExecutor(1, "fovea-bodies")


class BodyRoute(APIRoute):
    """A route that takes a JSON body. To be set as `route_class` of a router."""

    def get_route_handler(self) -> Handler:
        handler: Handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        annotation = self.body_field.field_info.annotation
        models = cast(tuple[type[Wire], ...], get_args(annotation) or (annotation,))

        async def handle(request: Request) -> Response:
            state = state_of(request)
            check_body_headers(
                request.headers.get("content-encoding", ""),
                request.headers.get("content-type", ""),
                request.headers.get("content-length", ""),
                state.bodies.largest,
            )
            waiting = asyncio.timeout(None)
            with state.bodies.claim(caller_of(request).client.name, lambda: waiting.reschedule(0)) as claim:
                try:
                    async with waiting:
                        arrived = [await receive_body(request.receive, claim, state.bodies)]
                        claim.arrived()
                except TimeoutError:
                    raise state.bodies.overloaded() from None
                strict = state.settings.bodies.strict_requests
                # Nothing else holds the bytes any more.
                value, ignored = await _parse(arrived.pop(), models, claim, strict=strict)
                response = await handler(_Received(request, value))
                if ignored:
                    response.headers[HEADER] = header(ignored)
                    state.metrics.count_ignored_fields(len(ignored))
                return response

        return handle


class _Received(Request):
    """A request whose body is a validated value. FastAPI's own validation returns it as it is."""

    def __init__(self, request: Request, value: Wire | None) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"" if self._value is None else b"{}"

    async def json(self) -> Any:
        return self._value


async def _parse(
    cutter: Cutter, models: Sequence[type[Wire]], claim: Claim, *, strict: bool
) -> tuple[Wire | None, list[str]]:
    """Parse and validate a body. Returns it (None if it is empty), and the fields that were ignored.

    models: the kinds of bodies that the route takes.
    strict: refuse unknown fields. Raises InvalidRequest.
    """
    if not cutter.size:
        return None, []
    loop = asyncio.get_running_loop()
    if cutter.size <= LARGE:
        return _validated(cutter, models, claim.shrink, strict)
    return await loop.run_in_executor(_PARSER, _validated, cutter, models, claim.shrink, strict)


def _validated(
    cutter: Cutter, models: Sequence[type[Wire]], on_drop: Callable[[int], None], strict: bool
) -> tuple[Wire, list[str]]:
    """Return the validated body, and its fields that were ignored. Raises InvalidRequest.

    on_drop: called when an image or video of it was read.
    """
    try:
        value = restore(cutter.finish(), on_drop)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not JSON: it is not UTF-8", code="invalid_json") from None
    except ValueError:  # of a number that Python does not convert
        raise InvalidRequest("the body holds a number that cannot be read", code="invalid_json") from None
    check_count(value)
    model = _model_of(value, models)
    if issubclass(model, ChatRequest | TokenizeRequest):
        _validate_messages(value)
    with explained():
        body = model.model_validate(value, extra="allow")
    return body, ignored_fields(body, fields_of(model), strict=strict)


def _model_of(value: Any, models: Sequence[type[Wire]]) -> type[Wire]:
    """Return the first model of which the body has a required field; the last model if there is none."""
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
