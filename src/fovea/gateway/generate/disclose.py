"""The headers of an answer that say where it comes from."""

from __future__ import annotations

from fovea.gateway.config import ModelConfig
from fovea.gateway.forward.dispatch import Won

OWN_HEADERS = frozenset(
    f"x-fovea-{name}"
    for name in ("backend", "route", "model", "attempts", "fallback", "degraded", "cache", "experiment")
)
"""Headers that only the gateway itself may set."""
MOST_BYTES = 8192
"""Bytes of names and values that are passed on of a backend's headers, all together."""
MOST_HEADERS = 16
"""Headers of a backend's answer that are passed on at most. Proxies in front of the gateway have limits."""


def headers_of(won: Won, wanted: ModelConfig, attempts: int, degraded: str, cache: str) -> dict[str, str]:
    """Return the headers of a backend's answer, those of the backend that are passed on among them.

    wanted: the model that the client asked for. attempts: backends that were asked.
    degraded: the detail level to which images were lowered; "": they were not.
    cache: result of the response cache; "": it had no part.
    """
    passed: dict[str, str] = {}
    room = MOST_BYTES
    for name, value in won.answer.headers:
        if name.startswith("x-fovea-") and name not in OWN_HEADERS and len(name) + len(value) <= room:
            passed[name] = value
            room -= len(name) + len(value)
        if len(passed) == MOST_HEADERS:
            break
    own = {
        "x-fovea-backend": won.backend.name,
        "x-fovea-route": won.reason,
        "x-fovea-model": won.model.name,
        "x-fovea-attempts": str(attempts) if attempts > 1 else "",
        "x-fovea-fallback": f"{wanted.name} -> {won.model.name}" if won.model is not wanted else "",
        "x-fovea-degraded": f"detail={degraded}" if degraded and won.backend.degrade != "off" else "",
        "x-fovea-cache": cache,
    }
    return passed | {name: value for name, value in own.items() if value}
