"""Measure what the gateway's response cache costs: keys, hits from memory and from Redis, and recording.

    python benchmarks/gateway/response_cache.py [--rounds 5000] [--redis redis://127.0.0.1:6379/0]

Without --redis it starts a redis-server of its own, if one is installed. A hit is the whole way: the plan
with its key, the lookup, and the bytes of the response. Times are of one process that does nothing else. The
parts:

  key         microseconds for the key of a request of 1 KB, of one with three images, and of one that cannot
              be cached
  hit         microseconds of a hit, median and 99th percentile: from memory and from Redis, as a complete
              answer and as a stream, for an answer of 2 KB
  record      microseconds that a chunk of a stream costs while it passes, and that the parsing of a stream of
              500 chunks takes afterwards
  shared      microseconds of one hit from Redis while 32 requests are looked up at the same time
  ping        microseconds of Redis's PING through the same client, without the cache: on a machine that
              others use, its 99th percentile tells how much of that of a hit is the machine

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from redis.asyncio import Redis

from fovea.api import sse
from fovea.core.measure import percentile
from fovea.core.media import content_identity
from fovea.gateway.cache.cache import ResponseCache
from fovea.gateway.cache.key import MEDIA_MARK
from fovea.gateway.cache.redis import RedisStore
from fovea.gateway.cache.stores import MemoryStore, ResponseStore
from fovea.gateway.settings import ResponseCacheSettings

MIB = 1024 * 1024
ANSWER_WORDS, CHUNKS, TOGETHER = 340, 500, 32
SETTINGS = ResponseCacheSettings(response_cache_wait_s=0)


def request(images: int, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """A request of 1 KB with so many images, and their identities."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"{MEDIA_MARK}{number}", "detail": "high"}}
        for number in range(images)
    ]
    text = {"type": "text", "text": "What is on the table? " * 35}
    body = {
        "model": "model",
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": [*parts, text]},
        ],
        "temperature": 0,
        "max_tokens": 64,
        **fields,
    }
    return body, [content_identity("image/png", 8, 8, bytes([number])) for number in range(images)]


def answer() -> bytes:
    message = {"role": "assistant", "content": "a cat " * ANSWER_WORDS}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 300, "completion_tokens": 2 * ANSWER_WORDS, "total_tokens": 1000}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "model", "choices": [choice]}
    return json.dumps({**body, "usage": usage}).encode()


def stream() -> list[bytes]:
    """The events of a stream of CHUNKS chunks, each in one piece."""
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "model"}
    pieces = [{"index": 0, "delta": {"content": "cat "}, "logprobs": None, "finish_reason": None}] * CHUNKS
    pieces.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"})
    return [*(sse.event({**head, "choices": [piece]}) for piece in pieces), sse.DONE]


