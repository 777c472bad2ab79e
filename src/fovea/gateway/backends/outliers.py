"""Ejects backends that are much slower than the others of the same models.

A backend can answer its health checks and still be useless: a throttled GPU, a full disk, a noisy neighbour.
Its median time to the first byte then is far from those of the others. It is ejected for a while, longer each
time, but never more than a part of all backends: if most are slow, slow is the rule.

An unknown image takes many times as long as a cached one. So a backend that has got some more new images than
others has a far larger median. It is judged by its lower quartile, too: a slow backend is slow for all. And a
backend to which more requests come than to others has more work: it may be slower in that proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from fovea.gateway.backends.backend import Backend
from fovea.gateway.settings import ResilienceSettings

LEAST_SAMPLES = 16
"""Times that must be known of a backend before it is judged."""
LEAST_DIFFERENCE_S = 0.05
"""Differences below this are noise, whatever their ratio."""
LONGEST = 8
"""A repeated ejection lasts at most so many times the first one."""


def eject_outliers(backends: Sequence[Backend], settings: ResilienceSettings, now: float) -> list[Backend]:
    """Eject the slow ones of some backends, and return those that were ejected now."""
    if not settings.outlier_factor:
        return []
    judged = [one for one in backends if one.median_first_byte(LEAST_SAMPLES) is not None]
    ejected = sum(now < backend.ejected_until for backend in backends)
    room = int(settings.max_ejected * len(backends)) - ejected
    slow: list[Backend] = []
    for backend in sorted(judged, key=lambda one: -(one.median_first_byte(LEAST_SAMPLES) or 0.0)):
        others = [one for one in judged if one is not backend and one not in slow]
        if not others or len(slow) >= room or now < backend.ejected_until:
            continue
        if backend.weight(now) < backend.config.weight:  # a slow start: its caches are cold, so it is slower
            continue
        if _is_slow(backend, others, settings.outlier_factor):
            slow.append(backend)
    for backend in slow:
        backend.ejections += 1
        backend.ejected_until = now + settings.outlier_eject_s * min(backend.ejections, LONGEST)
        backend.come_back(backend.ejected_until)
    return slow


def _is_slow(backend: Backend, others: Sequence[Backend], factor: float) -> bool:
    """Whether a backend is slower than others by more than a factor. All have enough times."""
    work = backend.recent / max(1.0, median(one.recent for one in others))
    factor *= max(1.0, work)
    own, usual = median(backend.first_bytes), median(median(one.first_bytes) for one in others)
    quick = median(one.quick_first_byte() for one in others)
    return (
        own > factor * usual
        and own - usual > LEAST_DIFFERENCE_S
        and backend.quick_first_byte() > factor * quick
    )
