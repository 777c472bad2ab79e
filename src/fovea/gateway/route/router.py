"""Finds the candidates for a request and lets the model's policy choose."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fovea.core.errors import Overloaded, Unavailable
from fovea.gateway.backends.backend import BUSY, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.config import ModelConfig
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.route.policy import Choice, Policy, Situation, make_policy
from fovea.gateway.settings import RouteSettings


class Router:
    """Chooses backends for the requests of one worker."""

    def __init__(self, fleet: Fleet, settings: RouteSettings, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._policies: dict[str, Policy] = {}

    def choose(
        self, model: ModelConfig, demand: Demand, load: Load, tried: Collection[str] = ()
    ) -> Choice | None:
        """Choose a backend; None: none accepts the request that was not tried.

        tried: names of backends that failed on this request.
        """
        now, vision = self._clock(), demand.has_images
        members = self._fleet.serving(model)
        candidates = [one for one in members if one.name not in tried and one.accepts(now, vision=vision)]
        if not candidates:
            return None
        if len(members) == 1:
            return Choice(candidates[0], "only")
        policy = self._policy(model.policy or self._settings.policy)
        return policy(Situation(candidates, members, model.name, demand, load, now, self._fleet.version))

    def unavailable(self, model: ModelConfig, demand: Demand) -> Unavailable | Overloaded:
        """The error for a request that no backend accepts now. It names every backend's reason.

        If all of them have only asked for a pause, it tells when the first one wants to be asked again.
        """
        now, vision = self._clock(), demand.has_images
        members = self._fleet.serving(model)
        whys = [one.why_not(now, vision=vision) or "failed" for one in members]
        if members and set(whys) == {BUSY}:
            pause_s = max(1.0, min(one.busy_until for one in members) - now)
            return Overloaded("all backends are busy", retry_after=pause_s, code="backends_busy")
        reasons = ", ".join(f"{one.name}: {why}" for one, why in zip(members, whys, strict=True))
        return Unavailable(
            f"no backend of {model.name!r} accepts requests now ({reasons or 'none is known'})",
            code="no_backend",
        )

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            self._policies[name] = make_policy(name, self._settings)
        return self._policies[name]
