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
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.api import sse
from fovea.core.errors import ConfigError
from fovea.core.json_text import one_line
from fovea.core.names import install_command
from fovea.gateway.cache.answers import Assembler, Entry, Unstorable, check_answer, events, unpack
from fovea.gateway.cache.flight import Flights
from fovea.gateway.cache.key import Plan, cacheability, choices_of, permissions, wants_usage
from fovea.gateway.cache.stores import LayeredStore, MemoryStore, ResponseStore, store_key
from fovea.gateway.settings import KIB, MIB, ResponseCacheSettings

SLICE = 32
"""Events that are parsed before other tasks get a turn."""
_SURROGATES = (b"\\ud", b"\\uD")
RAW = 32
"""Most bytes of a stream, in bytes of the answer that it becomes. A chunk has one token and its frame."""
CLOSE_S = 1.0
"""Seconds for which answers that are being stored may delay the end."""
_BACKEND_FAILED = frozenset({"cut", "error"})
HEAD = 64
"""Bytes of a stored value beside the answer, at most."""


class ResponseCache:
    """Finds stored answers, and stores new ones. For one event loop."""

    def __init__(
        self, store: ResponseStore, settings: ResponseCacheSettings, *, wall: Callable[[], float] = time.time
    ) -> None:
        """wall: returns the time in seconds since 1970."""
        self._store = store
        self._settings = settings
        self._wall = wall
        self._flights = Flights()
        self._recording_bytes = 0
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
        reads, stores = permissions(cache_control)
        if not stores:
            return self._bypass(tenant, "no_store")
        shared = self._settings.response_cache_scope == "shared"
        scope = "shared" if shared else f"tenant:{tenant}"
        key, reason = cacheability(
            body, images, scope=scope, model_version=model_version, path=path, asked=asked
        )
        if key is None:
            return self._bypass(tenant, reason)
        if not reads:
            self._counts["bypass_no_cache"] += 1
        return Plan(
            key=store_key(scope, key),
            owner=tenant,
            reads=reads,
            stream=body.get("stream") is True,
            include_usage=wants_usage(body),
            choices=choices_of(body),
        )

    async def lookup(self, plan: Plan) -> Hit | None:
        """Return the stored answer to a request, or None if a backend has to answer it.

        It waits for an equal request that is being answered now, for at most `response_cache_wait_s`.
        """
        if not plan.reads or not plan.key:
            return None
        data = await self._store.get(plan.key, owner=plan.owner)
        entry = self._usable(plan, None if data is None else unpack(data))
        if entry is not None and self._wall() - entry.stored >= self._settings.response_cache_ttl_s:
            entry = None
        if entry is None:
            entry = self._usable(plan, await self._join(plan))
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
        return Recorder(self, plan, self._answer_bytes * (RAW if plan.stream else 1))

    def abandon(self, plan: Plan) -> None:
        """Note that a request will not be answered, so that another one leads those that wait."""
        if plan.seat is not None:
            plan.seat.leave()

    async def clear(self) -> int:
        """Remove all answers. Returns how many were removed."""
        return await self._store.clear()

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
            "recording_bytes": self._recording_bytes,
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

    async def _join(self, plan: Plan) -> Entry | None:
        """Lead the requests for this answer, or wait for the one that does."""
        wait_s = self._settings.response_cache_wait_s
        if wait_s <= 0:
            return None
        seat = plan.seat = self._flights.join(plan.key)
        return None if seat.leads else await seat.wait(wait_s)

    def keep(self, recorder: Recorder) -> None:
        """Store a recorded answer in a task of its own. For `Recorder`."""
        task = asyncio.get_running_loop().create_task(self._keep(recorder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, recorder: Recorder) -> None:
        plan, seat = recorder.plan, recorder.seat
        try:
            entry = await entry_of(
                recorder.parts, stream=plan.stream, choices=plan.choices, stored=self._wall(),
                limit=self._answer_bytes,
            )  # fmt: skip
            if seat is not None:
                seat.land(entry)
        except Unstorable as error:
            self.refuse(str(error))
            if seat is not None and str(error) not in _BACKEND_FAILED:
                seat.scatter()
            return
        finally:
            recorder.free()
            recorder.leave()
        ttl_s = self._settings.response_cache_ttl_s + self._settings.response_cache_stale_s
        if await self._store.put(plan.key, entry.pack(), ttl_s, owner=plan.owner):
            self._counts["stores"] += 1
        else:
            self.refuse("store")

    def take_room(self, size: int) -> bool:
        """Count bytes of an answer that is being recorded, or give them back.

        False: there is no room for them.
        """
        if size > 0 and self._recording_bytes + size > self._settings.response_cache_recording_mib * MIB:
            return False
        self._recording_bytes += size
        return True

    def refuse(self, reason: str) -> None:
        """Count an answer that is not stored. For `Recorder`."""
        self._counts[f"refused_{reason}"] += 1


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer for one request.

    entry: the stored answer.
    age_s: seconds since it was stored.
    """

    entry: Entry
    plan: Plan
    age_s: float

    def headers(self) -> dict[str, str]:
        """Return the headers of the response: its type, and that and for how long it was stored."""
        kind = sse.MEDIA_TYPE if self.plan.stream else "application/json"
        return {"content-type": kind, "x-fovea-cache": "hit", "age": str(int(self.age_s))}

    def payload(self) -> bytes:
        """Return the body of the response: JSON, or a whole stream of events with `[DONE]`."""
        if not self.plan.stream:
            return self.entry.body
        return b"".join(events(json.loads(self.entry.body), include_usage=self.plan.include_usage))


class Recorder:
    """Takes a backend's answer while it is forwarded, and has it stored after its end. A context manager.

    While the answer grows, its bytes are only appended; it is parsed after its end. If the block is left
    without `finish`, another request leads those that wait.

    active: whether the answer may still be stored. If not, the recorder does nothing.
    seat: the request's place among equal ones, which it gives to its recorder.
    """

    def __init__(self, cache: ResponseCache, plan: Plan, limit: int) -> None:
        """limit: most bytes of this answer, as the backend sends it."""
        self.active = bool(plan.key)
        self.plan = plan
        self.seat, plan.seat = plan.seat, None
        self.parts: list[bytes] = []
        self._size = 0
        self._limit = limit
        self._cache = cache

    def feed(self, data: bytes) -> None:
        """Append bytes of the answer's body, decoded from any Content-Encoding.

        They must not change later.
        """
        if not self.active:
            return
        size = len(data)
        if self._size + size > self._limit:
            self._give_up("too_large")
        elif not self._cache.take_room(size):
            self._give_up("no_room")
        else:
            self._size += size
            self.parts.append(data)
            return
        if self.seat is not None:
            self.seat.scatter()

    def finish(self, status: int) -> None:
        """Store the answer, which has ended. status: HTTP status; only answers with 200 are stored."""
        if self.active and status == 200:
            self.active = False
            self._cache.keep(self)
        elif self.active:
            self._give_up("status")
            self.leave()

    def free(self) -> None:
        """Give the bytes back."""
        self._cache.take_room(-self._size)
        self._size, self.parts = 0, []

    def leave(self) -> None:
        """Let another request lead those that wait."""
        if self.seat is not None:
            self.seat.leave()

    def _give_up(self, reason: str) -> None:
        self.active = False
        self.free()
        self._cache.refuse(reason)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self._give_up("cut")
            self.leave()


async def entry_of(parts: Sequence[bytes], *, stream: bool, choices: int, stored: float, limit: int) -> Entry:
    """Return an answer from its bytes. It is parsed in short slices, between which other tasks run.

    stream: whether the bytes are server-sent events, or one JSON body.
    choices: number of choices that the request asked for.
    stored: the time now, in seconds since 1970.
    limit: most bytes of the stored body.

    Raises Unstorable unless the answer is whole and successful.
    """
    try:
        if stream:
            body = (await _assembled(parts)).body()
            check_answer(body, choices)
            data = one_line(json.dumps(body, ensure_ascii=False, separators=(",", ":"))).encode()
        else:
            data = b"".join(parts)
            body = json.loads(data)
            check_answer(body, choices)
            if any(escape in data for escape in _SURROGATES):
                # Half of a surrogate pair cannot be sent as a stream.
                json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeError, json.JSONDecodeError, RecursionError):
        raise Unstorable("unreadable") from None
    if len(data) > limit:
        raise Unstorable("too_large")
    return Entry(data, stored, body.get("usage") is not None)


async def _assembled(parts: Sequence[bytes]) -> Assembler:
    """Read the events of a stream. Raises Unstorable unless [DONE] is the last one."""
    # The decoder would put replacement characters in place of wrong bytes.
    b"".join(parts).decode()
    assembler, decoder, done, number = Assembler(), sse.Decoder(), False, 0
    for part in parts:
        for payload in decoder.feed(part):
            if done:
                raise Unstorable("cut")
            if payload.strip() == "[DONE]":
                done = True
            else:
                assembler.add(json.loads(payload))
            number += 1
            if number % SLICE == 0:
                await asyncio.sleep(0)
    if not done:
        raise Unstorable("cut")
    return assembler


def open_cache(settings: ResponseCacheSettings, redis_url: str = "") -> ResponseCache | None:
    """Return the response cache of one worker; None if the settings turn it off.

    redis_url: Redis that all workers share; empty: each worker has its own answers.

    Raises ConfigError if Redis is wanted, and its client library is not installed, or the URL is wrong.
    """
    capacity = settings.response_cache_mib * MIB
    if not capacity:
        return None
    kept_s = settings.response_cache_ttl_s + settings.response_cache_stale_s
    near = MemoryStore(capacity, ttl_s=kept_s, share=settings.response_cache_share)
    if not redis_url:
        return ResponseCache(near, settings)
    try:
        from fovea.gateway.cache.redis import RedisStore

        far = RedisStore(
            redis_url,
            timeout_s=settings.response_cache_redis_timeout_ms / 1000,
            most_value_bytes=settings.response_cache_answer_kib * KIB + HEAD,
            most_bytes=settings.response_cache_redis_mib * MIB,
        )
    except ImportError:
        raise ConfigError(f"Redis needs its client library: {install_command('redis')}") from None
    except ValueError as error:
        raise ConfigError(f"the URL of Redis: {error}; accepted: redis://HOST:PORT/DB") from None
    return ResponseCache(LayeredStore(near, far, settings.response_cache_near_ttl_s), settings)
