"""Finds the candidates for a request and lets the model's policy choose."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fovea.core.errors import Unavailable
from fovea.gateway.backends.backend import Load
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

    def unavailable(self, model: ModelConfig, demand: Demand) -> Unavailable:
        """The error for a request that no backend accepts now. It names every backend's reason."""
        now, vision = self._clock(), demand.has_images
        members = self._fleet.serving(model)
        reasons = ", ".join(f"{one.name}: {one.why_not(now, vision=vision) or 'failed'}" for one in members)
        return Unavailable(
            f"no backend of {model.name!r} accepts requests now ({reasons or 'none is known'})",
            code="no_backend",
        )

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            self._policies[name] = make_policy(name, self._settings)
        return self._policies[name]
