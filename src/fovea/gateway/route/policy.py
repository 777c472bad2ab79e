"""The policies: which backend gets a request, and why.

A policy is a function of candidates and demand. All of them see only backends that accept requests now. None
holds state but the round robin, so workers and gateways agree without talking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fovea.core.errors import ConfigError
from fovea.gateway.backends.backend import Backend, Load
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.route.rendezvous import Orders
from fovea.gateway.settings import RouteSettings


class Choice(NamedTuple):
    """A chosen backend and the reason for it, in words that fit a header."""

    backend: Backend
    reason: str


class Situation(NamedTuple):
    """The facts by which a policy decides.

    candidates: backends that accept the request now, at least one.
    members: all backends of the model, whatever their state is.
    model: name of the model.
    load: the work of the request.
    now: the clock in seconds.
    version: of the fleet.
    """

    candidates: Sequence[Backend]
    members: Sequence[Backend]
    model: str
    demand: Demand
    load: Load
    now: float
    version: int


Policy = Callable[[Situation], Choice]


def least_busy(situation: Situation) -> Choice:
    """Choose the backend with the fewest outstanding tokens for its weight."""
    now = situation.now
    return Choice(
        min(
            situation.candidates,
            key=lambda one: ((one.tokens + situation.load.tokens) / one.weight(now), one.requests, one.name),
        ),
        "least-busy",
    )


class CacheAffine:
    """The backend that knows the image or the conversation, unless it is too busy.

    Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): a backend is passed over if
    it would have more than `balance` times the average outstanding work. Then the next in the order of the
    same key is asked, so the overflow of one image goes to one place, too.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self._balance = settings.balance
        self._free = settings.busy_requests
        self._orders = Orders()

    def __call__(self, situation: Situation) -> Choice:
        reason, key = next(situation.demand.keys())
        # The order is that of all members: a backend that is away for a moment must not move other keys.
        names = self._orders.order(
            situation.model,
            key,
            [(one.name, one.config.weight) for one in situation.members],
            situation.version,
        )
        able = {one.name: one for one in situation.candidates}
        ordered = [able[name] for name in names if name in able]
        weights = {one.name: one.weight(situation.now) for one in ordered}
        total = sum(one.tokens for one in ordered) + situation.load.tokens
        unit = self._balance * total / sum(weights.values())
        # A slow start is relative to the others: if all have just come, none is held back.
        furthest = max(weights[one.name] / one.config.weight for one in ordered)
        for place, one in enumerate(ordered):
            free = one.requests < self._free * weights[one.name] / (one.config.weight * furthest)
            if free or one.tokens + situation.load.tokens <= unit * weights[one.name]:
                return Choice(one, reason if place == 0 and one.name == names[0] else f"{reason}, next")
        return Choice(least_busy(situation).backend, f"{reason}, all busy")


class LodCost:
    """The backend that is predicted to be done first, by the cost of visual tokens.

    An image of 400 tokens costs several times one of 64, in the encoder above all. So the work of a backend
    is counted in equivalent tokens, and its measured speed turns these into seconds.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self._visual = settings.visual_cost

    def __call__(self, situation: Situation) -> Choice:
        known = [one.seconds_per_token for one in situation.candidates if one.seconds_per_token]
        usual = sum(known) / len(known) if known else 1.0

        def seconds(one: Backend) -> float:
            visual = one.visual + situation.load.visual
            text = one.text + situation.load.text
            speed = (one.seconds_per_token or usual) / one.weight(situation.now)
            return (text + self._visual * visual) * speed

        return Choice(min(situation.candidates, key=lambda one: (seconds(one), one.name)), "lod-cost")


class RoundRobin:
    """One backend after another, by their weights."""

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}

    def __call__(self, situation: Situation) -> Choice:
        weights = {one.name: one.weight(situation.now) for one in situation.candidates}
        total = sum(weights.values())
        for name, weight in weights.items():
            self._turns[name] = self._turns.get(name, 0.0) + weight
        chosen = max(situation.candidates, key=lambda one: self._turns[one.name])
        self._turns[chosen.name] -= total
        return Choice(chosen, "round-robin")


class Priority:
    """The backends of the smallest priority; others only when these are full."""

    def __init__(self, settings: RouteSettings) -> None:
        self._most = settings.requests_per_backend

    def __call__(self, situation: Situation) -> Choice:
        levels = sorted({one.config.priority for one in situation.candidates})
        for level in levels:
            among = [one for one in situation.candidates if one.config.priority == level]
            most = [one.config.max_requests or self._most for one in among]
            room = [one for one, limit in zip(among, most, strict=True) if not limit or one.requests < limit]
            if room:
                return Choice(least_busy(situation._replace(candidates=room)).backend, f"priority {level}")
        return Choice(least_busy(situation).backend, "priority, all full")


def make_policy(name: str, settings: RouteSettings) -> Policy:
    """Return the policy of a name. Raises ConfigError for an unknown one."""
    makers: Mapping[str, Callable[[], Policy]] = {
        "cache-affine": lambda: CacheAffine(settings),
        "least-busy": lambda: least_busy,
        "lod-cost": lambda: LodCost(settings),
        "round-robin": RoundRobin,
        "priority": lambda: Priority(settings),
    }
    if name not in makers:
        raise ConfigError(f"policy is {name!r}; accepted: {', '.join(makers)}", param="policy")
    return makers[name]()
