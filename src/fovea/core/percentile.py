"""Percentiles, the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank, of values in ascending order; nan of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]
