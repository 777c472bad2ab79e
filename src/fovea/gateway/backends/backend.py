"""One backend: its configuration, its health, what it has outstanding, and its circuit breakers.

A stage of a backend that keeps failing gets no requests for a while. A backend has a breaker for each stage.
Connections fail for all requests. Images can fail alone, for example if the vision encoder is out of memory;
questions about text then go on. After `breaker_open_s` one request probes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple, Protocol

from fovea.gateway.breaker import Breaker
from fovea.gateway.config import BackendConfig
from fovea.gateway.settings import ResilienceSettings

CONNECT, TEXT, VISION = "connect", "text", "vision"
STAGES = (CONNECT, TEXT, VISION)
RECENT = 64
"""Times to the first byte that are kept for each backend."""
BUSY = "busy"
"""Why a backend gets no request that has asked for a pause, with status 429 or 503."""
FADE = 0.99
"""Factor by which earlier answers count less at each tick of the watch, twice per second: half in 35 s."""
LEAST_SHARE = 0.1
"""Share of its weight with which a backend starts that came back."""


class Images(Protocol):
    """The images of an engine's caches, by their identities; `holdings.Holdings` is one, and a set is one."""

    def __contains__(self, identity: object, /) -> bool: ...

    def __len__(self) -> int: ...


