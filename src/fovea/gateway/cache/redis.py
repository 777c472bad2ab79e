"""The store in Redis, which all workers and gateways share.

Redis is never needed for an answer. A call that fails, or takes too long, is a miss; after it Redis is left
alone for a moment, which becomes longer while it keeps failing. The client connects again by itself.

A value in Redis begins with a checksum of all that follows and of its key. What does not fit it is foreign or
damaged: a miss, and deleted.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from fovea.gateway.breaker import Breaker

T = TypeVar("T")

PREFIX = "fovea:response:"
CONNECTIONS = 8
"""Most connections of one worker."""
COMPRESS_FROM = 1024
"""Shorter values are not compressed."""
PAYS = 0.9
"""A value is compressed if that makes it shorter than this part of it."""
MEMORY_CHECK_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
"""Seconds for which Redis is left alone after it failed. It is longer after every try that fails."""
CLEAR_S = 30.0
"""Longest time of a clearing in seconds."""

_DIGEST = 16
_HEAD = struct.Struct(">4s?d")
_MAGIC = b"fvx1"


class Found(NamedTuple):
    """A value and the seconds that are left of its time."""

    value: bytes
    ttl_s: float


class RedisStore:
    """Answers in Redis 7.

    A value that is larger than its ceiling is not stored. Redis itself must be bounded, too: `maxmemory` and
    `maxmemory-policy allkeys-lru`. If `most_bytes` is not 0, the store asks Redis every 10 seconds how much
    memory it uses, and stores nothing while that is more.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.1,
        most_value_bytes: int = 1024 * 1024,
        most_bytes: int = 0,
        prefix: str = PREFIX,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """url: as redis://HOST:PORT/DB, rediss:// with TLS, or unix://PATH. Nothing connects yet.

        timeout_s: longest time of a call in seconds, waiting for a connection included.
        most_value_bytes: ceiling of a value, before it is compressed.
        most_bytes: memory that Redis may use before puts stop; 0: no limit of the store's own.
        """
        self._timeout_s = timeout_s
        self._most_value_bytes = most_value_bytes
        self._most_bytes = most_bytes
        self._prefix = prefix
        self._clock = clock
        self._wall = wall
        self._breaker = Breaker(1, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._memory_checked = float("-inf")
        self._used_bytes = 0
        self._counts = dict.fromkeys(
            ("failures", "refused", "damaged", "skipped", "read_bytes", "written_bytes"), 0
        )
        self._redis = Redis.from_pool(
            BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        )

    async def fetch(self, key: str) -> Found | None:
        """Return the bytes of a key and the time that is left, or None."""
        data = await self._call(partial(self._redis.get, self._prefix + key))
        if not isinstance(data, bytes):
            return None
        self._counts["read_bytes"] += len(data)
        found = self._open(key, data)
        if found is None:
            self._counts["damaged"] += 1
            await self.drop(key)
        return found

    async def put(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Store bytes for so many seconds. False: they are too large, or Redis fails or is full."""
        if len(value) > self._most_value_bytes or await self._is_full():
            self._counts["skipped"] += 1
            return False
        data = self._wrap(key, value, ttl_s)
        milliseconds = max(1, int(ttl_s * 1000))
        stored = await self._call(partial(self._redis.set, self._prefix + key, data, px=milliseconds))
        if stored:
            self._counts["written_bytes"] += len(data)
        return bool(stored)

    async def drop(self, key: str) -> None:
        """Remove a key, if it is there."""
        await self._call(partial(self._redis.unlink, self._prefix + key))

    async def clear(self) -> int:
        """Remove all answers. Returns how many were removed.

        It reads the names of all keys of the Redis database, a thousand at a time, for at most CLEAR_S
        seconds.
        """
        cursor, removed, deadline = 0, 0, self._clock() + CLEAR_S
        while self._clock() < deadline:
            step = await self._call(partial(self._redis.scan, cursor, match=f"{self._prefix}*", count=1000))
            if step is None:
                break
            cursor, keys = step
            if keys:
                removed += await self._call(partial(self._redis.unlink, *keys)) or 0
            if not cursor:
                break
        return removed

    def stats(self) -> Mapping[str, float]:
        """Return the store's counts by name. `redis_failing` is 1 while Redis does not answer."""
        counts = {f"redis_{name}": float(count) for name, count in self._counts.items()}
        return {
            **counts,
            "redis_failing": float(self._breaker.is_open),
            "redis_outages": self._breaker.outages,
        }

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.aclose()

    async def _call(self, command: Callable[[], Awaitable[T]]) -> T | None:
        """Run one command. None: it failed, or Redis is left alone now."""
        breaker, now = self._breaker, self._clock()
        if not breaker.allows(now):
            return None
        breaker.begin(now)
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await command()
        except ResponseError:
            # Redis works, and refuses this command: it is full, or a replica that may only be read.
            self._counts["refused"] += 1
            breaker.succeed()
            return None
        except (RedisError, OSError, EOFError, TimeoutError):
            self._counts["failures"] += 1
            breaker.fail(self._clock())
            return None
        breaker.succeed()
        return result

    async def _is_full(self) -> bool:
        """Whether Redis uses more memory than `most_bytes`, as of the last look at it."""
        if not self._most_bytes:
            return False
        now = self._clock()
        if now - self._memory_checked >= MEMORY_CHECK_S:
            self._memory_checked = now
            info: Any = await self._call(partial(self._redis.info, "memory"))
            if info is not None:
                self._used_bytes = int(info.get("used_memory", 0))
        return self._used_bytes > self._most_bytes

    def _wrap(self, key: str, value: bytes, ttl_s: float) -> bytes:
        """Return a value with its checksum, and with the time of its end in seconds since 1970."""
        packed = zlib.compress(value, 1) if len(value) >= COMPRESS_FROM else value
        compressed = len(packed) < PAYS * len(value)
        rest = _HEAD.pack(_MAGIC, compressed, self._wall() + ttl_s) + (packed if compressed else value)
        return self._checksum(key, rest) + rest

    def _open(self, key: str, data: bytes) -> Found | None:
        """Undo `_wrap`. None for bytes that it did not write for this key."""
        rest = data[_DIGEST:]
        if len(rest) < _HEAD.size or data[:_DIGEST] != self._checksum(key, rest):
            return None
        magic, compressed, end = _HEAD.unpack_from(rest)
        if magic != _MAGIC:
            return None
        value = rest[_HEAD.size :]
        if compressed:
            reader = zlib.decompressobj()
            try:
                value = reader.decompress(value, self._most_value_bytes)
            except zlib.error:
                return None
            if not reader.eof:
                return None
        return Found(value, max(0.0, end - self._wall()))

    @staticmethod
    def _checksum(key: str, rest: bytes) -> bytes:
        return hashlib.blake2b(rest, digest_size=_DIGEST, key=key.encode()[-64:]).digest()
