"""The engine's metrics, by the names of `observe.table`.

Other threads read them while the engine runs; each metric is one attribute, so no lock is needed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fovea.engine.layers.step import DecoderMemory
from fovea.engine.step.stats import loop_stats, scheduler_stats, waiting_ages

if TYPE_CHECKING:
    from fovea.engine.assemble import Assembly


def engine_stats(parts: Assembly) -> dict[str, float]:
    """Return the current value of every metric of the engine."""
    preparer, regions, runner, grammars = parts.preparer, parts.regions, parts.runner, parts.intake.grammars
    pixels = preparer.pixel_pool.stats()
    scheduler = scheduler_stats(parts.scheduler)
    state = runner.memory.state_nbytes
    return parts.slower.stats() | {
        "region_cache_bytes": regions.bytes,
        "region_cache_capacity_bytes": regions.capacity,
        "region_cache_entries": len(regions),
        "region_cache_hits": regions.hits,
        "region_cache_misses": regions.misses,
        "region_cache_evictions": regions.evictions,
        **scheduler,
        **waiting_ages(parts.scheduler, time.monotonic()),
        **_block_bytes(runner.memory),
        "state_checkpoint_bytes": scheduler.get("state_checkpoints", 0) * state,
        "state_capacity_bytes": scheduler.get("state_slots_total", 0) * state,
        "pixel_bytes": pixels.claimed_bytes,
        "pixel_cache_bytes": pixels.bytes,
        "pixel_cache_capacity_bytes": preparer.pixel_pool.capacity,
        "pixel_cache_entries": pixels.entries,
        "pixel_cache_lookups": pixels.hits + pixels.misses,
        "pixel_cache_hits": pixels.hits,
        "pixel_cache_misses": pixels.misses,
        "pixel_cache_evictions": pixels.evictions,
        "pixel_cache_expired": pixels.expired,
        "encoder_engines": len(runner.model.engines),
        "encoder_engine_hits": runner.model.engines.hits,
        "encoder_engine_misses": runner.model.engines.misses,
        "grammar_hits": grammars.hits,
        "grammar_misses": grammars.misses,
        **parts.intake.gate.stats(),
        **loop_stats(parts.loop),
    }


def _block_bytes(memory: DecoderMemory) -> dict[str, float]:
    """Bytes of one block of each pool. The first KV group has no window, a second one has."""
    names = ("kv_block_bytes", "window_block_bytes")
    return {name: kv[:, 0].nbytes for name, kv in zip(names, memory.kv, strict=False)}
