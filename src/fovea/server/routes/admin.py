"""Routes for operators: /admin/caches, /admin/profile and /admin/live.

/admin/live is one snapshot of the server for the page for operators, which asks for it every second. It is
built from counters that the server and the engine keep anyway, so that it costs little more than
`ServerState.stats`. Every list has an upper bound. It holds numbers, names of keys, ids of requests and paths
of routes; it never holds keys, prompts, answers, URLs or bytes of images.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Mapping
from typing import Any

from fovea import __version__
from fovea.api.explain import shorten
from fovea.core.errors import NotFound
from fovea.core.json_text import dump
from fovea.core.protocols import CACHE_STAGES
from fovea.observe.py_spy import FORMATS, ProfileOptions
from fovea.server.generation import Generation
from fovea.server.request import Request
from fovea.server.routing import Response, Routes
from fovea.server.state import ServerState
from fovea.server.tracking import InFlight, quantile

routes = Routes()
STAGES = ("fetched", "decoded", "images", *CACHE_STAGES)
ALL = "all"
CACHE_FIGURES = ("bytes", "capacity_bytes", "entries", "hits", "misses", "evictions")


@routes.get("/admin/caches")
async def inspect_caches(request: Request) -> dict[str, Any]:
    """Report the bytes, the ceiling, the entries, hits, misses and evictions of each cache.

    Caches are listed in the order in which a request uses them. Counts begin with the start of the server.
    """
    state = request.state
    return {"object": "caches", "stages": cache_figures(state.stats())}


@routes.delete("/admin/caches/{stage}")
async def clear_cache(request: Request, stage: str) -> dict[str, Any]:
    """Clear one cache, or "all".

    Later answers are the same. Entries that running requests use stay until these requests release them. The
    cache "answers" holds the texts of earlier answers from which drafters expect tokens, not the answers of
    /v1/responses.
    """
    state = request.state
    if stage not in (*STAGES, ALL):
        raise NotFound(
            f"there is no cache {shorten(stage)}; accepted: {', '.join(STAGES)}, {ALL}",
            code="no_such_cache",
        )
    for name, cache in (
        ("fetched", state.fetch_cache.cache),
        ("decoded", state.decoded_cache),
        ("images", state.image_store.cache),
    ):
        if stage in (name, ALL):
            cache.clear()
    selected = [name for name in CACHE_STAGES if stage in (name, ALL)]
    if selected:
        async with state.clearing:  # it blocks its thread until the step ends, so one thread is enough
            await asyncio.to_thread(state.engine.clear_caches, *selected)
    return {"object": "caches.cleared", "cleared": list(STAGES) if stage == ALL else [stage]}


def cache_figures(stats: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The figures of each cache, from the flat names of `observe.table`.

    A cache that this server does not have is left out.
    """

    def figures(prefix: str, *names: str) -> dict[str, float]:
        return {name: stats[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in stats}

    block, window = stats.get("kv_block_bytes", 0), stats.get("window_block_bytes", 0)
    caches = {
        "fetched": figures("fetch_cache", *CACHE_FIGURES, "expired", "revalidations"),
        "decoded": figures("decoded_cache", *CACHE_FIGURES, "expired"),
        "images": figures("image_store", *CACHE_FIGURES, "expired"),
        "pixels": figures("pixel_cache", *CACHE_FIGURES, "expired"),
        "encoder": figures("embed_cache", *CACHE_FIGURES[:2], "held_bytes", *CACHE_FIGURES[2:], "expired"),
        "regions": figures("region_cache", *CACHE_FIGURES)
        if stats.get("region_cache_capacity_bytes")
        else {},
        "host": figures("embed_host", *CACHE_FIGURES, "expired"),
        "disk": figures("embed_disk", *CACHE_FIGURES, "expired", "corrupt", "off"),
        "kv": {
            "bytes": (stats.get("kv_blocks_used", 0) + stats.get("kv_blocks_idle", 0)) * block,
            "capacity_bytes": stats.get("kv_blocks_total", 0) * block,
            "held_bytes": stats.get("kv_blocks_used", 0) * block,
            "visual_bytes": stats.get("kv_blocks_cached_visual", 0) * block,
            "hit_tokens": stats.get("prefix_hit_tokens", 0),
            "query_tokens": stats.get("prefix_query_tokens", 0),
            "evictions": stats.get("kv_evictions", 0),
        },
        "kv_windows": {
            "bytes": (stats["window_blocks_used"] + stats["window_blocks_idle"]) * window,
            "capacity_bytes": stats["window_blocks_total"] * window,
            "held_bytes": stats["window_blocks_used"] * window,
        }
        if window
        else {},
        "states": {
            "bytes": stats["state_checkpoint_bytes"],
            "capacity_bytes": stats["state_capacity_bytes"],
            "entries": stats["state_checkpoints"],
            "evictions": stats["state_evictions"],
        }
        if stats.get("state_capacity_bytes")
        else {},
        "kv_host": {
            "bytes": stats.get("kv_host_blocks", 0) * block,
            "capacity_bytes": stats.get("kv_host_blocks_total", 0) * block,
            "entries": stats.get("kv_host_blocks", 0),
            "hits": stats.get("kv_host_loads", 0),
            "evictions": stats.get("kv_host_evictions", 0),
        }
        if stats.get("kv_host_blocks_total")
        else {},
    }
    if caches["pixels"]:
        caches["pixels"]["held_bytes"] = stats["pixel_bytes"]
        caches["pixels"]["bytes"] += stats["pixel_bytes"]
    return {name: values for name, values in caches.items() if values}


@routes.get("/admin/profile", types=tuple(FORMATS.values()))
async def profile(request: Request) -> Response:
    """Profile the server for some seconds with py-spy, as a flame graph or in another format."""
    options = ProfileOptions.of(request.query)
    request.watch()
    recording = await request.state.profiler.profile(options)
    return Response(recording, FORMATS[options.form], headers={"cache-control": "no-store"})


MOST_REQUESTS, MOST_TENANTS, MOST_SLOW = 100, 100, 25
"""Most rows of each table."""
WINDOW_S = 60.0
"""The quantiles are computed from the times to first token of the last so many seconds."""
QUEUE = {
    "running": "requests_running",
    "waiting": "requests_waiting",
    "waiting_ready": "requests_waiting_ready",
    "waiting_image": "requests_waiting_image",
    "oldest_seconds": "oldest_waiting_seconds",
    "oldest_ready_seconds": "oldest_waiting_ready_seconds",
    "oldest_image_seconds": "oldest_waiting_image_seconds",
}
COUNTERS = {
    "steps": "engine_steps",
    "failed_steps": "failed_steps",
    "computed_tokens": "computed_tokens",
    "generated_tokens": "generation_tokens",
    "images_encoded": "images_encoded",
    "encode_seconds": "encode_seconds",
    "preemptions": "preemptions",
    "integrity_errors": "integrity_errors",
}
CACHES = {
    "fetched": ("media", "downloads"),
    "decoded": ("media", "decoded images"),
    "images": ("media", "uploaded images"),
    "pixels": ("vision", "processed pixels"),
    "encoder": ("vision", "encoder outputs"),
    "regions": ("vision", "encoded regions"),
    "host": ("vision", "encoder outputs in host memory"),
    "disk": ("vision", "encoder outputs on disk"),
    "kv": ("language", "prefix cache (KV)"),
    "kv_windows": ("language", "KV of sliding windows"),
    "states": ("language", "checkpoints of states"),
    "kv_host": ("language", "KV in host memory"),
    "answers": ("answers", "answers of /v1/responses"),
}
"""Group and title of each cache, in the order in which a request uses them."""
ANSWERS = {
    name: f"response_store_{name}"
    for name in ("bytes", "capacity_bytes", "entries", "hits", "misses", "evictions")
}
FIGURES = ("bytes", "capacity_bytes", "held_bytes", "entries", "hits", "misses", "evictions")
SLOW = (
    "time", "request_id", "trace_id", "route", "status", "model", "caller", "seconds", "ttft_seconds",
    "stages", "prompt_tokens", "cached_tokens", "completion_tokens", "images", "reasons",
)  # fmt: skip
"""Fields of a slow request that the page gets."""


@routes.get("/admin/live")
async def live(request: Request) -> Response:
    """Report the queue, the requests that run, the caches, the clients and the slowest recent requests.

    Counters begin with the start of the server; a rate is the difference of two snapshots.
    """
    body = dump(snapshot(request.state)).encode()
    return Response(body, headers={"cache-control": "no-store"})


def snapshot(state: ServerState) -> dict[str, Any]:
    """Return the snapshot."""
    stats = {**state.app.connections.stats(), **state.stats()}
    flights, now = state.in_flight, time.time()
    return {
        "object": "live",
        "time": now,
        "uptime_seconds": now - state.started,
        "engine": _engine(state),
        "queue": {name: stats.get(figure, 0) for name, figure in QUEUE.items()}
        | {"loading": state.places.reserved},
        "counters": {name: stats.get(figure, 0) for name, figure in COUNTERS.items()},
        "first_token": _first_token(flights),
        "requests": {
            "total": len(flights),
            "rows": [
                _request(generation, flights.clock())
                for generation in itertools.islice(flights, MOST_REQUESTS)
            ],
        },
        "caches": _cache_rows(stats),
        "connections": {
            name: stats[f"connections_{name}"] for name in ("open", "idle", "capacity", "accepted")
        },
        "memory": {
            name: stats.get(name, 0)
            for name in (
                "body_bytes",
                "body_capacity_bytes",
                "media_held_bytes",
                "media_held_capacity_bytes",
            )
        },
        "tenants": _tenants(state),
        "slow": _slow(state),
    }


def _engine(state: ServerState) -> dict[str, Any]:
    info = state.engine.info
    return {
        "status": "draining" if state.draining else state.engine.status,
        "reason": state.unavailable(),
        "model": info.name,
        "version": __version__,
        "architecture": info.architecture,
        "device": info.device,
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "max_context": info.max_context,
        "max_running": info.max_running,
    }


def _first_token(flights: InFlight) -> dict[str, float | int | None]:
    times = flights.first_token_times(WINDOW_S)
    return {
        "count": flights.first_tokens,
        "sum_seconds": flights.first_token_seconds,
        "window_seconds": WINDOW_S,
        "p50_seconds": quantile(times, 0.5),
        "p95_seconds": quantile(times, 0.95),
    }


def _request(generation: Generation, now: float) -> dict[str, Any]:
    return {
        "number": generation.number,
        "id": generation.id,
        "caller": generation.caller,
        "stage": "generating" if generation.generating else "waiting",
        "seconds": now - generation.started,
        "images": generation.media,
        "choices": generation.choices,
        "tokens": generation.tokens,
    }


def _cache_rows(stats: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each cache, with the same fields; a figure that a cache does not have is None.

    unit: what hits and misses count: lookups or, in the prefix cache, tokens.
    """
    found = cache_figures(stats) | {
        "answers": {name: stats.get(figure, 0) for name, figure in ANSWERS.items()}
    }
    rows = []
    for name, (group, title) in CACHES.items():
        if (values := found.get(name)) is None:
            continue
        row: dict[str, Any] = {"name": name, "group": group, "title": title, "unit": "lookups"}
        row |= {key: values.get(key) for key in FIGURES}
        if "query_tokens" in values:
            row["unit"], row["hits"] = "tokens", values["hit_tokens"]
            row["misses"] = values["query_tokens"] - values["hit_tokens"]
        rows.append(row)
    return rows


def _tenants(state: ServerState) -> dict[str, Any]:
    """Return the clients for which most tokens were computed, by the names of their keys.

    share: the client's part of all tokens that the engine has computed for clients, its measure of costs.
    """
    clients, flights = state.access.clients, state.in_flight.per_caller()
    computed = sum(client.totals.computed_tokens for client in clients)
    largest = heapq.nlargest(
        MOST_TENANTS, clients, key=lambda client: (client.totals.computed_tokens, client.totals.requests)
    )
    rows = [
        {
            "name": client.name,
            "in_flight": flights[client.name],
            "requests": client.totals.requests,
            "refused": client.totals.refused,
            "prompt_tokens": client.totals.prompt_tokens,
            "cached_tokens": client.totals.cached_tokens,
            "completion_tokens": client.totals.completion_tokens,
            "images": client.totals.images,
            "share": client.totals.computed_tokens / computed if computed else None,
        }
        for client in largest
    ]
    return {"total": len(clients), "rows": rows}


def _slow(state: ServerState) -> list[dict[str, Any]]:
    """Return the slowest recent requests, slowest first, with the fields SLOW only."""
    rows = heapq.nlargest(MOST_SLOW, state.tracking.slow.rows(), key=lambda row: float(row["seconds"]))
    return [{name: row[name] for name in SLOW} for row in rows]
