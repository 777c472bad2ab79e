"""Accuracy with fewer visual tokens, as measured on the bundled evaluation (docs/relevance.md)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from fovea.core.errors import ConfigError

FULL = 94.0
"""Right answers with all visual tokens, in percent."""
MEASURED = {
    "resize": {0.5: 74.2, 0.25: 61.1},
    "uniform": {0.5: 74.4, 0.25: 68.7},
    "random": {0.5: 75.3, 0.25: 63.4},
    "dart": {0.75: 90.0, 0.5: 83.7, 0.25: 77.3},
    "dart_query": {0.5: 87.5},
    "dpp": {0.75: 93.8, 0.5: 92.3, 0.25: 85.9},
    "dpp_query": {0.5: 82.0},
    "visionzip": {0.5: 91.8},
    "tome": {0.5: 90.0},
    "fastv": {0.5: 89.8},
    "relevance": {0.75: 94.0, 0.5: 93.0, 0.25: 90.0},
}
"""Right answers in percent, by method and share of the tokens that are kept."""
BEFORE_ENCODER = ("relevance", "resize")
"""Methods that spare the encoder, too; the others leave out tokens behind it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The measured loss of accuracy.

    points: percentage points of right answers below all tokens.
    keep: the share at which it was measured: the largest measured one that is not above the asked one.
    """

    points: float
    keep: float


def check_method(method: str) -> None:
    """Raise ConfigError unless a method was measured; it names the nearest one."""
    if method not in MEASURED:
        near = difflib.get_close_matches(method, MEASURED, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"method is {method!r}; {hint}accepted: {', '.join(MEASURED)}", param="method")


def loss(method: str, keep: float) -> Loss | None:
    """Return the loss of a method that keeps a share of the tokens; None: it was not measured so far down.

    Raises ConfigError for an unknown method.
    """
    check_method(method)
    if keep >= 1:
        return Loss(0.0, 1.0)
    measured = [share for share in MEASURED[method] if share <= keep]
    if not measured:
        return None
    nearest = max(measured)
    return Loss(round(FULL - MEASURED[method][nearest], 1), nearest)
