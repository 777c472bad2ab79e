"""The response cache, as the gateway's data path calls it.

    plan = cache.plan(body, images, tenant=..., model_version=..., cache_control=...)
    hit = await cache.lookup(plan)
    if hit is not None:
        send hit.payload() with hit.headers()
    else:
        with cache.record(plan) as recorder:
            for data in the backend's answer:
                recorder.feed(data)
            recorder.finish(status)

A plan whose lookup returned None may lead other requests, which wait for its answer. The `with` block passes
the lead on if it is left without `finish`. A plan that is not recorded after all must be given to `abandon`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fovea.gateway.cache.directives import FULL, parse_directives
from fovea.gateway.cache.entry import Entry, Unstorable, unpack
from fovea.gateway.cache.flight import Flights
from fovea.gateway.cache.hit import Hit
from fovea.gateway.cache.key import cacheability
from fovea.gateway.cache.plan import Plan, choices_of, wants_usage
from fovea.gateway.cache.recorder import Recorder
from fovea.gateway.cache.recording import Recording, Room
from fovea.gateway.cache.settings import KIB, MIB, ResponseCacheSettings
from fovea.gateway.cache.store import ResponseStore, store_key

RAW = 32
"""Most bytes of a stream, in bytes of the answer that it becomes. A chunk has one token and its frame."""
CLOSE_S = 1.0
"""Seconds for which answers that are being stored may delay the end."""
_BACKEND_FAILED = frozenset({"cut", "error"})


class ResponseCache:
    """Finds stored answers, and stores new ones. For one event loop."""

    def __init__(
        self,
        store: ResponseStore,
        settings: ResponseCacheSettings,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """wall: returns the time in seconds since 1970."""
        self._store = store
        self._settings = settings
        self._wall = wall
        self._flights = Flights()
        self._room = Room(settings.response_cache_recording_mib * MIB)
        self._answer_bytes = settings.response_cache_answer_kib * KIB
        self._counts: Counter[str] = Counter(hits=0, joined=0, misses=0, stale=0, stores=0)
        self._tasks: set[asyncio.Task[None]] = set()

    def plan(
        self,
        body: Mapping[str, Any],
        images: Sequence[str | None],
        *,
        tenant: str,
        model_version: str,
        path: str = "/v1/chat/completions",
        cache_control: str | None = None,
        asked: bool = False,
    ) -> Plan:
        """Return what the cache does with a request. The arguments are those of `key.cacheability`, and

        tenant: who sends the request; its share of the memory is used.
        cache_control: the request's header Cache-Control, or None.
        """
        directives = parse_directives(cache_control) if cache_control else FULL
        if not directives.write:
            return self._bypass(tenant, "no_store")
        shared = self._settings.response_cache_scope == "shared"
        scope = "shared" if shared else f"tenant:{tenant}"
        key, reason = cacheability(
            body, images, scope=scope, model_version=model_version, path=path, asked=asked
        )
        if key is None:
            return self._bypass(tenant, reason)
        if not directives.read:
            self._counts["bypass_no_cache"] += 1
        return Plan(
            key=store_key(scope, key),
            owner=tenant,
            reads=directives.read,
            stream=body.get("stream") is True,
            include_usage=wants_usage(body),
            choices=choices_of(body),
        )

    async def lookup(self, plan: Plan, *, wait_s: float | None = None) -> Hit | None:
        """Return the stored answer to a request, or None if a backend has to answer it.

        It waits for an equal request that is being answered now.

        wait_s: longest such wait in seconds; None: that of the settings.
        """
        if not plan.reads or not plan.key:
            return None
        data = await self._store.get(plan.key, owner=plan.owner)
        entry = self._usable(plan, None if data is None else unpack(data))
        if entry is not None and self._wall() - entry.stored >= self._settings.response_cache_ttl_s:
            entry = None
        if entry is None:
            entry = self._usable(plan, await self._join(plan, wait_s))
            self._counts["joined"] += entry is not None
        if entry is None:
            self._counts["misses"] += 1
            return None
        self._counts["hits"] += 1
        return Hit(entry, plan, max(0.0, self._wall() - entry.stored))

    async def stale(self, plan: Plan) -> Hit | None:
        """Return the stored answer to a request that no backend can answer, however old; None: none is."""
        if not plan.reads or not plan.key:
            return None
        data = await self._store.get(plan.key, owner=plan.owner)
        entry = self._usable(plan, None if data is None else unpack(data))
        if entry is None:
            return None
        self._counts["stale"] += 1
        return Hit(entry, plan, max(0.0, self._wall() - entry.stored))

    def record(self, plan: Plan) -> Recorder:
        """Return the recorder of the answer to a request that was not found."""
        if not plan.key:
            return Recorder(self, plan, None)
        limit = self._answer_bytes * (RAW if plan.stream else 1)
        return Recorder(self, plan, Recording(limit, self._room))

    def abandon(self, plan: Plan) -> None:
        """Note that a request will not be answered, so that another one leads those that wait."""
        if plan.seat is not None:
            plan.seat.leave()

    async def clear(self, tenant: str | None = None) -> int:
        """Remove the answers of a tenant; None: all. Returns how many were removed.

        With the shared scope, only all of them can be removed: a tenant alone has none.
        """
        return await self._store.clear(None if tenant is None else f"tenant:{tenant}")

    def stats(self) -> Mapping[str, float]:
        """Return counts and sizes by name.

        hits: answers that were found; joined: those of them that came from a request that was in flight.
        stale: old answers that were used because no backend could answer.
        misses, stores: requests that were not found, and answers that were stored.
        bypass_REASON: requests that cannot be cached. refused_REASON: answers that were not stored.
        """
        return {
            **self._counts,
            **self._store.stats(),
            "recording_bytes": self._room.used,
            "leaders": len(self._flights),
        }

    async def aclose(self) -> None:
        """Finish what is being stored, for at most CLOSE_S seconds, and close the store."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._store.aclose()

    def _bypass(self, tenant: str, reason: str) -> Plan:
        self._counts[f"bypass_{reason}"] += 1
        return Plan(key="", owner=tenant, reason=reason)

    def _usable(self, plan: Plan, entry: Entry | None) -> Entry | None:
        """Return the entry if it has token counts, or this request asks for none."""
        if entry is None or entry.has_usage or (plan.stream and not plan.include_usage):
            return entry
        return None

    async def _join(self, plan: Plan, wait_s: float | None) -> Entry | None:
        """Lead the requests for this answer, or wait for the one that does."""
        wait_s = self._settings.response_cache_wait_s if wait_s is None else wait_s
        if wait_s <= 0:
            return None
        seat = plan.seat = self._flights.join(plan.key)
        return None if seat.leads else await seat.wait(wait_s)

    def keep(self, plan: Plan, recording: Recording) -> None:
        """Store a recorded answer in a task of its own. For `Recorder`."""
        task = asyncio.get_running_loop().create_task(self._keep(plan, recording))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, plan: Plan, recording: Recording) -> None:
        seat = plan.seat
        try:
            entry = await recording.entry(
                stream=plan.stream, choices=plan.choices, stored=self._wall(), limit=self._answer_bytes
            )
            if seat is not None:
                seat.land(entry)
        except Unstorable as error:
            self.refuse(str(error))
            if seat is not None and str(error) not in _BACKEND_FAILED:
                seat.scatter()
            return
        finally:
            recording.drop("stored")
            self.abandon(plan)
        ttl_s = self._settings.response_cache_ttl_s + self._settings.response_cache_stale_s
        if await self._store.put(plan.key, entry.pack(), ttl_s, owner=plan.owner):
            self._counts["stores"] += 1
        else:
            self.refuse("store")

    def refuse(self, reason: str) -> None:
        """Count an answer that is not stored. For `Recorder`."""
        self._counts[f"refused_{reason}"] += 1
