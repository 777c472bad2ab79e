"""Whether a store is failing now: after some failures in a row nobody waits for it until a probe succeeds."""

from __future__ import annotations

THRESHOLD = 3
"""Failures in a row after which requests no longer try the store."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


class Outage:
    """The failures of one store.

    failures: number of failed calls, probes included.
    open: whether requests do not try the store.
    """

    __slots__ = ("_in_a_row", "_probes", "failures", "open")

    def __init__(self) -> None:
        self.failures = 0
        self.open = False
        self._in_a_row = 0
        self._probes = 0

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe: twice as long after every probe that failed, within bounds."""
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._probes, 10)))

    def failed(self, *, probe: bool = False) -> bool:
        """Count a failure. Returns whether the outage begins with it."""
        self.failures += 1
        self._in_a_row += 1
        self._probes += probe
        begins = not self.open and self._in_a_row >= THRESHOLD
        self.open = self.open or begins
        return begins

    def succeeded(self) -> bool:
        """Note a success. Returns whether an outage ends with it."""
        ended, self.open = self.open, False
        self._in_a_row = self._probes = 0
        return ended