class Backend:
    """One engine behind the gateway. Used by the event loop's thread only.

    config: its configuration.
    models: names of the models that it serves, as it calls them.
    modalities: what each model takes beside text, such as "image"; a model that does not tell is missing.
    is_fovea: whether its list of models says that it is a Fovea engine.
    requests, text, visual: outstanding requests, tokens of text, visual tokens.
    begun, begun_text, begun_visual: those of them whose answer has begun, so that images and prompt are done.
    healthy: whether its health check passes; true until one has failed.
    draining: whether it gets no new requests, because an operator wants so, or it says so itself.
    removed: whether it is no longer configured; its running requests go on.
    breakers: by stage.
    ejected_until: end of its ejection as an outlier, in seconds of the clock.
    answered_at: time of its last answer, in seconds of the clock.
    busy_until: until then it has asked for no further requests.
    recent: streams of about the last minute; earlier ones count less.
    holdings: identities of the images that its caches hold now, by its own events; None: it does not tell.
    """

    def __init__(
        self, config: BackendConfig, settings: ResilienceSettings, now: float, key: str = ""
    ) -> None:
        """now: the clock in seconds. key: what is sent to it as API key; "": nothing."""
        self.config = config
        self.key = key
        self.models: frozenset[str] = frozenset(config.models)
        self.modalities: Mapping[str, frozenset[str]] = {}
        self.is_fovea = False
        self.requests = self.text = self.visual = 0
        self.begun = self.begun_text = self.begun_visual = 0
        self.healthy = True
        self.draining = self.drains_itself = self.removed = False
        self.failed_checks = 0
        self._was_healthy = False
        self.ejected_until = self.busy_until = 0.0
        self.ejections = 0
        self.answered_at = 0.0
        self.holdings: Images | None = None
        self.breakers: Mapping[str, Breaker] = {
            stage: Breaker(settings.breaker_failures, settings.breaker_open_s) for stage in STAGES
        }
        self.first_bytes: deque[float] = deque(maxlen=RECENT)
        self.recent = 0.0
        self._settings = settings
        self._created = now
        self._since = now - settings.slow_start_s  # at the start of the gateway all are equal

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def degrade(self) -> str:
        """The way in which it is asked for fewer visual tokens: "detail", "max-pixels" or "off"."""
        if self.config.degrade != "auto":
            return self.config.degrade
        return "detail" if self.is_fovea else "off"

    @property
    def tokens(self) -> int:
        """Outstanding tokens of text and images."""
        return self.text + self.visual

    def holds(self, identity: str) -> bool | None:
        """Whether its caches hold an image now; None: it does not tell."""
        return None if self.holdings is None else identity in self.holdings

    def accepts(self, now: float, *, vision: bool) -> bool:
        """Whether a request may be sent to it now. vision: whether the request has images."""
        if not self.healthy or self.draining or self.drains_itself or self.removed:
            return False
        if now < self.ejected_until or now < self.busy_until:
            return False
        stage = self.breakers[stage_of(vision=vision)]
        return stage.allows(now) and self.breakers[CONNECT].allows(now)

    def why_not(self, now: float, *, vision: bool) -> str:
        """Say in a word why it gets no request; "" if it gets one."""
        if self.accepts(now, vision=vision):
            return ""
        if not self.healthy:
            return "unhealthy"
        if self.draining or self.drains_itself or self.removed:
            return "draining"
        if now < self.ejected_until:
            return "ejected"
        return BUSY if now < self.busy_until else "breaker open"

    def weight(self, now: float) -> float:
        """Its share of the load; less for a while after it came back."""
        full = self._settings.slow_start_s
        age = now - self._since
        if not full or age >= full:
            return self.config.weight
        return self.config.weight * max(LEAST_SHARE, age / full)

    def begin(self, load: Load, now: float, *, vision: bool) -> None:
        """Count a request that is sent to it."""
        self.requests += 1
        self.text += load.text
        self.visual += load.visual
        self.breakers[stage_of(vision=vision)].begin(now)
        self.breakers[CONNECT].begin(now)

    def begin_answer(self, load: Load, sign: int = 1) -> None:
        """Count a request among those whose answer has begun; sign -1: count it there no longer."""
        self.begun += sign
        self.begun_text += sign * load.text
        self.begun_visual += sign * load.visual

    def end(self, load: Load, *, begun: bool = False) -> None:
        """Count a request no longer. begun: its answer had begun."""
        self.requests -= 1
        self.text -= load.text
        self.visual -= load.visual
        if begun:
            self.begin_answer(load, -1)

    def note_check(self, now: float, *, passed: bool, draining: bool = False) -> bool:
        """Note a health check. Returns whether the backend's health changed by it."""
        before, drained = self.healthy, self.drains_itself
        first = not self._was_healthy
        # One that drained and cannot be reached now has ended: it gets no request before it is ready again.
        self.drains_itself = draining or (drained and not passed)
        self.failed_checks = 0 if passed or draining else self.failed_checks + 1
        if passed:
            self.healthy = True
            self._was_healthy = True
        elif self.failed_checks >= self._settings.unhealthy_after or not self._was_healthy:
            self.healthy = False
        healthy_again = self.healthy and not before and not (first and self._starts_with_all(now))
        if healthy_again or (drained and passed and not draining):
            self.come_back(now)
        return self.healthy != before

    def _starts_with_all(self, now: float) -> bool:
        """Whether it became ready soon after the gateway began: then no other backend is warm yet."""
        full = self._settings.slow_start_s
        return self._since < self._created and now - self._created < full

    def come_back(self, now: float) -> None:
        """Begin its slow start: it was away, so its caches may be cold."""
        self._since = now
        self.recent = 0.0
        self.first_bytes.clear()

    def fade(self) -> None:
        """Let earlier answers count less. Called twice per second."""
        self.recent *= FADE

    def note_first_byte(self, seconds: float) -> None:
        """Note the time to the first byte of a request."""
        self.first_bytes.append(seconds)
        self.recent += 1.0

    def median_first_byte(self, least: int) -> float | None:
        """The median time to the first byte in seconds; None: fewer than `least` are known."""
        return median(self.first_bytes) if len(self.first_bytes) >= least else None

    def quick_first_byte(self) -> float:
        """The lower quartile of the known times to the first byte in seconds; 0: none is known."""
        ordered = sorted(self.first_bytes)
        return ordered[(len(ordered) - 1) // 4] if ordered else 0.0


def stage_of(*, vision: bool) -> str:
    """The stage that answers a request. vision: whether the request has images."""
    return VISION if vision else TEXT


class Load(NamedTuple):
    """The outstanding work of one request.

    text, visual: tokens.
    """

    text: int
    visual: int

    @property
    def tokens(self) -> int:
        """Tokens of text and images together."""
        return self.text + self.visual
