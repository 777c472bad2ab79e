"""The engine's numbers, by the names of `observe.metrics`. Read from other threads: each is one attribute."""

from __future__ import annotations

from fovea.engine.loop import EngineLoop
from fovea.engine.prepare import Preparer
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.vision.stored import StoredFeatures


def engine_stats(
    scheduler: Scheduler, loop: EngineLoop, preparer: Preparer, stored: StoredFeatures | None
) -> dict[str, float]:
    pool, embeddings = scheduler.kv.pool, scheduler.embeddings
    return _disk(stored) | {
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "kv_blocks_total": pool.size,
        "kv_blocks_used": pool.used,
        "kv_blocks_cached": pool.cached,
        "prefix_query_tokens": scheduler.kv.query_tokens,
        "prefix_hit_tokens": scheduler.kv.hit_tokens,
        "embed_cache_bytes": embeddings.bytes,
        "embed_cache_entries": len(embeddings),
        "embed_cache_held_bytes": embeddings.held_bytes,
        "embed_cache_hits": embeddings.hits,
        "embed_cache_misses": embeddings.misses,
        "embed_cache_evictions": embeddings.evictions,
        "pixel_bytes": preparer.pixel_bytes,
        "images_encoded": loop.encoded_images,
        "encode_seconds": loop.encode_seconds,
        "engine_steps": loop.steps,
        "failed_steps": loop.failed_steps,
        "computed_tokens": loop.computed_tokens,
        "generation_tokens": loop.generated_tokens,
        "preemptions": scheduler.preemptions,
        "integrity_errors": loop.integrity_errors,
    }


def _disk(stored: StoredFeatures | None) -> dict[str, float]:
    if stored is None:
        return {}
    disk = stored.stats()
    return {
        "embed_disk_bytes": disk.bytes,
        "embed_disk_entries": disk.entries,
        "embed_disk_hits": disk.hits,
        "embed_disk_misses": disk.misses,
        "embed_disk_writes": disk.writes,
        "embed_disk_dropped": disk.dropped,
        "embed_disk_evictions": disk.evictions,
        "embed_disk_corrupt": disk.corrupt,
        "embed_disk_off": float(disk.off is not None),
    }
