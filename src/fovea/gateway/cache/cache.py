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
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fovea.api import sse
from fovea.core.errors import ConfigError
from fovea.core.json_text import one_line
from fovea.core.names import install_command
from fovea.gateway.cache.answers import Assembler, Entry, Unstorable, check_answer, events, unpack
from fovea.gateway.cache.flight import Flights
from fovea.gateway.cache.key import FULL, Plan, cacheability, choices_of, parse_directives, wants_usage
from fovea.gateway.cache.stores import LayeredStore, MemoryStore, ResponseStore, store_key
from fovea.gateway.settings import KIB, MIB, ResponseCacheSettings


class Hit:
    """A stored answer for one request.

    entry: the stored answer.
    age_s: seconds since it was stored.
    """

    __slots__ = ("_plan", "age_s", "entry")

    def __init__(self, entry: Entry, plan: Plan, age_s: float) -> None:
        self.entry = entry
        self.age_s = age_s
        self._plan = plan

    def headers(self) -> dict[str, str]:
        """Return the headers of the response: its type, and that and for how long it was stored."""
        kind = sse.MEDIA_TYPE if self._plan.stream else "application/json"
        return {"content-type": kind, "x-fovea-cache": "hit", "age": str(int(self.age_s))}

    def payload(self) -> bytes:
        """Return the body of the response: JSON, or a whole stream of events with `[DONE]`."""
        if not self._plan.stream:
            return self.entry.body
        return b"".join(events(json.loads(self.entry.body), include_usage=self._plan.include_usage))


SLICE = 32
"""Events that are parsed before other tasks get a turn."""
_SURROGATES = (b"\\ud", b"\\uD")


class Room:
    """The bytes of all answers that are being recorded, under one ceiling.

    limit: ceiling in bytes.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Recording:
    """The bytes of one answer. While it grows, it only appends; it is parsed after its end.

    reason: why the answer will not be stored, one word; empty if nothing speaks against it yet.
    """

    __slots__ = ("_limit", "_parts", "_room", "_size", "reason")

    def __init__(self, limit: int, room: Room) -> None:
        """limit: most bytes of this answer, as the backend sends it. room: shared by all recordings."""
        self.reason = ""
        self._parts: list[bytes] = []
        self._size = 0
        self._limit = limit
        self._room = room

    def feed(self, data: bytes) -> None:
        """Append bytes of the answer's body. They must not change later."""
        if self.reason:
            return
        size = len(data)
        if self._size + size > self._limit:
            self.drop("too_large")
        elif self._room.used + size > self._room.limit:
            self.drop("no_room")
        else:
            self._size += size
            self._room.used += size
            self._parts.append(data)

    def drop(self, reason: str) -> None:
        """Give the bytes back. The answer will not be stored."""
        self._room.used -= self._size
        self._size = 0
        self._parts = []
        self.reason = self.reason or reason

    async def entry(self, *, stream: bool, choices: int, stored: float, limit: int) -> Entry:
        """Return the answer. It is parsed in short slices, between which other tasks run.

        stream: whether the bytes are server-sent events, or one JSON body.
        choices: number of choices that the request asked for.
        stored: the time now, in seconds since 1970.
        limit: most bytes of the stored body.

        Raises Unstorable unless the answer is whole and successful.
        """
        if self.reason:
            raise Unstorable(self.reason)
        try:
            if stream:
                body = (await self._assemble()).body()
                check_answer(body, choices)
                data = one_line(json.dumps(body, ensure_ascii=False, separators=(",", ":"))).encode()
            else:
                data = b"".join(self._parts)
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

    async def _assemble(self) -> Assembler:
        """Read the events of the stream. Raises Unstorable unless [DONE] is the last one."""
        # The decoder would put replacement characters in place of wrong bytes.
        b"".join(self._parts).decode()
        assembler, decoder, done, number = Assembler(), sse.Decoder(), False, 0
        for part in self._parts:
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


if TYPE_CHECKING:
    pass


class Recorder:
    """Takes the answer of a backend while it is forwarded. A context manager.

    active: whether the answer may be stored. If not, the recorder does nothing.
    """

    __slots__ = ("_cache", "_plan", "_recording")

    def __init__(self, cache: ResponseCache, plan: Plan, recording: Recording | None) -> None:
        self._cache = cache
        self._plan = plan
        self._recording = recording

    @property
    def active(self) -> bool:
        """Whether the answer may still be stored."""
        return self._recording is not None

    @property
    def followers(self) -> int:
        """Number of requests that wait for this answer.

        While there are any, it is worth reading the answer to its end, also if its own client is gone.
        """
        return 0 if self._plan.seat is None else self._plan.seat.followers

    def feed(self, data: bytes) -> None:
        """Append bytes of the answer's body, decoded from any Content-Encoding."""
        if self._recording is None:
            return
        self._recording.feed(data)
        if self._recording.reason:
            self._cache.refuse(self._recording.reason)
            self._recording = None
            if self._plan.seat is not None:
                self._plan.seat.scatter()

    def finish(self, status: int) -> None:
        """Store the answer, which has ended. status: HTTP status; only answers with 200 are stored."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if status == 200:
            self._cache.keep(self._plan, recording)
            return
        recording.drop("status")
        self._cache.refuse("status")
        self._cache.abandon(self._plan)

    def close(self) -> None:
        """Give up an answer that has not ended. Another request leads those that wait."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.drop("cut")
            self._cache.refuse("cut")
            self._cache.abandon(self._plan)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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


HEAD = 64
"""Bytes of a stored value beside the answer, at most."""


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
