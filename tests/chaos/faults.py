"""The catalogue of faults: what an episode of each kind does to the stack."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from tests.chaos import envoy, plan
from tests.chaos.levels import descendants
from tests.chaos.proxy import FaultProxy
from tests.chaos.stack import ENGINES, WORKERS, Stack
from tests.chaos.timeline import Episode

CACHE_KINDS = {name: name for name in ("latency", "reset", "close", "silent")} | {"damage": "flip-response"}
"""Faults between the gateway and the Redis of its cache, with the proxy's kinds."""
CLOCK_JUMPS = (7200, -7200, 90, -90)
POLL_S = 0.1


@dataclass
class Log:
    """The faults that took effect. counts: by kind of episode. recoveries: seconds by kind."""

    counts: dict[str, int] = field(default_factory=dict)
    recoveries: dict[str, list[float]] = field(default_factory=dict)

    def add(self, kind: str, count: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count

    def recovered(self, kind: str, seconds: float) -> None:
        self.recoveries.setdefault(kind, []).append(seconds)


Inject = Callable[[Stack, Episode, Random, Log], AbstractAsyncContextManager[None]]
"""Injects a fault during its block."""


def catalogue(stack: Stack, *, media: bool) -> dict[str, Inject]:
    """Return the faults that this machine permits, by the names of their kinds.

    media, flood: these are injected by the load.
    """
    found: dict[str, Inject] = {}
    for kind in plan.KINDS:
        found[f"client {kind}"] = _by_proxy(lambda stack: stack.front_proxy, kind)
        found[f"engine {kind}"] = _by_proxy(lambda stack: stack.engine_proxy, kind)
    for name, kind in CACHE_KINDS.items():
        found[f"cache {name}"] = _by_proxy(lambda stack: stack.cache_proxy, kind)
    found |= {
        "envoy abort": _by_envoy(envoy.ABORT_KEY, 0), "envoy delay": _by_envoy(envoy.DELAY_KEY, 1),
        "stop engine": _stopping(_engine), "stop worker": _stop_worker, "stop redis": _stopping(_redis),
        "kill engine": _killing(_engine), "kill worker": _kill_worker, "kill redis": _killing(_redis),
        "flood": _by_load,
    }  # fmt: skip
    if media:
        found["media"] = _by_load
    if stack.disk.mounted:
        found["full disk"] = _full_disk
    if stack.cache_disk.mounted:
        found["read-only cache"] = _read_only
    if stack.clock.library is not None:
        found["clock jump"] = _clock_jump
    if stack.memory.permitted:
        found["out of memory"] = _out_of_memory
    return found


@asynccontextmanager
async def _by_load(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    """Inject nothing here: the clients send other requests during the episode."""
    yield


def _by_proxy(choose: Callable[[Stack], FaultProxy], kind: str) -> Inject:
    @asynccontextmanager
    async def inject(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
        proxy = choose(stack)
        before = proxy.counts[kind]
        proxy.window = plan.Window(episode.number, kind)
        try:
            yield
        finally:
            proxy.window = None
            log.add(episode.kind, proxy.counts[kind] - before)

    return inject


def _by_envoy(key: str, place: int) -> Inject:
    @asynccontextmanager
    async def inject(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
        before = await envoy.injected(stack.envoy_admin)
        await envoy.set_percent(stack.envoy_admin, key, envoy.PERCENT)
        try:
            yield
        finally:
            await envoy.set_percent(stack.envoy_admin, key, 0)
            log.add(episode.kind, (await envoy.injected(stack.envoy_admin))[place] - before[place])

    return inject


def _engine(rng: Random) -> str:
    return rng.choice(ENGINES)


def _redis(_: Random) -> str:
    return "redis"


def _stopping(choose: Callable[[Random], str]) -> Inject:
    @asynccontextmanager
    async def inject(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
        service = choose(rng)
        stack.signal(service, signal.SIGSTOP)
        log.add(episode.kind)
        try:
            yield
        finally:
            stack.signal(service, signal.SIGCONT)

    return inject


def _killing(choose: Callable[[Random], str]) -> Inject:
    @asynccontextmanager
    async def inject(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
        service = choose(rng)
        old = stack.signal(service, signal.SIGKILL)
        log.add(episode.kind)
        log.recovered(episode.kind, await stack.restarted(service, old))
        yield

    return inject


@asynccontextmanager
async def _stop_worker(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    worker = rng.choice(stack.workers())
    os.kill(worker, signal.SIGSTOP)
    log.add(episode.kind)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@asynccontextmanager
async def _kill_worker(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    before = stack.workers()
    stack.worker_kills.append(time.time())
    os.kill(rng.choice(before), signal.SIGKILL)
    log.add(episode.kind)
    started = time.monotonic()
    async with asyncio.timeout(60):
        while len(now := stack.workers()) < WORKERS or now == before:
            await asyncio.sleep(POLL_S)
    log.recovered(episode.kind, time.monotonic() - started)
    yield


@asynccontextmanager
async def _full_disk(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    disks = (stack.disk, stack.cache_disk)
    for disk in disks:
        disk.fill()
    log.add(episode.kind)
    try:
        yield
    finally:
        for disk in disks:
            disk.clear()


@asynccontextmanager
async def _read_only(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    for _ in range(20):  # it is refused while a file is open for writing
        if stack.cache_disk.read_only(True):
            log.add(episode.kind)
            break
        await asyncio.sleep(POLL_S)
    try:
        yield
    finally:
        stack.cache_disk.read_only(False)


@asynccontextmanager
async def _clock_jump(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    stack.clock.add(rng.choice(CLOCK_JUMPS))
    log.add(episode.kind)
    try:
        yield
    finally:
        stack.clock.add(0)
        log.add(episode.kind)


@asynccontextmanager
async def _out_of_memory(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    before, old = stack.memory.kills, stack.pid(ENGINES[1])
    balloon = stack.memory.exhaust(descendants(old))
    try:
        if await _ended(stack, old):
            log.recovered(episode.kind, await stack.restarted(ENGINES[1], old))
        yield
    finally:
        if balloon is not None:
            balloon.kill()
            await asyncio.to_thread(balloon.wait)
        stack.memory.relax()
        log.add(episode.kind, stack.memory.kills - before)


async def _ended(stack: Stack, old: int) -> bool:
    """Wait a few seconds for the kernel, and return whether it has killed the engine."""
    for _ in range(40):
        if stack.pid(ENGINES[1]) != old:
            return True
        await asyncio.sleep(POLL_S)
    return False
