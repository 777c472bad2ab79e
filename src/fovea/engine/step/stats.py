"""The figures of the loop, the scheduler and its caches, by the metric names of `observe.table`.

The simulated engine reports them, too.
"""

from __future__ import annotations

from fovea.engine.kv.manager import KVManager
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.step.loop import EngineLoop


def scheduler_stats(scheduler: Scheduler) -> dict[str, float]:
    pool, embeddings = scheduler.kv.pool, scheduler.embeddings
    host = scheduler.kv.host
    waiting = tuple(scheduler.waiting)
    ready = sum(scheduler.images.ready(seq) for seq in waiting)
    return {
        "requests_running": len(scheduler.running),
        "requests_waiting": len(waiting),
        "requests_waiting_ready": ready,
        "requests_waiting_image": len(waiting) - ready,
        "kv_blocks_total": pool.size,
        "kv_block_tokens": scheduler.kv.block_size,
        "kv_blocks_used": pool.used,
        "kv_blocks_cached": pool.cached,
        "kv_blocks_idle": pool.idle,
        "kv_blocks_used_visual": pool.used_visual,
        "kv_blocks_cached_visual": pool.cached_visual,
        "kv_evictions": pool.evictions,
        **_window_stats(scheduler.kv),
        **_state_stats(scheduler.kv),
        "kv_host_blocks_total": host.size,
        "kv_host_blocks": len(host),
        "kv_host_loads": host.loads,
        "kv_host_evictions": host.evictions,
        "prefix_query_tokens": scheduler.kv.query_tokens,
        "prefix_hit_tokens": scheduler.kv.hit_tokens,
        "embed_cache_capacity_bytes": embeddings.capacity,
        "embed_cache_bytes": embeddings.bytes,
        "embed_cache_entries": len(embeddings),
        "embed_cache_held_bytes": embeddings.held_bytes,
        "embed_cache_hits": embeddings.hits,
        "embed_cache_misses": embeddings.misses,
        "embed_cache_evictions": embeddings.evictions,
        "embed_cache_expired": embeddings.expirations,
        "preemptions": scheduler.preemptions,
        "kv_dropped_tokens": scheduler.kv.dropped_tokens,
    }


def _window_stats(kv: KVManager) -> dict[str, float]:
    """The figures of layers with a sliding window; empty if the model has no such layers."""
    if kv.window is None:
        return {}
    pool = kv.window.pool
    return {
        "window_blocks_total": pool.size,
        "window_blocks_used": pool.used,
        "window_blocks_idle": pool.idle,
        "window_blocks_returned": kv.window.returned,
    }


def _state_stats(kv: KVManager) -> dict[str, float]:
    """The figures of layers with a state; empty if the model has no such layers."""
    if kv.states is None:
        return {}
    slots = kv.states.slots
    return {
        "state_slots_total": slots.size,
        "state_slots_used": slots.used,
        "state_checkpoints": slots.checkpoints,
        "state_evictions": slots.evictions,
    }


def waiting_ages(scheduler: Scheduler, now: float) -> dict[str, float]:
    """Seconds that the oldest waiting request has waited, over all requests and in each of the two queues.

    now: current time on the clock of arrivals.
    """
    ages = {True: 0.0, False: 0.0}
    for seq in tuple(scheduler.waiting):
        ready = scheduler.images.ready(seq)
        ages[ready] = max(ages[ready], now - seq.arrival)
    return {
        "oldest_waiting_seconds": max(ages.values()),
        "oldest_waiting_ready_seconds": ages[True],
        "oldest_waiting_image_seconds": ages[False],
    }


def loop_stats(loop: EngineLoop) -> dict[str, float]:
    """Return the counters of steps and tokens. The real and the simulated engine both report them."""
    stepper = loop.stepper
    return {
        "images_encoded": stepper.encoded_images,
        "encode_seconds": stepper.encode_seconds,
        "engine_steps": stepper.steps,
        "failed_steps": loop.failed_steps,
        "computed_tokens": stepper.computed_tokens,
        **stepper.draft_counts.stats(),
        "drafts_left_out": stepper.drafts.left_out,
        "generation_tokens": loop.board.generated_tokens,
        **stepper.control_stats(),
        "integrity_errors": loop.integrity_errors,
        **stepper.tallies.stats(),
    }
