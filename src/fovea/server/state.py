"""State that all requests of one server share."""

from __future__ import annotations

import hashlib
import json
import time
from asyncio import Lock
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fovea import __version__
from fovea.api.explain import shorten
from fovea.core.errors import NotFound
from fovea.core.progress import Loaded, latest
from fovea.core.protocols import EngineClient
from fovea.http.bodies import BodyBudget
from fovea.media.cache import DecodedImageCache, ImageStore
from fovea.media.fetch.fetcher import FetchCache
from fovea.media.load import MediaLoader
from fovea.observe.metrics import Metrics
from fovea.observe.py_spy import Profiler
from fovea.server.access import Access
from fovea.server.batch_store import BatchStore
from fovea.server.clients import Places
from fovea.server.drawing import Drawing
from fovea.server.renders import Renders
from fovea.server.response_store import ResponseStore
from fovea.server.settings import ServerSettings
from fovea.server.tracking import InFlight, Tracking

if TYPE_CHECKING:  # they use the state
    from fovea.server.app import App
    from fovea.server.batch_runner import BatchRunner
    from fovea.server.request import Request

_REASONS = {
    "loading": "the model is still loading",
    "stopped": "the engine has stopped; see the server's log",
}


@dataclass(slots=True)
class ServerState:
    """The engine, the settings, the caches and the metrics of one server.

    engine: the engine.
    media: loads the images and videos of requests.
    fetch_cache, decoded_cache: bytes from URLs, and decoded images.
    image_store: images that clients sent to /v1/images.
    response_store: answers that later requests continue.
    places: places in the engine's queue.
    access: keys, clients and their limits.
    bodies: bytes that request bodies may take.
    tracking: traces and the log of slow requests.
    renders: renders that load images, wait or run.
    drawing: draws pages of PDF files.
    batches: files and batches; None: there is no folder for them.
    runner: runs the batches.
    requests: the requests that are being answered.
    in_flight: the generations that the engine has now.
    started: Unix time at which the server was created.
    clearing: held while the engine clears caches, so that such requests do not fill up threads.
    profiler: makes profiles of this process.
    app: the application, which answers requests from within.
    draining: whether the server is shutting down and refuses new requests.
    """

    engine: EngineClient
    settings: ServerSettings
    media: MediaLoader
    metrics: Metrics
    fetch_cache: FetchCache
    decoded_cache: DecodedImageCache
    image_store: ImageStore
    response_store: ResponseStore
    places: Places
    access: Access
    bodies: BodyBudget
    tracking: Tracking
    renders: Renders
    drawing: Drawing
    batches: BatchStore | None = None
    runner: BatchRunner | None = None
    requests: set[Request] = field(default_factory=set)
    in_flight: InFlight = field(default_factory=InFlight)
    started: float = field(default_factory=time.time)
    clearing: Lock = field(default_factory=Lock)
    profiler: Profiler = field(default_factory=Profiler)
    draining: bool = False
    app: App = field(init=False)

    def unavailable(self) -> str | None:
        """The reason why the server accepts no requests now; None if it accepts them."""
        if self.draining:
            return "the server is shutting down"
        status = self.engine.status
        if status == "ready":
            return None
        loaded = self.loaded
        return _REASONS[status] if loaded is None else f"{_REASONS[status]}: {loaded}"

    @property
    def loaded(self) -> Loaded | None:
        """How far the weights of a model that is still loading are, as far as that is known."""
        return latest() if self.engine.status == "loading" else None

    def check_model(self, name: str | None) -> str:
        """Return the served model's name.

        Raises NotFound if the request names another model; None and "" name none.
        """
        served = self.engine.info.name
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
        info = self.engine.info
        parts = (
            __version__, info.architecture, info.fingerprint, info.dtype, info.quantization, info.kv_dtype,
            info.device,
        )  # fmt: skip
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
            **self.engine.stats(),
        }


def tenant_of_salt(salt: str) -> str:
    """Return the tenant of a cache scope's salt. Without tenants, it is a part of the client's own salt."""
    return salt.partition(":")[0]
