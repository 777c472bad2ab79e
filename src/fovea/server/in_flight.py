"""The requests that the engine has now, and the latest times to first token.

The page for operators shows them. A request is known here from the moment at which it is handed to the
engine until its answer ends. Nothing of its content is kept.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

SAMPLES = 1024
"""Times to first token that are kept at most."""


class Flight:
    """One request that the engine has.

    number: differs from that of all other requests since the server started.
    id: its request id, which logs and responses name, too.
    caller: name of its client.
    images: images and videos in its prompt.
    choices: answers that it asks for.
    started: time of the clock at which the engine got it.
    tokens: tokens that were generated so far, of all choices.
    generating: whether it has its first token.
    """

    __slots__ = ("caller", "choices", "generating", "id", "images", "number", "started", "tokens")

    def __init__(self, number: int, id: str, caller: str, images: int, choices: int, started: float) -> None:
        self.number = number
        self.id = id
        self.caller = caller
        self.images = images
        self.choices = choices
        self.started = started
        self.tokens = 0
        self.generating = False


class InFlight:
    """All requests that the engine has. Not thread-safe: use it from the event loop's thread.

    first_tokens, first_token_seconds: number and sum of the times to first token since the server started.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.first_tokens = 0
        self.first_token_seconds = 0.0
        self._entered = 0
        self._flights: dict[Flight, None] = {}
        self._latest: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """Iterate over the requests, oldest first."""
        return iter(self._flights)

    def enter(self, id: str, caller: str, images: int, choices: int) -> Flight:
        """Add a request that is handed to the engine now."""
        self._entered += 1
        flight = Flight(self._entered, id, caller, images, choices, self.clock())
        self._flights[flight] = None
        return flight

    def leave(self, flight: Flight) -> None:
        """Remove a request whose answer has ended."""
        del self._flights[flight]

    def begin_answer(self, flight: Flight, seconds: float) -> None:
        """Note that a request has its first token. seconds: time from its arrival until now."""
        flight.generating = True
        self.first_tokens += 1
        self.first_token_seconds += seconds
        self._latest.append((self.clock(), seconds))

    def per_caller(self) -> Counter[str]:
        """Return how many requests each client has."""
        return Counter(flight.caller for flight in self._flights)

    def first_token_times(self, window_s: float) -> list[float]:
        """Return the times to first token of the last `window_s` seconds in ascending order.

        At most SAMPLES of them are kept.
        """
        since = self.clock() - window_s
        return sorted(seconds for at, seconds in self._latest if at >= since)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed; None without values.

    ordered: the values, ascending.
    """
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
