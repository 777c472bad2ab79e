"""The gateway of a simulated fleet: the real backends, router and retry budget, without bodies and sockets.

`route.Router` decides. This file only keeps the list of backends that accept requests now, so that not all of
them are asked for every request; a test shows that it is always the router's own list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fovea.gateway.backends.backend import BUSY, CONNECT, Backend, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.backends.route import Choice, Router, Situation
from fovea.gateway.config import BackendConfig, ModelConfig
from fovea.gateway.inspect.demand import USUAL_ANSWER
from fovea.gateway.settings import ResilienceSettings, RouteSettings

MODEL = ModelConfig("model")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of a request that the router sees: its image, or else its conversation, as key."""

    image: str
    conversation: str

    @property
    def has_images(self) -> bool:
        """Whether the request has an image."""
        return bool(self.image)

    @property
    def identity(self) -> str:
        """The name of the image, by which replicas tell what they hold."""
        return self.image

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yield (reason, key), the strongest first."""
        if self.image:
            yield "image", self.image
        yield "prefix", self.conversation


def load_of(prompt: int, visual: int) -> Load:
    """Return the outstanding work of a request, whose client names no longest answer."""
    return Load(prompt - visual + USUAL_ANSWER, visual)


class Front:
    """Chooses backends for requests, and counts their work.

    fleet: the backends. router: chooses among them.
    """

    def __init__(self, policy: str, resilience: ResilienceSettings) -> None:
        self._now = 0.0
        self.fleet = Fleet(resilience)
        self.router = Router(self.fleet, RouteSettings(policy=policy), lambda: self._now)
        self._configs: dict[str, BackendConfig] = {}
        self._lists: dict[bool, tuple[list[Backend], list[Backend]]] = {}
        self._valid_until = -math.inf

    def update(self, now: float, add: list[str], remove: list[str]) -> None:
        """Add and remove backends, as discovery does."""
        for name in remove:
            self._configs.pop(name, None)
        for name in add:
            self._configs[name] = BackendConfig(url=f"http://{name}:8000", name=name, models=(MODEL.name,))
        self.fleet.update(self._configs.values(), now)
        self.changed()

    def changed(self) -> None:
        """Note that a backend may accept requests now that did not before, or no longer."""
        self._lists.clear()

    def choose(self, wanted: Wanted, load: Load, now: float, tried: list[str]) -> Choice | None:
        """Choose a backend as `Router.choose` does; None: no backend accepts the request."""
        self._now = now
        if now >= self._valid_until:
            self._lists.clear()
            self._valid_until = math.inf
        members, candidates = self._lists.get(wanted.has_images) or self._look(now, vision=wanted.has_images)
        if tried:
            candidates = [one for one in candidates if one.name not in tried]
        if not candidates:
            return None
        version = self.fleet.version
        return self.router.decide(
            MODEL, Situation(candidates, members, MODEL.name, wanted, load, now, version)
        )

    def _look(self, now: float, *, vision: bool) -> tuple[list[Backend], list[Backend]]:
        """Return all backends, and those that accept requests until something changes, or time passes."""
        members = self.fleet.serving(MODEL)
        candidates = [one for one in members if one.accepts(now, vision=vision)]
        if len(candidates) < len(members):
            for one in members:
                why = one.why_not(now, vision=vision)
                if why == BUSY:
                    self._valid_until = min(self._valid_until, one.busy_until)
                elif why == "breaker open":
                    self._valid_until = now  # a probe may be sent at any time
        self._lists[vision] = members, candidates
        return members, candidates

    def begin(self, backend: Backend, load: Load, now: float, *, vision: bool) -> None:
        """Count a request that is sent."""
        if backend.breakers[CONNECT].is_open:
            self.changed()
        backend.begin(load, now, vision=vision)

    def unreachable(self, backend: Backend, now: float) -> None:
        """Note that a connection failed."""
        if backend.breakers[CONNECT].fail(now):
            self.changed()

    def pause(self, backend: Backend, until: float) -> None:
        """Note that a backend has asked for no further requests for a while."""
        backend.busy_until = until
        self.changed()