def microseconds(work: Callable[[], object], rounds: int) -> float:
    """Time of one call, as the least of five means."""
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(rounds // 5):
            work()
        best = min(best, (time.perf_counter() - started) / (rounds // 5))
    return best * 1e6


def plan_times(cache: ResponseCache, rounds: int) -> dict[str, float]:
    """Microseconds of `plan`, by kind of request."""
    kinds = {"key_1kb": request(0), "key_3_images": request(3), "key_none": request(0, temperature=0.7)}
    return {
        f"{name}_us": microseconds(
            lambda body=body, images=images: cache.plan(body, images, tenant="a", model_version="m@1"), rounds
        )
        for name, (body, images) in kinds.items()
    }


async def store_answer(cache: ResponseCache) -> None:
    body, images = request(1)
    plan = cache.plan(body, images, tenant="a", model_version="m@1")
    with cache.record(plan) as recorder:
        recorder.feed(answer())
        recorder.finish(200)
    while not cache.stats()["stores"]:
        await asyncio.sleep(0.001)


async def hit_time(cache: ResponseCache, body: dict[str, Any], images: list[str]) -> float:
    """Microseconds of one hit."""
    started = time.perf_counter()
    hit = await cache.lookup(cache.plan(body, images, tenant="a", model_version="m@1"))
    if hit is None:
        raise RuntimeError("a stored answer was not found")
    hit.payload()
    return (time.perf_counter() - started) * 1e6


async def hit_times(cache: ResponseCache, name: str, rounds: int) -> dict[str, float]:
    """Median and 99th percentile of hits in both forms."""
    await store_answer(cache)
    figures = {}
    for form, fields in (("complete", {}), ("stream", {"stream": True})):
        body, images = request(1, **fields)
        times = [await hit_time(cache, body, images) for _ in range(rounds)]
        for share in (50, 99):
            figures[f"hit_{name}_{form}_p{share}_us"] = percentile(sorted(times), share)
    return figures


async def shared_times(cache: ResponseCache, rounds: int) -> dict[str, float]:
    """Hits from Redis while others are looked up."""
    body, images = request(1)
    times: list[float] = []
    for _ in range(max(1, rounds // TOGETHER)):
        times += await asyncio.gather(*(hit_time(cache, body, images) for _ in range(TOGETHER)))
    return {
        f"hit_redis_{TOGETHER}_at_once_p{share}_us": percentile(sorted(times), share) for share in (50, 99)
    }


async def ping_times(url: str, rounds: int) -> dict[str, float]:
    """Median and 99th percentile of the smallest command, for comparison."""
    times = []
    async with Redis.from_url(url) as client:
        for _ in range(rounds):
            started = time.perf_counter()
            await client.ping()
            times.append((time.perf_counter() - started) * 1e6)
    return {f"redis_ping_p{share}_us": percentile(sorted(times), share) for share in (50, 99)}


async def record_times(cache: ResponseCache, rounds: int) -> dict[str, float]:
    """Cost of recording a stream, while it passes and afterwards."""
    events = stream()
    body, images = request(1, stream=True)
    feeding, parsing = [], []
    for _ in range(max(5, rounds // 100)):
        stores = cache.stats()["stores"]
        with cache.record(cache.plan(body, images, tenant="b", model_version="m@1")) as recorder:
            started = time.perf_counter()
            for event in events:
                recorder.feed(event)
            feeding.append((time.perf_counter() - started) / len(events) * 1e6)
            recorder.finish(200)
        started = time.process_time()
        while cache.stats()["stores"] == stores:
            await asyncio.sleep(0)
        parsing.append((time.process_time() - started) * 1e6)
    return {
        "record_chunk_us": percentile(sorted(feeding), 50),
        f"record_parse_{CHUNKS}_us": percentile(sorted(parsing), 50),
    }


@contextlib.contextmanager
def redis_url(given: str | None) -> Iterator[str | None]:
    """The URL of a Redis: the given one, or one that is started now. None: it is not installed."""
    program = shutil.which("redis-server")
    if given or not program:
        yield given
        return
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        line = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
            try:
                wait_for(port)
                yield f"redis://127.0.0.1:{port}/0"
            finally:
                process.kill()


def wait_for(port: int) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"redis-server does not listen on port {port}")


async def measure(url: str | None, rounds: int) -> dict[str, float]:
    def cache(store: ResponseStore) -> ResponseCache:
        return ResponseCache(store, SETTINGS)

    memory = cache(MemoryStore(64 * MIB, ttl_s=3600))
    figures = plan_times(memory, rounds)
    figures |= await hit_times(memory, "memory", rounds)
    figures |= await record_times(memory, rounds)
    await memory.aclose()
    if url:
        shared = cache(RedisStore(url))
        figures |= await hit_times(shared, "redis", rounds)
        figures |= await shared_times(shared, rounds)
        figures |= await ping_times(url, rounds)
        await shared.clear("a")
        await shared.aclose()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--redis", help="URL of a Redis. Default: one is started.")
    options = parser.parse_args()
    with redis_url(options.redis) as url:
        figures = asyncio.run(measure(url, options.rounds))
    for name, value in figures.items():
        print(f"{name:40} {value:10.1f}")
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
