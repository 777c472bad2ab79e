"""The web application of a server: its routes, its state, and the life of both around an engine."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any

from fovea import __version__
from fovea.api.unknown import HEADER
from fovea.core.errors import Forbidden
from fovea.core.protocols import EngineClient
from fovea.http.address import Proxies
from fovea.http.bodies import BodyBudget, Receive, Scope, Send
from fovea.http.browsers import CrossOrigin
from fovea.http.exchange import Exchange
from fovea.http.page import read_files
from fovea.http.table import Connections
from fovea.media.cache import DecodedImageCache, ImageStore
from fovea.media.fetch.fetcher import FetchCache, Fetcher
from fovea.media.load import MediaLoader
from fovea.media.sandbox.decoder import SandboxedDecoder
from fovea.observe.device import Devices
from fovea.observe.metrics import Metrics
from fovea.observe.request_log import SlowRequests
from fovea.observe.tracer import open_tracer
from fovea.server.access import Access, is_limited
from fovea.server.batch_runner import BatchRunner
from fovea.server.batch_store import BatchStore
from fovea.server.clients import Caller, Places
from fovea.server.drawing import Drawing
from fovea.server.renders import Renders
from fovea.server.request import Inside, Reply, Request
from fovea.server.response_store import ResponseStore
from fovea.server.routes import (
    admin,
    chat,
    completions,
    files,
    images,
    messages,
    models,
    page,
    pdf,
    peers,
    predict,
    render,
    responses,
)
from fovea.server.routing import Response, Route, Router, describe
from fovea.server.run import collect_regularly
from fovea.server.settings import MIB, ServerSettings
from fovea.server.state import ServerState, tenant_of_salt
from fovea.server.tracking import Tracking

log = logging.getLogger("fovea.server")
EXPOSED = ("x-request-id", "retry-after", HEADER)
"""Headers of answers that pages of other origins may read."""
METHODS = ("GET", "POST", "DELETE")
WORKERS = ("encode", "prefill")
"""Roles of engines that answer no clients."""
DOCS = {
    "/docs": '<div id="ui"></div><script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js">'
    '</script><link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">'
    '<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#ui", deepLinking: true})</script>',
    "/redoc": '<redoc spec-url="/openapi.json"></redoc>'
    '<script src="https://cdn.jsdelivr.net/npm/redoc@2/bundles/redoc.standalone.js"></script>',
}
"""Pages that show the description of the API, by programs that the browser loads from a public host."""


class App:
    """The application of one server, for ASGI.

    state: what its requests share.
    connections: the table of its connections.
    router: its routes.
    """

    def __init__(self, state: ServerState, connections: Connections, decoder: SandboxedDecoder) -> None:
        self.state = state
        state.app = self
        self.connections = connections
        self._decoder = decoder
        access = state.settings.access
        self.router = Router(_routes(self, with_page=access.page == "on", with_docs=access.docs != "off"))
        origins = access.cors_origins
        self._cross_origin = CrossOrigin(origins, METHODS, EXPOSED) if origins else None
        self._access = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._was_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._cross_origin is not None and scope["method"] == "OPTIONS":
            asking = Exchange(scope, receive, send)
            if (answer := self._cross_origin.preflight(asking.headers)) is not None:
                await asking.run(lambda: asking.reply(answer.status, b"", answer.headers))
                return
        await self._run(Request(self.state, scope, receive, send))

    async def call(self, path: str, body: bytes, caller: Caller, request_id: str, party: str = "") -> Reply:
        """Answer a request from within, such as a line of a batch. party: see `Request.speaks_for`."""
        inside = Inside(path, body, request_id, party)
        request = Request(self.state, inside.scope, inside.receive, inside.send, caller)
        try:
            await self._run(request)
        except Exception as error:  # it is answered with status 500
            log.error("a request from within failed", exc_info=error)
        return inside.reply(request.prompt_tokens, request.completion_tokens)

    async def start(self) -> None:
        """Start what runs beside the requests."""
        await self._access.enter_async_context(self.state.access.watching())
        self._tasks.append(asyncio.create_task(collect_regularly()))
        if self.state.runner is not None:
            self._tasks.append(asyncio.create_task(self.state.runner.run()))

    async def stop(self) -> None:
        """Drain the engine, and close everything."""
        state = self.state
        for task in self._tasks:
            task.cancel()
        state.draining = True
        await state.engine.close(0.0 if self._was_cut else state.settings.drain_seconds)
        await self._access.aclose()
        await asyncio.to_thread(state.tracking.close)
        await state.media.aclose()
        self._decoder.close()
        await asyncio.to_thread(state.drawing.close)
        await state.fetch_cache.aclose()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.state.draining = True

    def cut(self, reason: str) -> None:
        """End the running requests with an error, because the server ends."""
        self._was_cut = True
        for request in list(self.state.requests):
            request.cut(reason)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The description of its routes, in the form of OpenAPI."""
        return describe(self.router.routes, __version__)

    async def _run(self, request: Request) -> None:
        self.state.requests.add(request)
        try:
            await request.run(lambda: self._answer(request))
        finally:
            self.state.requests.discard(request)

    async def _answer(self, request: Request) -> None:
        if self._cross_origin is not None:
            request.extra |= self._cross_origin.headers(request.header(b"origin"))
        request.check()
        self._check_role(request.path)
        route, names = self.router.find(request.method, request.path)
        request.route = route.path
        await route.answer(request, names)

    def _check_role(self, path: str) -> None:
        """Refuse what the engine's role leaves to others."""
        role = self.state.settings.role
        if role in WORKERS and is_limited(path) and not path.startswith("/v1/models"):
            raise Forbidden(
                f"this server has the role {role} and works for other servers alone; accepted: requests to a "
                "server with the role all, decode or prefill-decode",
                code="role",
            )


