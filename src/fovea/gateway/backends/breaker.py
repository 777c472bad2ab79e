"""Circuit breakers: a stage of a backend that keeps failing gets no requests for a while.

A backend has a breaker for each stage. Connections fail for all requests. Images can fail alone, for example
if the vision encoder is out of memory; questions about text then go on. After `open_s` one request probes.
"""

from __future__ import annotations

from enum import StrEnum

CONNECT, TEXT, VISION = "connect", "text", "vision"
STAGES = (CONNECT, TEXT, VISION)


def stage_of(*, vision: bool) -> str:
    """The stage that answers a request. vision: whether the request has images."""
    return VISION if vision else TEXT


class State(StrEnum):
    """The state of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The breaker of one stage of one backend. The clock is passed in, in seconds.

    failures: failures in a row.
    opened: times that it has opened.
    """

    __slots__ = ("_most", "_open_s", "_probe_until", "_until", "failures", "opened")

    def __init__(self, most: int, open_s: float) -> None:
        """most: failures in a row that open it. open_s: seconds until a probe."""
        self.failures = 0
        self.opened = 0
        self._most = most
        self._open_s = open_s
        self._until = 0.0
        self._probe_until = 0.0

    def state(self, now: float) -> State:
        """The state at a time."""
        if self.failures < self._most:
            return State.CLOSED
        return State.OPEN if now < self._until else State.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent: yes if closed, and one at a time if half-open."""
        if self.failures < self._most:
            return True
        return now >= self._until and now >= self._probe_until

    def begin(self, now: float) -> None:
        """Note that a request is sent. If half-open it is the probe; a lost one is forgotten in time."""
        if self.failures >= self._most:
            self._probe_until = now + self._open_s

    def begin_stream(self) -> None:
        """Note the first event of a stream, which can still break off.

        It is no success yet: otherwise a backend that breaks all its streams would never be opened. But a
        probe that has come so far lets others through. One more failure opens the breaker again.
        """
        self.failures = min(self.failures, self._most - 1)
        self._probe_until = 0.0

    def succeed(self) -> None:
        """Note a success, which closes the breaker."""
        self.failures = 0
        self._until = self._probe_until = 0.0

    def fail(self, now: float) -> bool:
        """Note a failure. Returns whether the breaker opens by it."""
        self.failures += 1
        if self.failures < self._most:
            return False
        opens = now >= self._until
        self._until = now + self._open_s
        self._probe_until = 0.0
        self.opened += opens
        return opens

    def release(self) -> None:
        """Forget a probe that ended without a verdict, for example because its client left."""
        self._probe_until = 0.0
