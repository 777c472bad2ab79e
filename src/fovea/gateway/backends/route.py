"""Chooses a backend for each request, with a reason, by the policy of its model.

A policy is a function of candidates and demand. All of them see only backends that accept requests now. None
holds state but the round robin, so workers and gateways agree without talking.

The default policy sends a key (an image, a conversation) to the same backend by weighted rendezvous hashing.
The score of a backend is -weight / ln(h), where h in (0, 1) is a hash of key and backend. The backend with
the largest score is first. If a backend goes, only its keys move, and they spread over all others. Sources:
Thaler and Ravishankar (1998) for rendezvous hashing, Schindelhauer and Schomaker, "Weighted distributed hash
tables" (2005), for the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fovea.core.errors import ConfigError, Overloaded, Unavailable
from fovea.gateway.backends.backend import BUSY, Backend, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.config import ModelConfig
from fovea.gateway.settings import RouteSettings

_BITS = 52
"""Bits of a hash that are used: with half a step more, each such number is a float between 0 and 1."""
MOST_ORDERS = 8192


class Choice(NamedTuple):
    """A chosen backend and the reason for it, in words that fit a header."""

    backend: Backend
    reason: str


class Keyed(Protocol):
    """The part of a request's demand that decides where it goes."""

    @property
    def has_images(self) -> bool:
        """Whether the request has images or videos."""
        ...

    @property
    def identity(self) -> str:
        """The identity of the image by which it is routed; "": it has none, or it is not known yet."""
        ...

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yield (reason, key), the strongest first; at least one."""
        ...


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
    demand: Keyed
    load: Load
    now: float
    version: int


@dataclass(eq=False)
class Router:
    """Chooses backends for the requests of one worker."""

    fleet: Fleet
    settings: RouteSettings
    clock: Callable[[], float]
    _policies: dict[str, Policy] = field(default_factory=dict, init=False)

    def choose(
        self, model: ModelConfig, demand: Keyed, load: Load, tried: Collection[str] = ()
    ) -> Choice | None:
        """Choose a backend; None: none accepts the request that was not tried.

        tried: names of backends that failed on this request.
        """
        now, vision = self.clock(), demand.has_images
        members = self.fleet.serving(model)
        candidates = [one for one in members if one.name not in tried and one.accepts(now, vision=vision)]
        if not candidates:
            return None
        return self.decide(
            model, Situation(candidates, members, model.name, demand, load, now, self.fleet.version)
        )

    def decide(self, model: ModelConfig, situation: Situation) -> Choice:
        """Choose one of the candidates by the policy of the model."""
        if len(situation.members) == 1:
            return Choice(situation.candidates[0], "only")
        return self._policy(model.policy or self.settings.policy)(situation)

    def unavailable(self, model: ModelConfig, demand: Keyed) -> Unavailable | Overloaded:
        """The error for a request that no backend accepts now. It names every backend's reason.

        If all of them have only asked for a pause, it tells when the first one wants to be asked again.
        """
        now, vision = self.clock(), demand.has_images
        members = self.fleet.serving(model)
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
            self._policies[name] = make_policy(name, self.settings)
        return self._policies[name]


def score(key: str, name: str, weight: float) -> float:
    """The score of a backend for a key; a larger one comes first."""
    data = f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass")
    hashed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
    return -weight / math.log(fraction(hashed))


def fraction(hashed: int) -> float:
    """Return a hash of 64 bits as a number that is more than 0 and less than 1."""
    return ((hashed >> (64 - _BITS)) + 0.5) / (1 << _BITS)


def order(key: str, backends: Iterable[tuple[str, float]]) -> tuple[str, ...]:
    """Return the names of backends in the order of a key. backends: (name, weight)."""
    weights = dict(backends)
    if len(set(weights.values())) > 1:
        scores = {name: score(key, name, weight) for name, weight in weights.items()}
        return tuple(sorted(scores, key=lambda name: -scores[name]))
    # Of equal weights the larger hash has the larger score, so neither logarithms nor numbers are needed.
    begin = hashlib.blake2b(f"{len(key)}:{key}".encode("utf-8", "surrogatepass"), digest_size=8)
    hashes = []
    for name in weights:
        one = begin.copy()
        one.update(name.encode("utf-8", "surrogatepass"))
        hashes.append((one.digest(), name))
    hashes.sort(reverse=True)
    return tuple([name for _, name in hashes])


class Orders:
    """Orders of recent keys, so that a key that comes again is not hashed again for every backend."""

    def __init__(self, most: int = MOST_ORDERS) -> None:
        self._most = most
        self._version: object = None
        self._orders: OrderedDict[tuple[str, str], tuple[str, ...]] = OrderedDict()

    def order(
        self, model: str, key: str, backends: Iterable[tuple[str, float]], version: object
    ) -> tuple[str, ...]:
        """Return `order` of a key among the backends of a model.

        version: a value that differs if backends or weights do.
        """
        if version != self._version:
            self._orders.clear()
            self._version = version
        found = self._orders.get((model, key))
        if found is None:
            found = self._orders[model, key] = order(key, backends)
            if len(self._orders) > self._most:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end((model, key))
        return found


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
            ((one.config.name, one.config.weight) for one in situation.members),
            situation.version,
        )
        able = {one.config.name: one for one in situation.candidates}
        fits = self._bound(situation)
        identity = situation.demand.identity
        # The test for None spares a call for each of the backends that publish no events.
        holders = {
            one.name
            for one in situation.candidates
            if one.holdings is not None and identity and one.holds(identity)
        }
        for name in names if holders else ():
            if name in holders and fits(able[name]):
                return Choice(able[name], reason if name == names[0] else f"{reason}, held")
        for name in names:
            if name in able and fits(able[name]):
                return Choice(able[name], reason if name == names[0] else f"{reason}, next")
        return Choice(least_busy(situation).backend, f"{reason}, all busy")

    def _bound(self, situation: Situation) -> Callable[[Backend], bool]:
        """Return a function that says whether a backend is not too busy for the request.

        Most often the first backend that is asked has few requests. So the average work, for which all of
        them are looked at, is computed only when it is needed.
        """
        now, tokens = situation.now, situation.load.tokens
        furthest, unit = 0.0, -1.0
        # A slow start is relative to the others: if all have just come, none is held back.
        for one in situation.candidates:
            furthest = max(furthest, one.weight(now) / one.config.weight)
            if furthest == 1.0:
                break

        def fits(one: Backend) -> bool:
            nonlocal unit
            weight = one.weight(now)
            if one.requests < self._free * weight / (one.config.weight * furthest):
                return True
            if unit < 0:
                total = sum([other.text + other.visual for other in situation.candidates]) + tokens
                unit = self._balance * total / sum([other.weight(now) for other in situation.candidates])
            return one.tokens + tokens <= unit * weight

        return fits


STREAM_COST = 100
"""Cost of an answer that has begun, in tokens of a prompt: its decodes make the steps of others longer."""


class LodCost:
    """The backend that will begin the answer first, by the work that lies before its first token.

    An image of 4,096 tokens costs many times one of 64, in the encoder above all, but only until its answer
    begins. After that it takes as much as any other answer. So images and prompts count until the first byte
    of their answer, and then each answer counts alike. `least_busy` counts them to the end: it takes a
    backend that streams the answer about a large document for a busy one.

    The speed of a backend is its weight. Times to the first byte are no measure of it: they follow the mix of
    requests, and a backend that seems quick gets all of them until it is not.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self._visual = settings.visual_cost

    def __call__(self, situation: Situation) -> Choice:
        text, visual = situation.load

        def cost(one: Backend) -> float:
            before = (
                one.text - one.begun_text + text + self._visual * (one.visual - one.begun_visual + visual)
            )
            return (before + STREAM_COST * one.begun) / one.weight(situation.now)

        chosen = min(situation.candidates, key=lambda one: (cost(one), one.requests, one.name))
        return Choice(chosen, "lod-cost")


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
