"""Which settings of the engine a simulation honours. The others change what a model computes, and there is none."""

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
    }
)
"""Honoured by `fovea simulate`, which replays a trace."""
SERVER_SETTINGS = TRACE_SETTINGS | {
    "degrade_by",
    "degrade_from",
    "detail_policy",
    "visual_tokens",
    "when_full",
}
"""Honoured by `fovea serve --simulate`, which also plans real images and refuses requests."""


def not_simulated(honoured: Iterable[str]) -> tuple[str, ...]:
    """The engine's settings that are not among the honoured ones, in order of declaration."""
    known = frozenset(honoured)
    return tuple(entry.name for entry in settings_of(EngineConfig) if entry.name not in known)
