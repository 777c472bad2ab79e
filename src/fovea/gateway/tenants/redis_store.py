"""Accounts in Redis, for any number of gateways.

Every call is one Lua script, so it is atomic. The time is that of Redis, so the clocks of gateways do not
matter. Both keys of a tenant have its name in braces, so that a cluster keeps them in one place.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from fovea.core.errors import ConfigError
from fovea.gateway.tenants.account import Adjustment, Bounds, Counters
from fovea.gateway.tenants.shared import StoreFailed, births
from fovea.gateway.usage.prices import Amounts

_FOLDER = Path(__file__).parent / "scripts"
_LIFETIME_MS = 32 * 86_400_000
"""Lifetime of an account that nobody uses: longer than a month, whose cost it counts."""
_CONNECTIONS = 64


def _script(name: str) -> Script:
    """Return a script: the common text, and its own."""
    text = "\n".join((_FOLDER / f"{part}.lua").read_text(encoding="utf-8") for part in ("account", name))
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisStore:
    """A store in one Redis server.

    url: redis://HOST:PORT/DB, rediss:// or unix://, with user and password if Redis needs them.
    timeout_s: longest wait of a call, connecting included.
    lease_s: seconds after which a reservation that was not settled frees its place.
    clock: returns the seconds of the epoch; None: the time of Redis.
    Raises ConfigError if the URL is not accepted. Redis need not run yet.
    """

    def __init__(
        self, url: str, timeout_s: float, lease_s: float, clock: Callable[[], float] | None = None
    ) -> None:
        self._timeout_s, self._lease_us, self._clock = timeout_s, round(lease_s * 1e6), clock
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                driver_info=None,
            )
        except ValueError as error:
            raise ConfigError(
                f"accounts: the URL of Redis is not accepted: {error}", param="accounts"
            ) from error
        self._redis = Redis(connection_pool=pool)
        where = pool.connection_kwargs
        address = f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        self._name = f"Redis at {where.get('path') or address}"  # without its password
        self._births = births()
        self._batches = Batches(self._redis, timeout_s)
        self._scripts = {name: _script(name) for name in ("reserve", "adjust", "adopt")}

    async def reserve(
        self, lease: str, tenant: str, bounds: Bounds, amounts: Amounts, known: Counters
    ) -> tuple[bool, Counters]:
        """Take all amounts and a place, or nothing."""
        return await self._run("reserve", tenant, bounds, known, amounts, (lease,))

    async def adjust(self, tenant: str, bounds: Bounds, change: Adjustment, known: Counters) -> Counters:
        """Apply a change and return the account."""
        numbers = (*change.minute, change.day, *change.day_used, change.month, change.month_cost)
        return (await self._run("adjust", tenant, bounds, known, numbers, (change.lease,)))[1]

    async def adopt(self, tenant: str, bounds: Bounds, leases: Sequence[str], known: Counters) -> Counters:
        """Register leases again."""
        return (await self._run("adopt", tenant, bounds, known, (), tuple(leases)))[1]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._batches.aclose()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.aclose()
                await self._redis.connection_pool.disconnect()
        except (RedisError, OSError):
            return

    async def _run(
        self,
        name: str,
        tenant: str,
        bounds: Bounds,
        known: Counters,
        numbers: Sequence[float],
        leases: tuple[str, ...],
    ) -> tuple[bool, Counters]:
        """Run a script and return its answer."""
        now = 0 if self._clock is None else int(self._clock() * 1e6)
        values = (
            now, _LIFETIME_MS, self._lease_us,
            *bounds.minute, *bounds.day, bounds.month_cost, bounds.in_flight,
            known.at, *known.minute, known.day, *known.day_used, known.month, known.month_cost, *numbers,
        )  # fmt: skip
        text = " ".join(map(repr, values))
        keys = (f"fovea:{{{tenant}}}:account", f"fovea:{{{tenant}}}:leases")
        arguments = (*keys, text, next(self._births), known.birth, *leases)

        try:
            return _counters(await self._batches.call(self._scripts[name], 2, arguments))
        except (RedisError, OSError) as error:
            reason = f"gave no answer in {self._timeout_s:g} s" if isinstance(error, TimeoutError) else error
            raise StoreFailed(f"{self._name}: {reason}") from error
        except (ValueError, TypeError, AttributeError, OverflowError) as error:  # a damaged answer
            raise StoreFailed(f"{self._name}: its answer cannot be read") from error


def _counters(answer: bytes) -> tuple[bool, Counters]:
    fits, birth, *texts = answer.decode().split(" ")
    at, a, b, c, d, day, e, f, g, h, month, month_cost, in_flight = map(float, texts)
    counters = Counters(
        birth, int(at), (a, b, c, d), int(day), (e, f, g, h), int(month), month_cost, int(in_flight)
    )
    return fits == "1", counters


class Script(NamedTuple):
    """One Lua script.

    text: its source.
    sha: the hash by which Redis knows it.
    """

    text: str
    sha: str


class Call(NamedTuple):
    """One call that waits for its answer.

    keys: number of keys at the beginning of the arguments.
    """

    script: Script
    keys: int
    arguments: Sequence[str]
    answer: asyncio.Future[Any]


class Batches:
    """Sends calls of scripts to Redis together if they come in one iteration of the event loop.

    A batch is one pipeline on one connection. It saves most of the client's processor time when many requests
    come at once.

    timeout_s: longest time of a batch, connecting included.
    """

    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._redis, self._timeout_s = client, timeout_s
        self._waiting: list[Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, script: Script, keys: int, arguments: Sequence[str]) -> Any:
        """Call a script and return its answer. Raises TimeoutError, RedisError or OSError."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(Call(script, keys, arguments, answer))
        if len(self._waiting) == 1:
            task = asyncio.create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def aclose(self) -> None:
        """Wait for batches that were sent. They end within their timeout."""
        await asyncio.gather(*self._tasks)

    async def _send(self) -> None:
        calls, self._waiting = self._waiting, []
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._answers(calls)
                for i, call in enumerate(calls):
                    if isinstance(
                        answers[i], NoScriptError
                    ):  # Redis was started again, or forgot its scripts
                        answers[i] = await self._redis.eval(call.script.text, call.keys, *call.arguments)
        except (TimeoutError, RedisError, OSError) as error:
            answers = [error] * len(calls)
        for call, answer in zip(calls, answers, strict=True):
            if call.answer.done():  # its request was cancelled
                continue
            if isinstance(answer, Exception):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)

    async def _answers(self, calls: Sequence[Call]) -> list[Any]:
        """Return one answer or exception per call. Raises an exception that concerns all of them."""
        if len(calls) == 1:
            only = calls[0]
            try:
                return [await self._redis.evalsha(only.script.sha, only.keys, *only.arguments)]
            except NoScriptError as error:
                return [error]
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(call.script.sha, call.keys, *call.arguments)
            return list(await pipe.execute(raise_on_error=False))
