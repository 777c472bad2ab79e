"""/admin/live: one snapshot of the server for the page for operators, which asks for it every second.

It is built from counters that the server and the engine keep anyway, so that it costs little more than
`ServerState.stats`. Every list has an upper bound. It holds numbers, names of keys, ids of requests and paths
of routes; it never holds keys, prompts, answers, URLs or bytes of images.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Mapping
from typing import Any

from fovea import __version__
from fovea.core.json_text import dump
from fovea.server.generation import Generation
from fovea.server.request import Request
from fovea.server.routes.caches import stages
from fovea.server.routing import Response, Routes
from fovea.server.state import ServerState
from fovea.server.tracking import InFlight, quantile

routes = Routes()
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
        "caches": _caches(stats),
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


def _caches(stats: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each cache, with the same fields; a figure that a cache does not have is None.

    unit: what hits and misses count: lookups or, in the prefix cache, tokens.
    """
    found = stages(stats) | {"answers": {name: stats.get(figure, 0) for name, figure in ANSWERS.items()}}
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
