"""The bound on renders: requests that ask which prompt the engine would compute, and compute nothing.

They take no place in the engine's queue, so that a router may ask about every request that it forwards.
Without a bound of their own, a flood of them would hold memory and delay requests for answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fovea.core.errors import Forbidden, Overloaded
from fovea.server.clients import RATE_LIMIT

RETRY_S = 1.0


class Renders:
    """Counts the renders that load images, wait or run. Not thread-safe: for the event loop's thread.

    most: most renders at a time; 0: they are refused.
    running: number of renders now.
    """

    def __init__(self, most: int, is_fair: Callable[[], bool] = lambda: False) -> None:
        """is_fair: tells whether a client may have half of the places at most."""
        self.most = most
        self.running = 0
        self._is_fair = is_fair
        self._by_owner: Counter[str] = Counter()

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Count a render of a client. Raises Forbidden if renders are off, Overloaded beyond a bound."""
        if not self.most:
            raise Forbidden("this server renders no prompts (max_renders is 0)", code="renders_off")
        if self.running >= self.most:
            raise Overloaded(
                f"{self.running} renders are in progress; accepted: at most {self.most} (max_renders)",
                retry_after=RETRY_S,
                scope="request",
            )
        half = max(1, self.most // 2)
        if self._is_fair() and self._by_owner[owner] >= half:
            raise Overloaded(
                f"key {owner!r} has {self._by_owner[owner]} renders in progress; accepted: at most "
                f"{half}, half of max_renders",
                retry_after=RETRY_S,
                code=RATE_LIMIT,
                scope="request",
            )
        self.running += 1
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self.running -= 1
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]
