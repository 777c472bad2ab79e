"""The one definition of a percentile that all of Fovea uses."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile by the nearest-rank method; nan if there are no values.

    ordered: values in ascending order.
    share: percent of the values that do not exceed the result, 0 to 100.
    """
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]
