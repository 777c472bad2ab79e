"""Circuit breakers and the budget of retries: what keeps failing must not get more and more calls.

A stage that fails gets no calls for a while, and then one call at a time as a probe.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The breaker of a stage of a backend, or of a store. The clock is passed in, in seconds.

    failures: failures in a row.
    outages: times that it went from working to failing.
    pause_s: seconds until the next probe.
    """

    def __init__(self, most: int, first_s: float, longest_s: float = 0.0) -> None:
        """most: failures in a row that open it. first_s: seconds until a first probe.

        longest_s: after every probe that fails the pause is twice as long, up to this; 0: it stays as it is.
        """
        self.failures = self.outages = 0
        self.pause_s = first_s
        self._most = most
        self._first_s = first_s
        self._longest_s = longest_s or first_s
        self._until = self._probe_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls failed so often that only probes are sent."""
        return self.failures >= self._most

    def state(self, now: float) -> State:
        """The state at a time."""
        if not self.is_open:
            return State.CLOSED
        return State.OPEN if now < self._until else State.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a call may be made: yes if closed, and one at a time if half-open."""
        return self.failures < self._most or (now >= self._until and now >= self._probe_until)

    def begin(self, now: float) -> None:
        """Note that a call is made. If half-open it is the probe; a lost one is forgotten in time."""
        if self.failures >= self._most:
            self._probe_until = now + self.pause_s

    def begin_stream(self) -> None:
        """Note the first event of a stream, which can still break off.

        It is not a success yet: otherwise a backend that breaks all its streams would never be opened. But a
        probe that has come so far lets others through. One more failure opens the breaker again.
        """
        self.failures = min(self.failures, self._most - 1)
        self._probe_until = 0.0

    def succeed(self) -> bool:
        """Note a success, which closes the breaker. Returns whether it was open."""
        was_open = self.is_open
        self.failures = 0
        self.pause_s = self._first_s
        self._until = self._probe_until = 0.0
        return was_open

    def fail(self, now: float) -> bool:
        """Note a failure. Returns whether the breaker opens by it."""
        self.failures += 1
        if self.failures < self._most:
            return False
        opens = now >= self._until
        self.outages += self.failures == self._most
        if self._probe_until:
            self.pause_s = min(2 * self.pause_s, self._longest_s)
        self._until = now + self.pause_s
        self._probe_until = 0.0
        return opens

    def release(self) -> None:
        """Forget a probe that ended without a verdict, for example because its client left."""
        self._probe_until = 0.0


class RetryBudget:
    """Retries and hedges that are allowed: a share of all requests, and some at once.

    Without it, a failing fleet would get every request several times, just when it has too many.
    """

    AT_ONCE = 10.0

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = self.AT_ONCE if share else 0.0

    def count_request(self) -> None:
        """Count a request, which earns a part of a retry."""
        self._left = min(self.AT_ONCE, self._left + self._share)

    def take(self) -> bool:
        """Take a retry if one is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
