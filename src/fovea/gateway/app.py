"""The ASGI application of a gateway: which path leads where. Bare ASGI, because every layer costs time.

Requests for answers are served by `generate.request`; everything else is answered here. Routes of
administration, which need an admin key if there are API keys:

    GET  /admin/backends                     all backends with their health, load and breakers
    POST /admin/backends/NAME/drain          NAME gets no new requests; those that run go on
    POST /admin/backends/NAME/undrain        NAME gets requests again, slowly at first
    POST /admin/reload                       read the configuration file now
    POST /admin/cache/clear                  remove all cached answers
    GET  /admin/slow                         the latest slow requests of this worker
    GET  /admin/profile?seconds=5            a profile of this worker, by py-spy

A drain holds for the worker that takes the request and, over the file that all share, for the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fovea.core.errors import (
    ConfigError,
    Forbidden,
    FoveaError,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from fovea.gateway.backends.backend import Backend
from fovea.gateway.experiments.statistics import answer_of, rating_of
from fovea.gateway.generate.request import GatewayExchange, Request, Services
from fovea.gateway.inspect.body import Body
from fovea.http.bodies import Receive, Scope, Send
from fovea.http.exchange import Exchange
from fovea.http.refusals import MethodNotAllowed
from fovea.observe.py_spy import FORMATS, ProfileOptions, Profiler

ADMIN = frozenset(("admin",))
log = logging.getLogger("fovea.gateway")
APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
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
        self._reload = reload
        self._profiler = Profiler()
        self._routes: Mapping[tuple[str, str], Callable[[Exchange], Awaitable[None]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/feedback"): self._feedback,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        services, refusal = self.services, None
        try:
            if services.tenants.open and scope["path"] not in PROBES:
                services.browsers.check(scope)
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
            await self._administer(exchange)
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
            await exchange.reply_json(_model(name))
            return
        if api is not None or any(known == path for _, known in self._routes):
            accepted = (
                ["POST"] if api is not None else [verb for verb, known in self._routes if known == path]
            )
            raise MethodNotAllowed(
                f"{method} is not accepted at {path}; accepted: {', '.join(accepted)}", allow=accepted
            )
        raise NotFound(f"there is no route {path[:100]!r} at this gateway", code="unknown_url")

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
        await exchange.reply_json({"object": "list", "data": [_model(name) for name in names]})

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

    async def _administer(self, exchange: Exchange) -> None:
        """Serve a request to /admin. Raises Unauthorized, Forbidden, NotFound, InvalidRequest."""
        services = self.services
        if not services.tenants.open and not services.tenants.has("admin"):
            raise Forbidden(
                "/admin is closed, because there are API keys and no admin key; accepted: --admin-key, or "
                "FOVEA_ADMIN_KEY, at the gateway's start",
                code="no_admin_key",
            )
        services.tenants.authenticate(exchange.headers.get(b"authorization", b""), ADMIN)
        words = exchange.path.removeprefix("/admin/").split("/")
        match (exchange.method, *words):
            case ("GET", "backends"):
                await exchange.reply_json({"backends": [self._shown(one) for one in services.fleet]})
            case ("POST", "backends", *name, ("drain" | "undrain") as verb) if name:
                backend = self._drain("/".join(name), drain=verb == "drain")
                await exchange.reply_json(self._shown(backend))
            case ("POST", "reload"):
                await exchange.reply_json({"reloaded": await self._read_again()})
            case ("POST", "cache", "clear"):
                if services.cache is None:
                    raise InvalidRequest("the response cache is turned off", code="no_cache")
                await exchange.reply_json({"removed": await services.cache.clear()})
            case ("GET", "slow"):
                await exchange.reply_json({"requests": services.records.slow.rows()})
            case ("GET", "profile"):
                await self._profile(exchange)
            case _:
                raise NotFound(
                    f"there is no route {exchange.method} {exchange.path[:100]}; accepted: GET "
                    "/admin/backends, POST /admin/backends/NAME/drain and /undrain, POST /admin/reload, "
                    "POST /admin/cache/clear, GET /admin/slow, GET /admin/profile",
                    code="unknown_url",
                )

    async def _profile(self, exchange: Exchange) -> None:
        options = ProfileOptions.of(exchange.query)
        exchange.watch()
        recording = await self._profiler.profile(options)
        kind = {"content-type": FORMATS[options.form], "content-length": str(len(recording))}
        await exchange.reply(200, recording, {**kind, "cache-control": "no-store"})

    async def _read_again(self) -> str:
        """Read the configuration. Raises InvalidRequest that says what is wrong with it."""
        try:
            return await self._reload()
        except ConfigError as error:
            raise InvalidRequest(
                f"the configuration stays what it was: {error.message}", param=error.param, code="bad_config"
            ) from error

    def _drain(self, name: str, *, drain: bool) -> Backend:
        backend = self.services.fleet.get(name)
        if backend is None:
            known = ", ".join(one.name for one in self.services.fleet)
            raise NotFound(
                f"there is no backend {name[:100]!r}; known: {known or 'none'}", code="unknown_backend"
            )
        self.services.drains.set(name, drain=drain)
        self.services.drains.apply(self.services.fleet, self.services.clock())
        return backend

    def _shown(self, backend: Backend) -> dict[str, Any]:
        now = self.services.clock()
        return {
            "name": backend.name,
            "url": backend.config.url,
            "models": sorted(backend.models),
            "accepts": {
                "text": backend.why_not(now, vision=False) or "yes",
                "images": backend.why_not(now, vision=True) or "yes",
            },
            "healthy": backend.healthy,
            "draining": backend.draining or backend.drains_itself,
            "weight": round(backend.weight(now), 3),
            "requests": backend.requests,
            "text_tokens": backend.text,
            "visual_tokens": backend.visual,
            "breakers": {stage: str(breaker.state(now)) for stage, breaker in backend.breakers.items()},
            "ejections": backend.ejections,
        }


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "fovea-gateway"}
