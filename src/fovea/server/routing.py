"""Routes, and their description at /openapi.json.

    routes = Routes()

    @routes.post("/v1/files/{name}/things", bodies=(Thing,))
    async def create(request: Request, name: str, body: Thing) -> dict[str, Any]: ...

A handler gets the request, the names in the path and the validated body. It returns a value to be sent as
JSON, or a `Response`, or nothing if it has sent the answer itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from fovea.api.convert import ErrorEnvelope
from fovea.api.explain import shorten
from fovea.api.wire import Wire
from fovea.core.errors import NotFound
from fovea.http.refusals import MethodNotAllowed
from fovea.server.bodies import receive
from fovea.server.request import Request

_NAME = re.compile(r"{(\w+)(:path)?}")
_TEXTS: dict[str, str] = {
    "400": "A field, an image or a combination of fields is not accepted. `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The server's settings or the key do not allow this.",
    "404": "The model, image or cache does not exist.",
    "408": "The request's own timeout ran out.",
    "413": "The body is too large.",
    "429": "Too many requests run or wait, or the key is over its limit. Retry-After says when to try again.",
    "500": "The server has a defect. Its log has the details.",
    "503": "The server is still loading its model, or is shutting down.",
    "4XX": "The request is refused for another reason.",
}
ERRORS = tuple(_TEXTS)
"""Statuses of refusals of routes that take a body."""
NAMED = ("401", "404", "429", "4XX")
"""Statuses of refusals of routes without a body."""
_SCHEMA = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Response:
    """An answer that is not JSON, or that has headers of its own. Names of headers are in lower case."""

    body: bytes = b""
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200


Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    path: with names in braces; {name:path} may contain slashes.
    bodies: the kinds of JSON bodies that it takes; (): it takes none.
    query: the parameters after the path; None: it has none.
    errors: statuses of refusals.
    shown: whether it is in the description.
    streams: whether the answer can be a stream of events.
    upload: content type of a body that is not JSON, with its schema.
    types: further content types of answers.
    """

    method: str
    path: str
    handle: Handler
    bodies: tuple[type[Wire], ...] = ()
    query: type[BaseModel] | None = None
    errors: tuple[str, ...] = NAMED
    shown: bool = True
    streams: bool = False
    upload: Mapping[str, Any] = field(default_factory=dict)
    types: tuple[str, ...] = ()

    async def answer(self, request: Request, names: Sequence[str]) -> None:
        """Answer a request. names: the parts of its path that stand for names."""
        arguments: list[Any] = [*names]
        if self.bodies:
            arguments.append(await receive(request, self.bodies))
        if self.query is not None:
            arguments.append(request.parameters(self.query))
        result = await self.handle(request, *arguments)
        if isinstance(result, Response):
            headers = {"content-type": result.media_type, **result.headers}
            await request.reply(result.status, result.body, headers)
        elif result is not None:
            await request.reply_json(result)


class Routes:
    """A list of routes, to which handlers are added by decorators."""

    def __init__(self) -> None:
        self.all: list[Route] = []

    def post(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        """Add a route for POST. options: fields of `Route`."""
        return self.add(("POST",), path, **{"errors": ERRORS, **options})

    def get(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        """Add a route for GET. options: fields of `Route`."""
        return self.add(("GET",), path, **options)

    def delete(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        """Add a route for DELETE. options: fields of `Route`."""
        return self.add(("DELETE",), path, **options)

    def page(self, path: str) -> Callable[[Handler], Handler]:
        """Add a route for GET and HEAD that is not in the description."""
        return self.add(("GET", "HEAD"), path, shown=False)

    def add(self, methods: Iterable[str], path: str, **options: Any) -> Callable[[Handler], Handler]:
        """Add a route for some methods."""

        def decorate(handle: Handler) -> Handler:
            self.all += [Route(method, path, handle, **options) for method in methods]
            return handle

        return decorate


class Router:
    """Finds the route of a request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes: list[Route] = []
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[re.Pattern[str], Route]] = []
        for route in routes:
            self.add(route)

    def add(self, route: Route) -> None:
        """Add a route. If two match a request, one without names goes first, then the one added first."""
        self.routes.append(route)
        if "{" in route.path:
            self._patterns.append((_pattern(route.path), route))
        else:
            self._fixed[route.method, route.path] = route

    def find(self, method: str, path: str) -> tuple[Route, tuple[str, ...]]:
        """Return the route of a request, and the names in its path.

        Raises NotFound, or MethodNotAllowed with the methods that are accepted.
        """
        if (route := self._fixed.get((method, path))) is not None:
            return route, ()
        # A path without names hides those with names, as in OpenAPI: GET /v1/images/pdf is no image.
        accepted = {known for known, fixed in self._fixed if fixed == path}
        for pattern, route in () if accepted else self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                if route.method == method:
                    return route, match.groups()
                accepted.add(route.method)
        if accepted:
            raise MethodNotAllowed(
                f"{method} is not accepted at {shorten(path)}; accepted: {', '.join(sorted(accepted))}",
                allow=tuple(sorted(accepted)),
            )
        raise NotFound(f"there is no route {shorten(path)}", code="unknown_url")


def _pattern(path: str) -> re.Pattern[str]:
    parts, end = [], 0
    for match in _NAME.finditer(path):
        parts += [re.escape(path[end : match.start()]), "(.+)" if match[2] else "([^/]+)"]
        end = match.end()
    return re.compile("".join([*parts, re.escape(path[end:])]), re.DOTALL)


def describe(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the description of the routes in the form of OpenAPI 3.1."""
    shown = [route for route in routes if route.shown]
    models = {model for route in shown for model in route.bodies} | {ErrorEnvelope}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_SCHEMA)
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        path = _NAME.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fovea",
            "description": "OpenAI-compatible serving of vision-language models.",
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _operation(route: Route) -> dict[str, Any]:
    text = inspect.getdoc(route.handle) or ""
    name = f"{route.handle.__name__}_{re.sub('[^a-z0-9]+', '_', route.path)}_{route.method.lower()}"
    operation: dict[str, Any] = {
        "summary": text.partition("\n")[0],
        "description": text,
        "operationId": name,
        "responses": _responses(route),
    }
    parameters: list[dict[str, Any]] = [
        {"name": match[1], "in": "path", "required": True, "schema": {"type": "string"}}
        for match in _NAME.finditer(route.path)
    ]
    if route.query is not None:
        for parameter, schema in route.query.model_json_schema()["properties"].items():
            parameters.append({"name": parameter, "in": "query", "required": False, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    if route.bodies or route.upload:
        references = [{"$ref": _SCHEMA.format(model=model.__name__)} for model in route.bodies]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        content = {"application/json": {"schema": schema}} if route.bodies else dict(route.upload)
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(route: Route) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _SCHEMA.format(model=ErrorEnvelope.__name__)}}}
    answer: dict[str, Any] = {"description": "The answer.", "content": {"application/json": {"schema": {}}}}
    if route.streams:
        text = "The answer. With `stream: true` server-sent events; the last one is [DONE]."
        answer["description"] = text
        answer["content"]["text/event-stream"] = {}
    answer["content"] = {name.partition(";")[0]: {} for name in route.types} | answer["content"]
    failures = {status: {"description": _TEXTS[status], "content": error} for status in route.errors}
    return {"200": answer, **failures}
