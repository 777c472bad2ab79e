"""A token bucket: so much per minute, and a minute's worth at once.

A full bucket holds a minute's worth. It fills evenly, and never beyond that. So within any time of t minutes
at most (1 + t) times the rate is taken. An amount that is known only afterwards can be charged, too. It may
leave the bucket in debt, and nothing is taken from it until the debt is paid.
"""

from __future__ import annotations

from collections.abc import Callable

MINUTE = 60.0
_ROUNDING = 1e-6
"""A bucket that lacks only this much is not empty: rounding must not make a promised wait too short."""


class TokenBucket:
    """A bucket that fills with `per_minute` units a minute, up to that many.

    per_minute: units per minute, at least 1.
    clock: returns the time in seconds; it never goes back.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated = clock()

    @property
    def level(self) -> float:
        """Units in the bucket now; negative: its debt."""
        now = self._clock()
        filled = self._level + (now - self._updated) * self.per_minute / MINUTE
        self._level, self._updated = min(filled, float(self.per_minute)), now
        return self._level

    @property
    def remaining(self) -> int:
        """Whole units that can be taken now."""
        return max(0, int(self.level + _ROUNDING))

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full, if nothing is taken meanwhile."""
        return (self.per_minute - self.level) * MINUTE / self.per_minute

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `take` accepts an amount, if nothing else is taken meanwhile; 0: now.

        An amount larger than the bucket is accepted when the bucket is full.
        """
        missing = min(amount, float(self.per_minute)) - self.level
        return 0.0 if missing <= _ROUNDING else missing * MINUTE / self.per_minute

    def take(self, amount: float) -> float:
        """Take an amount and return 0, or take nothing and return the seconds to wait, as `wait_s` does."""
        wait = self.wait_s(amount)
        if not wait:
            self._level -= amount
        return wait

    def charge(self, amount: float) -> None:
        """Take an amount, whatever the level is. A negative amount is given back."""
        self._level = min(self.level - amount, float(self.per_minute))

    def change_rate(self, per_minute: int) -> None:
        """Change the rate. The share that was used stays used."""
        self._level = self.level * per_minute / self.per_minute
        self.per_minute = per_minute
