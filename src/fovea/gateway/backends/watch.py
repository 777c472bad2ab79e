"""Looks after the backends of one worker: health checks, their models, and slow ones, which are ejected.

A backend can answer its health checks and still be useless: a throttled GPU, a full disk, a noisy neighbour.
Its median time to the first byte then is far from those of the others. It is ejected for a while, longer each
time, but never more than a part of all backends: if most are slow, slow is the rule.

An unknown image takes many times as long as a cached one. So a backend that has got some more new images than
others has a far larger median. It is judged by its lower quartile, too: a slow backend is slow for all. And a
backend to which more requests come than to others has more work: it may be slower in that proportion.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fovea.gateway.backends.backend import Backend
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.settings import ResilienceSettings

LEAST_SAMPLES = 16
"""Times that must be known of a backend before it is judged."""
LEAST_DIFFERENCE_S = 0.05
"""Differences below this are noise, whatever their ratio."""
LONGEST = 8
"""A repeated ejection lasts at most so many times the first one."""
log = logging.getLogger("fovea.gateway")
MODELS_EVERY = 12
"""A backend is asked for its models at every so many checks, and at each one until it has told them."""
FOVEA = "fovea"
"""Owner of every model in the list of a Fovea engine."""
TICK_S = 1.0
READY, HEALTH = "/ready", "/health"
ANSWERS = frozenset((401, 403, 404, 405))
"""Statuses of servers that have no such route, or that open it to others only: they answer."""
ASK_EVERY_S = 2.0
"""Seconds between two questions for the models of a backend, if there are no health checks."""
Get = Callable[[str, str, float], Awaitable[tuple[int, bytes]]]
"""Sends a GET to a URL with a key, within so many seconds; `Upstream.get` is one."""
MOST_MODELS = 1000
MODALITIES = frozenset(("text", "image", "video", "audio"))
"""Models of one backend. What it lists beyond them is not used."""
LONGEST_NAME = 256
"""Characters of a model's name."""


