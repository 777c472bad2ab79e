"""The engine's numbers, by the names of `observe.table`. Read from other threads: each is one attribute."""

from __future__ import annotations

import time

from fovea.engine.loop import EngineLoop
from fovea.engine.prepare import Preparer
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.schedule.stats import scheduler_stats
from fovea.engine.vision.stored import StoredFeatures


def engine_stats(
    scheduler: Scheduler, loop: EngineLoop, preparer: Preparer, stored: StoredFeatures | None
) -> dict[str, float]:
    return _disk(stored) | {
        **scheduler_stats(scheduler),
        "oldest_waiting_seconds": _age(scheduler),
        "kv_block_bytes": loop.runner.kv.nbytes // scheduler.kv.pool.size,
        "pixel_bytes": preparer.pixel_bytes,
        "images_encoded": loop.encoded_images,
        "encode_seconds": loop.encode_seconds,
        "engine_steps": loop.steps,
        "failed_steps": loop.failed_steps,
        "computed_tokens": loop.computed_tokens,
        "generation_tokens": loop.generated_tokens,
        "integrity_errors": loop.integrity_errors,
    }


def _age(scheduler: Scheduler) -> float:
    oldest = next(iter(tuple(scheduler.waiting)), None)
    return 0.0 if oldest is None else max(0.0, time.monotonic() - oldest.arrival)


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
