"""The engine settings that a simulation uses. The others change the work of a model, and there is none."""

from __future__ import annotations

from collections.abc import Iterable

from fovea.core.settings import settings_of
from fovea.engine.config import EngineConfig

TRACE_SETTINGS = frozenset(
    {
        "block_size",
        "embed_cache_mib",
        "kv_blocks",
        "kv_cache_mib",
        "kv_ttl_s",
        "max_context",
        "max_passes",
        "max_queue",
        "max_running",
        "max_step_tokens",
        "max_step_visual_tokens",
        "pace",
        "policy",
        "prefix_cache",
        "target_itl_ms",
        "target_percentile",
        "target_ttft_ms",
        "when_late",
    }
)
"""Settings that `fovea simulate` uses, which replays a trace."""
SERVER_SETTINGS = TRACE_SETTINGS | {
    "degrade_by",
    "degrade_from",
    "detail_policy",
    "special_tokens_in_text",
    "visual_tokens",
    "when_full",
}
"""Settings that `fovea serve --simulate` uses, which also plans real images and refuses requests."""


def not_simulated(simulated: Iterable[str]) -> tuple[str, ...]:
    """Return the engine settings that are not among `simulated`, in order of declaration."""
    known = frozenset(simulated)
    return tuple(entry.name for entry in settings_of(EngineConfig) if entry.name not in known)
