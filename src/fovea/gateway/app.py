"""The ASGI application of a gateway: which path leads where. Bare ASGI, because every layer costs time.

Requests for answers are served by `generate.request`, those below /admin by `admin.routes`; everything else
is answered here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fovea.core.errors import Forbidden, FoveaError, InvalidRequest, NotFound, Unavailable
from fovea.gateway.admin.routes import Administration
from fovea.gateway.experiments.statistics import answer_of, rating_of
from fovea.gateway.generate.request import GatewayExchange, Request, Services
from fovea.gateway.inspect.body import Body
from fovea.http.bodies import Receive, Scope, Send
from fovea.http.exchange import Exchange
from fovea.http.page import GATEWAY_ADMIN, INDEX, PART, is_page, send_file
from fovea.http.refusals import MethodNotAllowed

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
PAGE_METHODS = ("GET", "HEAD")
PROBES = ("/health", "/ping", "/ready")
METRICS_ROLES = frozenset(("metrics", "admin"))
Lifespan = Callable[[], Awaitable[None]]


class Gateway:
    """The application of one worker.

    services: its parts.
    start, stop: run at its beginning and its end.
    reload: reads the configuration again; returns a line that says what has changed.
    """

    def __init__(
        self, services: Services, start: Lifespan, stop: Lifespan, reload: Callable[[], Awaitable[str]]
    ) -> None:
        self.services = services
        self.start = start
        self.stop = stop
        self.administration = Administration(services, reload)
        self._routes: Mapping[tuple[str, str], Callable[[Exchange], Awaitable[None]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/feedback"): self._feedback,
        }
        self.pages: Mapping[str, Callable[[Exchange], Awaitable[None]]] = {
            "/": self._page,
            "/admin": self._admin_page,
            f"{PART}NAME": self._part,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        services, refusal = self.services, None
        try:
            if services.tenants.open and scope["path"] not in PROBES:
                services.browsers.check(scope, page=self._is_page(scope["path"]))
        except Forbidden as error:
            refusal = error
        api = APIS.get(scope["path"])
        if refusal is None and api is not None and scope["method"] == "POST" and not services.draining:
            request = Request(services, scope, receive, send, api)
            services.running.add(request)
            try:
                await request.run(request.answer)
            finally:
                services.running.discard(request)
            return
        exchange = GatewayExchange(services, scope, receive, send)
        await exchange.run(lambda: self._other(exchange, api, refusal))

    def cut(self, reason: str) -> None:
        """End the running requests with an error, because the gateway ends."""
        for request in list(self.services.running):
            request.cut(reason)

    async def _other(self, exchange: Exchange, api: str | None, refusal: FoveaError | None) -> None:
        """Serve what is not a request for an answer. Raises FoveaError."""
        if refusal is not None:
            raise refusal
        path, method = exchange.path, exchange.method
        if api is not None and method == "POST":
            raise Unavailable("the gateway is shutting down", code="draining")
        if path.startswith("/admin/"):
            await self.administration.answer(exchange)
            return
        if self._is_page(path):
            await self._send_page(exchange)
            return
        route = self._routes.get((method if method != "HEAD" else "GET", path))
        if route is not None:
            await route(exchange)
            return
        if path == "/v1/messages/count_tokens":
            raise NotFound(
                "/v1/messages/count_tokens is not offered by this gateway; accepted: /v1/messages",
                code="count_tokens_unsupported",
            )
        if path.startswith("/v1/models/") and method == "GET":
            self._authenticate(exchange)
            name = self.services.fleet.model(path.removeprefix("/v1/models/")).name
            await exchange.reply_json(self._card(name))
            return
        if api is not None or any(known == path for _, known in self._routes):
            accepted = (
                ["POST"] if api is not None else [verb for verb, known in self._routes if known == path]
            )
            raise MethodNotAllowed(
                f"{method} is not accepted at {path}; accepted: {', '.join(accepted)}", allow=accepted
            )
        raise NotFound(f"there is no route {path[:100]!r} at this gateway", code="unknown_url")

    def _is_page(self, path: str) -> bool:
        return is_page(path) and self.services.settings.page == "on"

    async def _send_page(self, exchange: Exchange) -> None:
        """Send a page or a file of one. They need no key; what they ask /v1 and /admin/... for does."""
        if exchange.method not in PAGE_METHODS:
            shown = exchange.path[:100]
            raise MethodNotAllowed(
                f"{exchange.method} is not accepted at {shown}; accepted: {', '.join(PAGE_METHODS)}",
                allow=PAGE_METHODS,
            )
        await self.pages.get(exchange.path, self._part)(exchange)

    async def _page(self, exchange: Exchange) -> None:
        """Send the page to chat."""
        await send_file(exchange, INDEX)

    async def _admin_page(self, exchange: Exchange) -> None:
        """Send the page for operators. It needs a key only for what it asks /admin/... for."""
        await send_file(exchange, GATEWAY_ADMIN)

    async def _part(self, exchange: Exchange) -> None:
        """Send a file of the pages."""
        await send_file(exchange, exchange.path.removeprefix(PART))

    def _authenticate(self, exchange: Exchange) -> None:
        self.services.tenants.authenticate(exchange.authorization)

    async def _health(self, exchange: Exchange) -> None:
        """Say that the process lives."""
        await exchange.reply_json({"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        """Say whether requests are accepted: the gateway does not drain, and a backend is up."""
        services, now = self.services, self.services.clock()
        if services.draining:
            raise Unavailable("the gateway is shutting down", code="draining")
        up = sum(backend.accepts(now, vision=False) for backend in services.fleet)
        if not up:
            raise Unavailable("no backend accepts requests", code="no_backend")
        await exchange.reply_json({"status": "ready", "backends": up})

    async def _metrics(self, exchange: Exchange) -> None:
        """Return all metrics in the formats of Prometheus."""
        if not self.services.tenants.open:
            self.services.tenants.authenticate(exchange.authorization, METRICS_ROLES)
        body, media_type = self.services.metrics.exposition(exchange.header(b"accept"))
        await exchange.reply(200, body, {"content-type": media_type})

    async def _models(self, exchange: Exchange) -> None:
        """List the models with their aliases."""
        self._authenticate(exchange)
        names = sorted(
            {name for model in self.services.fleet.models() for name in (model.name, *model.aliases)}
        )
        await exchange.reply_json({"object": "list", "data": [self._card(name) for name in names]})

    async def _feedback(self, exchange: Exchange) -> None:
        """Take a rating of an answer: {"request_id": ..., "rating": 1 to 5, "up" or "down"}."""
        services = self.services
        tenant = services.tenants.authenticate(exchange.authorization)
        value = Body.parse(await exchange.receive_json(services.bodies, tenant.name)).value
        request_id, rating = value.get("request_id"), rating_of(value.get("rating"))
        if not isinstance(request_id, str):
            raise InvalidRequest("request_id is not a text; accepted: the x-request-id of an answer",
                                 param="request_id")  # fmt: skip
        if rating is None:
            raise InvalidRequest(
                f'rating is {str(value.get("rating"))[:40]!r}; accepted: 1 to 5, "up" or "down"',
                param="rating",
            )
        if services.experiments is None or not await asyncio.to_thread(
            services.experiments.rate, answer_of(tenant.name, request_id), rating
        ):
            raise NotFound(
                f"no answer {request_id[:100]!r} of an experiment is known", param="request_id",
                code="unknown_request",
            )  # fmt: skip
        await exchange.reply_json({"request_id": request_id, "rating": rating})

    def _card(self, name: str) -> dict[str, Any]:
        """Describe a model: input_modalities only if its backends tell and agree."""
        fleet = self.services.fleet
        model = fleet.model(name)
        told = {backend.modalities.get(model.served or model.name) for backend in fleet.serving(model)}
        modalities = told.pop() if len(told) == 1 else None
        more = {} if modalities is None else {"input_modalities": sorted(modalities)}
        created = int(self.services.began)
        return {"id": name, "object": "model", "created": created, "owned_by": "fovea-gateway", **more}
