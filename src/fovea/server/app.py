"""The web application: routes, guard and error handlers around an EngineClient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from fovea import __version__
from fovea.api.unknown import HEADER
from fovea.core.errors import Forbidden
from fovea.core.protocols import EngineClient
from fovea.http.address import Proxies
from fovea.http.bodies import BodyBudget
from fovea.http.refusals import ClientGone
from fovea.http.settings import HttpSettings
from fovea.http.table import Connections
from fovea.media.fetch.cache import FetchCache
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.image.cache import DecodedImageCache
from fovea.media.image.store import ImageStore
from fovea.media.load import MediaLoader
from fovea.media.sandbox.decoder import SandboxedDecoder
from fovea.observe.device import Devices
from fovea.observe.metrics import Metrics
from fovea.observe.slow import SlowRequests
from fovea.observe.tracing.tracer import open_tracer
from fovea.server import errors
from fovea.server.access import Access
from fovea.server.batch_runner import BatchRunner
from fovea.server.batch_store import BatchStore
from fovea.server.drawing import Drawing
from fovea.server.errors import on_forbidden
from fovea.server.guard import Guard
from fovea.server.json_answers import OneLineResponse
from fovea.server.open_answers import OpenAnswers
from fovea.server.reservations import Reservations
from fovea.server.response_store import ResponseStore
from fovea.server.routes import (
    batches,
    caches,
    chat,
    completions,
    files,
    live,
    messages,
    models,
    page,
    pdf,
    predict,
    profile,
    responses,
)
from fovea.server.routes import images as images_api
from fovea.server.run import collect_regularly
from fovea.server.settings import MIB, ServerSettings
from fovea.server.state import ServerState, tenant_of_salt
from fovea.server.tracking import Tracking


def divide_caches(state: ServerState) -> None:
    """Bound the entries of every client by its `cache_share`, if the caches are separated by keys.

    Without separation no entry belongs to one client.
    """
    if state.settings.cache_scope != "key":
        return
    share = state.access.share_of
    state.fetch_cache.cache.divide(lambda key, _: tenant_of_salt(key[0]), share)
    state.decoded_cache.cache.divide(lambda key, _: tenant_of_salt(key[0]), share)
    state.image_store.cache.divide(lambda _, stored: stored.tenant, share)


EXPOSED = ("x-request-id", "retry-after", HEADER)
"""Headers of answers that pages of other origins may read."""


def create_app(client: EngineClient, settings: ServerSettings | None = None) -> FastAPI:
    """Create the application of a server.

    client: the engine. The application closes it at its end, after draining for `settings.drain_seconds`.
    settings: None: the defaults.
    """
    settings = settings or ServerSettings()
    fetch_cache = FetchCache(Fetcher(settings.media), settings.fetch_cache_mib * MIB, settings.fetch_ttl)
    decoded_cache = DecodedImageCache(settings.decoded_cache_mib * MIB, settings.decoded_ttl)
    tenant_of = tenant_of_salt if settings.cache_scope == "key" else lambda _: ""
    decoder = SandboxedDecoder(settings.media, tenant_of)
    state = ServerState(
        client=OpenAnswers(client),
        settings=settings,
        media=MediaLoader(settings.media, fetch_cache, image_cache=decoded_cache, decoder=decoder),
        metrics=Metrics(
            lambda: {**connections.stats(), **state.stats()},
            client.info.name,
            __version__,
            Devices.of_process(),
        ),
        fetch_cache=fetch_cache,
        decoded_cache=decoded_cache,
        image_store=ImageStore(settings.image_store_mib * MIB, settings.image_ttl),
        response_store=ResponseStore(settings.response_store_mib * MIB),
        reservations=Reservations(client),
        access=Access(settings),
        tracking=Tracking(
            SlowRequests(settings.logs.slow_request_s, settings.logs.slow_ttft_s),
            open_tracer(settings.traces, "fovea-server", __version__),
        ),
        drawing=Drawing(settings.media),
        bodies=BodyBudget(settings.bodies.max_bodies_mib * MIB, settings.bodies.max_body_mib * MIB),
    )
    connections = _connections(settings.http, state.metrics)
    divide_caches(state)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        collecting = asyncio.create_task(collect_regularly())
        running = asyncio.create_task(state.runner.run()) if state.runner is not None else None
        async with state.access.watching():
            yield
            collecting.cancel()
            if running is not None:
                running.cancel()
            state.draining = True
            await state.client.close(settings.drain_seconds)
        await asyncio.to_thread(state.tracking.close)
        await state.media.aclose()
        decoder.close()
        await asyncio.to_thread(state.drawing.close)
        await fetch_cache.aclose()

    app = FastAPI(
        title="Fovea",
        version=__version__,
        description="OpenAI-compatible serving of vision-language models.",
        lifespan=lifespan,
        default_response_class=OneLineResponse,
        redirect_slashes=False,  # a redirect would repeat the Host header, which the client chooses
        openapi_url=None if settings.access.docs == "off" else "/openapi.json",
    )
    app.state.fovea = state
    if settings.batches.batch_dir is not None:
        state.batches = BatchStore(settings.batches.batch_dir, settings.batches.batch_store_mib * MIB)
        parallel = settings.batches.batch_parallel
        state.runner = BatchRunner(app, state.batches, state.access.caller_of, parallel)
    app.state.connections = connections
    for routes in (
        chat, completions, responses, messages, predict, files, batches, images_api, models, caches,
        profile, pdf, live,
    ):  # fmt: skip
        app.include_router(routes.router)
    if settings.access.page == "on":
        page.read_files()
        app.include_router(page.router)
    errors.install_handlers(app)
    app.add_exception_handler(Forbidden, on_forbidden)
    app.add_middleware(_IgnoreClientGone)
    app.add_middleware(Guard, state=state)
    if settings.access.cors_origins:  # outside of the guard, because a browser sends no key when it asks
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.access.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    return app


def _connections(settings: HttpSettings, metrics: Metrics) -> Connections:
    return Connections(
        settings.max_connections,
        settings.max_connections_per_address,
        exempt=Proxies(settings.trusted_proxies).__contains__,
        observer=metrics,
    )


class _IgnoreClientGone:
    """Ends a request silently if its client has disconnected.

    That is not an error, and no client reads an answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except ClientGone:
            return