def create_app(engine: EngineClient, settings: ServerSettings | None = None) -> App:
    """Create the application of a server.

    engine: the application closes it at its end, after draining for `settings.drain_seconds`.
    settings: None: the defaults.
    """
    settings = settings or ServerSettings()
    fetch_cache = FetchCache(Fetcher(settings.media), settings.fetch_cache_mib * MIB, settings.fetch_ttl)
    decoded_cache = DecodedImageCache(settings.decoded_cache_mib * MIB, settings.decoded_ttl)
    tenant_of = tenant_of_salt if settings.cache_scope == "key" else lambda _: ""
    decoder = SandboxedDecoder(settings.media, tenant_of)
    access = Access(settings)
    state = ServerState(
        engine=engine,
        settings=settings,
        media=MediaLoader(settings.media, fetch_cache, image_cache=decoded_cache, decoder=decoder),
        metrics=Metrics(
            lambda: {**connections.stats(), **state.stats()},
            engine.info.name,
            __version__,
            Devices.of_process(),
        ),
        fetch_cache=fetch_cache,
        decoded_cache=decoded_cache,
        image_store=ImageStore(settings.image_store_mib * MIB, settings.image_ttl),
        response_store=ResponseStore(settings.response_store_mib * MIB),
        places=Places(engine, access.usual_places, lambda: access.fair),
        access=access,
        tracking=Tracking(
            SlowRequests(settings.logs.slow_request_s, settings.logs.slow_ttft_s),
            open_tracer(settings.traces, "fovea-server", __version__),
        ),
        renders=Renders(settings.max_renders, lambda: access.fair),
        drawing=Drawing(settings.media),
        bodies=BodyBudget(settings.bodies.max_bodies_mib * MIB, settings.bodies.max_body_mib * MIB),
    )
    connections = Connections(
        settings.http.max_connections,
        settings.http.max_connections_per_address,
        exempt=Proxies(settings.http.trusted_proxies).__contains__,
        observer=state.metrics,
    )
    _divide_caches(state)
    app = App(state, connections, decoder)
    batches_of = settings.batches
    if batches_of.batch_dir is not None:
        state.batches = BatchStore(batches_of.batch_dir, batches_of.batch_store_mib * MIB)
        state.runner = BatchRunner(app.call, state.batches, access.caller_of, batches_of.batch_parallel)
    return app


def _divide_caches(state: ServerState) -> None:
    """Bound the entries of every client by its `cache_share`, if the caches are separated by keys.

    Without separation no entry belongs to one client.
    """
    if state.settings.cache_scope != "key":
        return
    share = state.access.share_of
    state.fetch_cache.cache.divide(lambda key, _: tenant_of_salt(key[0]), share)
    state.decoded_cache.cache.divide(lambda key, _: tenant_of_salt(key[0]), share)
    state.image_store.cache.divide(lambda _, stored: stored.tenant, share)


def _routes(app: App, *, with_page: bool, with_docs: bool) -> list[Route]:
    modules = (chat, completions, responses, messages, render, predict, files, images, models, admin, pdf)
    routes = [route for module in modules for route in module.routes.all]
    if app.state.settings.peer_key:
        routes += peers.routes.all
    if with_page:
        read_files()
        routes += page.routes.all
    return routes + (_description_routes(app) if with_docs else [])


def _description_routes(app: App) -> list[Route]:
    async def openapi(request: Request) -> dict[str, Any]:
        return app.description

    async def shown(request: Request) -> Response:
        text = f"<!doctype html><title>Fovea</title>{DOCS[request.path]}"
        return Response(text.encode(), "text/html; charset=utf-8")

    pages = [Route("GET", path, shown, shown=False) for path in DOCS]
    return [Route("GET", "/openapi.json", openapi, shown=False), *pages]
