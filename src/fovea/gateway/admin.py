"""The routes under /admin: what the backends do, draining them, and reading the configuration again.

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
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

from fovea.core.errors import ConfigError, Forbidden, InvalidRequest, NotFound
from fovea.gateway.backends.backend import Backend
from fovea.gateway.exchange import Exchange
from fovea.gateway.services import Services
from fovea.http.refusals import ClientGone
from fovea.observe.py_spy import FORMATS, ProfileOptions, Profiler

ADMIN = frozenset(("admin",))


class Admin:
    """The administration of one worker."""

    def __init__(self, services: Services, reload: Callable[[], Awaitable[str]]) -> None:
        """reload: reads the configuration again; returns a line that says what has changed."""
        self._services = services
        self._reload = reload
        self._profiler = Profiler()

    async def __call__(self, exchange: Exchange) -> None:
        """Serve a request. Raises Unauthorized, Forbidden, NotFound, InvalidRequest."""
        services = self._services
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
                await exchange.reply_json({"requests": services.tracking.slow.rows()})
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
        query = dict(parse_qsl(exchange.scope["query_string"].decode("latin-1")))
        options = ProfileOptions.of(query)
        making = asyncio.ensure_future(self._profiler.profile(options))
        watch = asyncio.ensure_future(exchange.disconnected())
        try:
            await asyncio.wait({making, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                raise ClientGone
            recording = making.result()
        finally:
            for task in (making, watch):
                task.cancel()
            await asyncio.wait({making, watch})
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
        backend = self._services.fleet.get(name)
        if backend is None:
            known = ", ".join(one.name for one in self._services.fleet)
            raise NotFound(
                f"there is no backend {name[:100]!r}; known: {known or 'none'}", code="unknown_backend"
            )
        self._services.drains.set(name, drain=drain)
        self._services.drains.apply(self._services.fleet, self._services.clock())
        return backend

    def _shown(self, backend: Backend) -> dict[str, Any]:
        now = self._services.clock()
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
