"""/admin/caches: the contents and hits of each cache, and clearing it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fovea.api.explain import shorten
from fovea.core.errors import NotFound
from fovea.core.protocols import CACHE_STAGES
from fovea.server.request import Request
from fovea.server.routing import Routes

routes = Routes()
STAGES = ("fetched", "decoded", "images", *CACHE_STAGES)
ALL = "all"
USUAL = ("bytes", "capacity_bytes", "entries", "hits", "misses", "evictions")


@routes.get("/admin/caches")
async def inspect(request: Request) -> dict[str, Any]:
    """Report the bytes, the ceiling, the entries, hits, misses and evictions of each cache.

    Caches are listed in the order in which a request uses them. Counts begin with the start of the server.
    """
    state = request.state
    return {"object": "caches", "stages": stages(state.stats())}


@routes.delete("/admin/caches/{stage}")
async def clear(request: Request, stage: str) -> dict[str, Any]:
    """Clear one cache, or "all".

    Later answers are the same. Entries that running requests use stay until these requests release them.
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


def stages(stats: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The figures of each cache, from the flat names of `observe.table`.

    A cache that this server does not have is left out.
    """

    def figures(prefix: str, *names: str) -> dict[str, float]:
        return {name: stats[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in stats}

    block, window = stats.get("kv_block_bytes", 0), stats.get("window_block_bytes", 0)
    caches = {
        "fetched": figures("fetch_cache", *USUAL, "expired", "revalidations"),
        "decoded": figures("decoded_cache", *USUAL, "expired"),
        "images": figures("image_store", *USUAL, "expired"),
        "pixels": figures("pixel_cache", *USUAL, "expired"),
        "encoder": figures("embed_cache", *USUAL[:2], "held_bytes", *USUAL[2:], "expired"),
        "regions": figures("region_cache", *USUAL) if stats.get("region_cache_capacity_bytes") else {},
        "host": figures("embed_host", *USUAL, "expired"),
        "disk": figures("embed_disk", *USUAL, "expired", "corrupt", "off"),
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