@dataclass(eq=False)
class Watch:
    """Checks every backend in turn with the others, so that checks do not come in one burst.

    on_change: called when health or models of a backend have changed.
    on_eject: called with a backend that is ejected.
    """

    fleet: Fleet
    get: Get
    settings: ResilienceSettings
    clock: Callable[[], float]
    on_change: Callable[[], None]
    on_eject: Callable[[Backend], None]
    _due: dict[str, float] = field(default_factory=dict, init=False)
    _rounds: dict[str, int] = field(default_factory=dict, init=False)
    _paths: dict[str, str] = field(default_factory=dict, init=False)
    _checks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def run(self) -> None:
        """Check until cancelled."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(min(TICK_S, self.settings.probe_every_s or TICK_S) / 2)
        finally:
            for task in self._checks:
                task.cancel()

    def tick(self) -> None:
        """Start the checks that are due, and eject backends that are too slow."""
        now = self.clock()
        for backend in self.fleet:
            backend.fade()
            every_s = self.settings.probe_every_s or (0.0 if backend.models else ASK_EVERY_S)
            if every_s and now >= self._due.get(backend.name, 0.0):
                self._due[backend.name] = now + every_s
                task = asyncio.get_running_loop().create_task(self.check(backend))
                self._checks.add(task)
                task.add_done_callback(self._checks.discard)
        for name in self._due.keys() - {backend.name for backend in self.fleet}:
            del self._due[name]
            self._rounds.pop(name, None)
            self._paths.pop(name, None)
        for model in self.fleet.models():
            for backend in eject_outliers(self.fleet.serving(model), self.settings, now):
                log.warning("backend %s is much slower than the others, and is ejected", backend.name)
                self.on_eject(backend)

    async def check(self, backend: Backend) -> None:
        """Check the health of a backend, if that is wanted, and ask it now and then for its models."""
        probes = self.settings.probe_every_s
        self._due[backend.name] = self.clock() + (probes or ASK_EVERY_S) * random.uniform(0.9, 1.1)
        round_ = self._rounds.get(backend.name, 0)
        self._rounds[backend.name] = round_ + 1
        if probes and not await self._passes(backend):
            return
        if not backend.config.models and (not backend.models or round_ % MODELS_EVERY == 0):
            await self._ask_models(backend)

    async def _passes(self, backend: Backend) -> bool:
        """Check the health of a backend."""
        draining = passed = False
        try:
            status, body = await self._ask(backend)
            passed = status < 400 or status in ANSWERS
            draining = status == 503 and _says_draining(body)
        except (OSError, TimeoutError):
            pass
        if backend.note_check(self.clock(), passed=passed, draining=draining):
            log.warning("backend %s is %s", backend.name, "healthy again" if backend.healthy else "unhealthy")
            self.on_change()
        return passed

    async def _ask(self, backend: Backend) -> tuple[int, bytes]:
        """Return status and body of a backend's health check. Raises OSError and TimeoutError.

        Without a path of its own, /ready is asked, which also tells about loading and draining, and if there
        is no such route, /health.
        """
        timeout_s = self.settings.probe_timeout_s
        path = backend.config.health or self._paths.get(backend.name, READY)
        status, body = await self.get(backend.config.url + path, backend.key, timeout_s)
        if status in ANSWERS and path == READY and not backend.config.health:
            path = HEALTH
            status, body = await self.get(backend.config.url + path, backend.key, timeout_s)
        self._paths[backend.name] = path
        return status, body

    async def _ask_models(self, backend: Backend) -> None:
        try:
            status, body = await self.get(
                backend.config.url + "/v1/models", backend.key, self.settings.probe_timeout_s
            )
            listed = json.loads(body)["data"] if status == 200 else []
            names = [entry["id"] for entry in listed if _is_name(entry["id"])][:MOST_MODELS]
            is_fovea = all(entry.get("owned_by") == FOVEA for entry in listed)
        except (
            OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            log.warning(
                "backend %s does not tell its models: %s", backend.name, error or type(error).__name__
            )
            return
        if names:
            backend.is_fovea = is_fovea
            backend.modalities = _modalities(listed, names)
        if names and frozenset(names) != backend.models:
            self.fleet.learn_models(backend, names)
            self.on_change()


def eject_outliers(backends: Sequence[Backend], settings: ResilienceSettings, now: float) -> list[Backend]:
    """Eject the slow ones of some backends, and return those that were ejected now."""
    if not settings.outlier_factor:
        return []
    judged = [one for one in backends if one.median_first_byte(LEAST_SAMPLES) is not None]
    ejected = sum(now < backend.ejected_until for backend in backends)
    room = int(settings.max_ejected * len(backends)) - ejected
    slow: list[Backend] = []
    for backend in sorted(judged, key=lambda one: -(one.median_first_byte(LEAST_SAMPLES) or 0.0)):
        others = [one for one in judged if one is not backend and one not in slow]
        if not others or len(slow) >= room or now < backend.ejected_until:
            continue
        if backend.weight(now) < backend.config.weight:  # a slow start: its caches are cold, so it is slower
            continue
        if _is_slow(backend, others, settings.outlier_factor):
            slow.append(backend)
    for backend in slow:
        backend.ejections += 1
        backend.ejected_until = now + settings.outlier_eject_s * min(backend.ejections, LONGEST)
        backend.come_back(backend.ejected_until)
    return slow


def _is_slow(backend: Backend, others: Sequence[Backend], factor: float) -> bool:
    """Whether a backend is slower than others by more than a factor. All have enough times."""
    work = backend.recent / max(1.0, median(one.recent for one in others))
    factor *= max(1.0, work)
    own, usual = median(backend.first_bytes), median(median(one.first_bytes) for one in others)
    quick = median(one.quick_first_byte() for one in others)
    return (
        own > factor * usual
        and own - usual > LEAST_DIFFERENCE_S
        and backend.quick_first_byte() > factor * quick
    )


def _modalities(listed: list[Any], names: Collection[str]) -> dict[str, frozenset[str]]:
    """Return what the models of a list take, as far as it tells."""
    found = {}
    for entry in listed:
        told = entry.get("input_modalities")
        if entry["id"] in names and isinstance(told, list) and all(isinstance(each, str) for each in told):
            found[entry["id"]] = frozenset(told) & MODALITIES
    return found


def _is_name(value: object) -> bool:
    """Whether a value can be the name of a model: it appears in headers, logs, metrics and errors."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def _says_draining(body: bytes) -> bool:
    """Whether the body of a 503 says that the engine is shutting down, and not that it is broken."""
    return b"shutting down" in body or b"draining" in body
