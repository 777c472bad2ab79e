"""/admin/caches: what each cache holds and what it was good for, and forgetting it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from fovea.core.errors import NotFound
from fovea.core.protocols import CACHE_STAGES
from fovea.server.docs import NAMED
from fovea.server.explain import shorten
from fovea.server.state import state_of

router = APIRouter()
STAGES = ("fetched", "decoded", "images", *CACHE_STAGES)
ALL = "all"
USUAL = ("bytes", "capacity_bytes", "entries", "hits", "misses", "evictions")


@router.get("/admin/caches", responses=NAMED)
async def inspect(http: Request) -> dict[str, Any]:
    """Per stage, in the order of a request: bytes, ceiling, entries, hits, misses, evictions. Counts since the start."""
    state = state_of(http)
    return {"object": "caches", "stages": stages(state.stats())}


@router.delete("/admin/caches/{stage}", responses=NAMED)
async def clear(stage: str, http: Request) -> dict[str, Any]:
    """Forget a stage, or "all". Answers stay the same; what is in use stays until it is let go."""
    state = state_of(http)
    if stage not in (*STAGES, ALL):
        raise NotFound(
            f"there is no cache {shorten(stage)}; there are {', '.join(STAGES)}, and {ALL}",
            code="no_such_cache",
        )
    for name, cache in (
        ("fetched", state.fetched.cache),
        ("decoded", state.decoded.cache),
        ("images", state.images.cache),
    ):
        if stage in (name, ALL):
            cache.clear()
    chosen = [name for name in CACHE_STAGES if stage in (name, ALL)]
    if chosen:
        await asyncio.to_thread(state.client.clear_caches, *chosen)
    return {"object": "caches.cleared", "cleared": list(STAGES) if stage == ALL else [stage]}


def stages(stats: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """From the flat numbers of `observe.table`. A tier that is not there is left out."""

    def of(prefix: str, *names: str) -> dict[str, float]:
        return {name: stats[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in stats}

    block = stats.get("kv_block_bytes", 0)
    found = {
        "fetched": of("fetch_cache", *USUAL, "expired", "revalidations"),
        "decoded": of("decoded_cache", *USUAL, "expired"),
        "images": of("image_store", *USUAL, "expired"),
        "pixels": of("pixel_cache", *USUAL, "expired"),
        "encoder": of("embed_cache", *USUAL[:2], "held_bytes", *USUAL[2:], "expired"),
        "regions": of("region_cache", *USUAL) if stats.get("region_cache_capacity_bytes") else {},
        "host": of("embed_host", *USUAL, "expired"),
        "disk": of("embed_disk", *USUAL, "expired", "corrupt", "off"),
        "kv": {
            "bytes": (stats.get("kv_blocks_used", 0) + stats.get("kv_blocks_idle", 0)) * block,
            "capacity_bytes": stats.get("kv_blocks_total", 0) * block,
            "held_bytes": stats.get("kv_blocks_used", 0) * block,
            "visual_bytes": stats.get("kv_blocks_cached_visual", 0) * block,
            "hit_tokens": stats.get("prefix_hit_tokens", 0),
            "query_tokens": stats.get("prefix_query_tokens", 0),
            "evictions": stats.get("kv_evictions", 0),
        },
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
    if found["pixels"]:
        found["pixels"]["held_bytes"] = stats["pixel_bytes"]
        found["pixels"]["bytes"] += stats["pixel_bytes"]
    return {name: values for name, values in found.items() if values}
