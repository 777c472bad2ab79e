"""State that all routes of one server share."""

from __future__ import annotations

import hashlib
import json
import time
from asyncio import Lock
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from fastapi import Request

from fovea import __version__
from fovea.api.explain import shorten
from fovea.core.errors import NotFound
from fovea.core.protocols import EngineClient
from fovea.http.bodies import BodyBudget
from fovea.media.fetch.cache import FetchCache
from fovea.media.image.cache import DecodedImageCache
from fovea.media.image.store import ImageStore
from fovea.media.load import MediaLoader
from fovea.observe.metrics import Metrics
from fovea.observe.profiler import Profiler
from fovea.observe.trail import Trail
from fovea.server.access import Access
from fovea.server.batch_store import BatchStore
from fovea.server.clients import Caller
from fovea.server.drawing import Drawing
from fovea.server.reservations import Reservations
from fovea.server.response_store import ResponseStore
from fovea.server.settings import ServerSettings
from fovea.server.tracking import InFlight, Tracking

if TYPE_CHECKING:  # it calls the application, of which this is a part
    from fovea.server.batch_runner import BatchRunner

_REASONS = {
    "loading": "the model is still loading",
    "stopped": "the engine has stopped; see the server's log",
}


@dataclass(slots=True)
class ServerState:
    """The engine, the settings, the caches and the metrics of one server.

    client: the engine.
    media: loads the images and videos of requests.
    fetch_cache, decoded_cache: bytes from URLs, and decoded images.
    image_store: images that clients sent to /v1/images.
    response_store: answers that later requests continue.
    reservations: places in the engine's queue.
    access: keys, clients and their limits.
    bodies: bytes that request bodies may take.
    tracking: traces and the log of slow requests.
    trail: of the request whose route uses this state; see `state_of`.
    caller: the caller of the request whose route uses this state; see `state_of`.
    batches: files and batches; None: there is no folder for them.
    runner: runs the batches.
    in_flight: the requests that the engine has now.
    started: Unix time at which the server was created.
    clearing: held while the engine clears caches, so that such requests do not fill up threads.
    drawing: draws pages of PDF files.
    profiler: makes profiles of this process.
    draining: whether the server is shutting down and refuses new requests.
    """

    client: EngineClient
    settings: ServerSettings
    media: MediaLoader
    metrics: Metrics
    fetch_cache: FetchCache
    decoded_cache: DecodedImageCache
    image_store: ImageStore
    response_store: ResponseStore
    reservations: Reservations
    access: Access
    bodies: BodyBudget
    tracking: Tracking
    drawing: Drawing
    trail: Trail | None = None
    caller: Caller = field(default_factory=Caller)
    batches: BatchStore | None = None
    runner: BatchRunner | None = None
    in_flight: InFlight = field(default_factory=InFlight)
    started: float = field(default_factory=time.time)
    clearing: Lock = field(default_factory=Lock)
    profiler: Profiler = field(default_factory=Profiler)
    draining: bool = False

    def unavailable(self) -> str | None:
        """The reason why the server accepts no requests now; None if it accepts them."""
        if self.draining:
            return "the server is shutting down"
        status = self.client.status
        return None if status == "ready" else _REASONS[status]

    def check_model(self, name: str | None) -> str:
        """Return the served model's name.

        Raises NotFound if the request names another model; None and "" name none.
        """
        served = self.client.info.name
        if name not in (None, "", served):
            raise NotFound(
                f"model {shorten(name)} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return served

    @property
    def system_fingerprint(self) -> str:
        """A name of what answers depend on beside the request: weights, precision, device, version."""
        info = self.client.info
        parts = (__version__, info.architecture, info.fingerprint, info.dtype, info.quantization, info.device)
        return f"fp_{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"

    def stats(self) -> Mapping[str, float]:
        """Figures of the engine and of the server's own caches, by the names of `observe.table`."""
        caches = self.fetch_cache.stats() | self.decoded_cache.stats() | self.image_store.stats()
        return {
            "ready": float(self.unavailable() is None),
            **caches,
            **self.response_store.stats(),
            **self.access.stats(),
            **self.media.stats(),
            **self.bodies.stats(),
            **self.tracking.stats(),
            **self.client.stats(),
        }

    def timeout(self, requested: float | None) -> float | None:
        """The timeout of a request in seconds: its own one, else the server's; None: no limit.

        Raises InvalidRequest if it is longer than the client's key allows.
        """
        return self.caller.client.timeout(requested, self.settings.request_timeout)

    def seen_by(self, caller: Caller, trail: Trail | None = None) -> ServerState:
        """Return this state with the places, the timeout and the tokens of one caller, and its trail."""
        access = self.access
        places = self.reservations.of(caller, usual_places=access.usual_places, fair=access.fair)
        return replace(self, caller=caller, reservations=places, trail=trail)


class CacheScope(NamedTuple):
    """The part of the caches that a request may use.

    tenant: the client to whom it belongs; "" if all clients share the caches.
    salt: tenant and the request's own `cache_salt`. Only requests with equal salts share entries.
    """

    tenant: str
    salt: str


def cache_scope_of(request: Request, cache_salt: str | None) -> CacheScope:
    """The cache scope of an HTTP request. cache_salt: the field of its body."""
    tenant, salt = caller_of(request).tenant, cache_salt or ""
    return CacheScope(tenant, f"{tenant}:{salt}" if tenant else salt)


def tenant_of_salt(salt: str) -> str:
    """Return the tenant of a cache scope's salt. Without tenants, it is a part of the client's own salt."""
    return salt.partition(":")[0]


def caller_of(request: Request) -> Caller:
    """The caller of an HTTP request."""
    caller: Caller | None = getattr(request.state, "caller", None)
    return caller or Caller()


def request_id_of(request: Request) -> str:
    """The id of an HTTP request, from x-request-id or new. It is in logs and in the response."""
    return caller_of(request).request_id


def state_of(request: Request) -> ServerState:
    """The state of the server that handles an HTTP request, as its caller may use it."""
    state: ServerState = request.app.state.fovea
    return state.seen_by(caller_of(request), getattr(request.state, "trail", None))
