"""The catalogue of faults: what an episode of each kind does to the stack."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from tests.chaos import envoy, plan
from tests.chaos.proxy import FaultProxy
from tests.chaos.stack import WORKERS, Stack
from tests.chaos.timeline import Episode

CACHE_KINDS = {
    "latency": "latency",
    "reset": "reset",
    "close": "close",
    "silent": "silent",
    "damage": "flip-response",
}
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
        "stop engine": _stop_engine, "kill engine": _kill_engine, "stop worker": _stop_worker,
        "kill worker": _kill_worker, "stop redis": _stop_redis, "kill redis": _kill_redis, "flood": _by_load,
    }  # fmt: skip
    if media:
        found["media"] = _by_load
    if stack.disk.mounted:
        found["full disk"] = _full_disk
    if stack.cache_disk.mounted:
        found["read-only cache"] = _read_only
    if stack.clock.library is not None:
        found["clock jump"] = _clock_jump
    if stack.memory.procs is not None:
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
    return rng.choice(("engine-one", "engine-two"))


@asynccontextmanager
async def _stop_engine(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    process = stack.processes[_engine(rng)]
    process.send(signal.SIGSTOP)
    log.add(episode.kind)
    try:
        yield
    finally:
        process.send(signal.SIGCONT)


@asynccontextmanager
async def _kill_engine(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    name = _engine(rng)
    stack.processes[name].send(signal.SIGKILL)
    log.add(episode.kind)
    yield
    await _restarted(stack, name, episode, log)


async def _restarted(stack: Stack, name: str, episode: Episode, log: Log) -> None:
    """Wait until a killed program is ready again, and note how long that took."""
    process = stack.processes[name]
    while len(process.recoveries) < process.deaths or not process.pid:
        await asyncio.sleep(POLL_S)
    log.recovered(episode.kind, process.recoveries[-1])


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
    stack.worker_kills.append(time.time())
    os.kill(rng.choice(stack.workers()), signal.SIGKILL)
    log.add(episode.kind)
    started = time.monotonic()
    await _until(lambda: _are(stack, 1))
    await _until(lambda: _are(stack, WORKERS))
    log.recovered(episode.kind, time.monotonic() - started)
    yield


async def _are(stack: Stack, workers: int) -> bool:
    return len(stack.workers()) == workers


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await true():
            await asyncio.sleep(POLL_S / 4)


@asynccontextmanager
async def _stop_redis(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    stack.processes["redis"].send(signal.SIGSTOP)
    log.add(episode.kind)
    try:
        yield
    finally:
        stack.processes["redis"].send(signal.SIGCONT)


@asynccontextmanager
async def _kill_redis(stack: Stack, episode: Episode, rng: Random, log: Log) -> AsyncIterator[None]:
    stack.processes["redis"].send(signal.SIGKILL)
    log.add(episode.kind)
    yield
    await _restarted(stack, "redis", episode, log)


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
    before, deaths = stack.memory.kills, stack.processes["engine-two"].deaths
    balloon = stack.memory.exhaust()
    try:
        yield
    finally:
        stack.memory.relax()
        if balloon is not None:
            balloon.kill()
            await asyncio.to_thread(balloon.wait)
        log.add(episode.kind, stack.memory.kills - before)
    if stack.processes["engine-two"].deaths > deaths:
        await _restarted(stack, "engine-two", episode, log)
