"""Remembers that a service has failed, so that it is asked again only after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Lets calls through while a service works, and one call per pause while it does not.

    first_s: pause after the first failure, in seconds. It doubles with every further one, up to `longest_s`.
    trips: times that the service went from working to failing.
    """

    __slots__ = ("_clock", "_first_s", "_longest_s", "_pause_s", "_probing", "_retry_at", "trips")

    def __init__(
        self, first_s: float = 0.5, longest_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.trips = 0
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._probing = False

    @property
    def failing(self) -> bool:
        """Whether the last call failed."""
        return self._pause_s > 0

    def allows(self) -> bool:
        """Whether the service may be called now. During a failure, the answer is yes once per pause."""
        if not self._pause_s:
            return True
        now = self._clock()
        if now < self._retry_at:
            return False
        self._retry_at, self._probing = now + self._pause_s, True
        return True

    def succeeded(self) -> None:
        """Note that a call succeeded."""
        self._pause_s = 0.0

    def failed(self) -> None:
        """Note that a call failed. Calls that began before the failure do not make the pause longer."""
        if not self._pause_s:
            self.trips += 1
            self._pause_s = self._first_s
        elif self._probing:
            self._pause_s = min(2 * self._pause_s, self._longest_s)
        else:
            return
        self._retry_at, self._probing = self._clock() + self._pause_s, False
