"""What the routes of one server share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fastapi import Request

from fovea.core.errors import NotFound
from fovea.core.protocols import EngineClient
from fovea.media.fetch.cache import FetchCache
from fovea.media.image.cache import DecodedImageCache
from fovea.media.image.store import ImageStore
from fovea.media.load import MediaLoader
from fovea.observe.metrics import Metrics
from fovea.server.explain import shorten
from fovea.server.room import Rooms
from fovea.server.settings import ServerSettings

_REASONS = {
    "loading": "the model is still loading",
    "stopped": "the engine has stopped; see the server's log",
}


@dataclass(slots=True)
class ServerState:
    client: EngineClient
    settings: ServerSettings
    media: MediaLoader
    metrics: Metrics
    fetched: FetchCache
    decoded: DecodedImageCache
    images: ImageStore
    rooms: Rooms
    draining: bool = False

    def unavailable(self) -> str | None:
        """Why no request is taken now, or None."""
        if self.draining:
            return "the server is shutting down"
        status = self.client.status
        return None if status == "ready" else _REASONS[status]

    def check_model(self, name: str | None) -> str:
        """The served model's name. A request may leave it out, but not name another."""
        served = self.client.info.name
        if name not in (None, "", served):
            raise NotFound(
                f"model {shorten(name)} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return served

    def stats(self) -> Mapping[str, float]:
        """The engine's numbers and those of the caches before it, by the names of `observe.table`."""
        before = self.fetched.stats() | self.decoded.stats() | self.images.stats()
        return {**before, **self.client.stats()}

    def timeout(self, asked: float | None) -> float | None:
        return asked or self.settings.request_timeout or None


class Share(NamedTuple):
    """A request's share of the caches. tenant: whose it is, "" where all share them; salt: that and its own cache_salt."""

    tenant: str
    salt: str


def share_of(request: Request, cache_salt: str | None) -> Share:
    tenant: str = getattr(request.state, "tenant", "")
    own = cache_salt or ""
    return Share(tenant, f"{tenant}:{own}" if tenant else own)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.fovea
    return state
