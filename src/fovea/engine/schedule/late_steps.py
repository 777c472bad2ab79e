"""Counts steps that took longer than the target, against the number that may."""

from __future__ import annotations

LOWEST = -10.0
"""Lowest credit, so that after a bad minute of the machine only the next steps have to make up for it."""


class LateSteps:
    """A credit of late steps: a percentile of 95 earns one of them every 20 steps.

    It is spent by steps that take longer than the target for whatever reason. At most one late step is saved
    up, so late steps never follow each other.

    steps, late: number of steps with decodes since the start, and how many of them were late.
    """

    def __init__(self, percentile: float) -> None:
        """percentile: percentage of steps that should keep the target."""
        self.steps = 0
        self.late = 0
        self._share = 1 - percentile / 100
        self._credit = 0.0

    @property
    def may_be_late(self) -> bool:
        """Whether the next step may be late."""
        return self._credit >= 1

    def observe(self, late: bool) -> None:
        """Record a step with decodes. late: whether it took longer than the target."""
        self.steps += 1
        self.late += late
        self._credit = max(LOWEST, min(1.0, self._credit + self._share - late))
