"""The number of files and sockets that the process may have open."""

from __future__ import annotations

import logging
import os
import resource

log = logging.getLogger("fovea.server")
RESERVE = 128
"""Descriptors that are kept for everything but connections: downloads, checkpoints, caches on disk, logs."""
LEAST = 8


def allowed_connections(wanted: int) -> int:
    """Raise the process's limit to the highest that it may set, and return how many connections fit.

    wanted: the number of connections that the settings allow.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft != hard and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = _raise_limit(wanted, soft, hard)
    fitting = max(LEAST, soft - _open_now() - RESERVE)
    if fitting < wanted:
        log.warning(
            "at most %d connections instead of %d: the process may open %d files (ulimit -n)",
            fitting, wanted, soft,
        )  # fmt: skip
    return min(wanted, fitting)


def _raise_limit(wanted: int, soft: int, hard: int) -> int:
    goal = hard if hard != resource.RLIM_INFINITY else max(soft, wanted + 8 * RESERVE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    except (OSError, ValueError):
        return soft
    return goal


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return RESERVE // 2
