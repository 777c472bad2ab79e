"""A client of the server, to whom one or several keys belong, and its use of its limits."""

from __future__ import annotations

import time
from collections.abc import Callable

from fovea.access.bucket import TokenBucket
from fovea.core.errors import InvalidRequest, Overloaded
from fovea.server.access.limits import NO_LIMITS, Limits
from fovea.server.access.totals import Totals

RATE_LIMIT = "rate_limit_exceeded"


class Client:
    """One client: its name, its limits, and what it uses of them now.

    name: a name for logs and messages, never a key.
    limits: can change while the client has requests in flight.
    places: choices in flight, loading of their images included.
    requests, tokens: the buckets of the limits per minute; None: no limit.
    totals: what it has used since the server started.

    Not thread-safe: use it from one thread, for example the event loop's.
    """

    def __init__(
        self, name: str, limits: Limits = NO_LIMITS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.limits = limits
        self.places = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.totals = Totals()
        self._clock = clock
        self._usual_hold = 1.0
        self.change_limits(limits)

    def change_limits(self, limits: Limits) -> None:
        """Use other limits from now on. What was used of a limit per minute stays used."""
        self.limits = limits
        self.requests = self._changed(self.requests, limits.requests_per_minute)
        self.tokens = self._changed(self.tokens, limits.tokens_per_minute)

    def count_request(self) -> None:
        """Count a request that has just arrived. Raises Overloaded beyond a limit per minute.

        The tokens of the request are not known yet, so it is refused for them only if the client has a debt.
        The wait is then long enough for a request as large as the latest one.
        """
        if self.tokens is not None and self.tokens.level < 1:
            self._refuse("tokens_per_minute", "tokens", self.tokens, self.tokens.wait_s(self._usual_hold))
        if self.requests is not None and (wait := self.requests.take(1)):
            self._refuse("requests_per_minute", "requests", self.requests, wait)

    def hold_tokens(self, estimate: float, *, check: bool = True) -> float:
        """Take the estimated tokens of a generation, and return how many were taken.

        check: whether too few tokens are an error; otherwise they leave a debt.
        Raises Overloaded if too few are left.
        """
        if self.tokens is None:
            return 0.0
        held = max(1.0, min(estimate, float(self.tokens.per_minute)))
        if not check:
            self.tokens.charge(held)
            return held
        self._usual_hold = held
        if wait := self.tokens.take(held):
            self._refuse("tokens_per_minute", "tokens", self.tokens, wait)
        return held

    def settle_tokens(self, held: float, used: float) -> None:
        """Replace held tokens by the tokens that were used."""
        if self.tokens is not None:
            self.tokens.charge(used - held)

    def check_choices(self, choices: int, usual_places: int = 0) -> None:
        """Check whether a request with so many choices may begin now.

        usual_places: the limit of places if the client has none of its own; 0: none.
        Raises InvalidRequest for more choices than one request may have, Overloaded if they have no place
        now.
        """
        limit = self.limits.max_n
        if limit and choices > limit:
            raise InvalidRequest(
                f"{choices} choices are requested; key {self.name!r} may request at most {limit} at "
                "once (max_n)",
                param="n",
                code="key_limit_exceeded",
            )
        places = self.limits.places or usual_places
        if not places or self.places + choices <= places:
            return
        name = "places" if self.limits.places else "max_places_per_key"
        if choices > places:
            raise InvalidRequest(
                f"{choices} choices are requested; key {self.name!r} may have at most {places} in "
                f"flight ({name})",
                param="n",
                code="key_limit_exceeded",
            )
        raise Overloaded(
            f"key {self.name!r} has {self.places} choices in flight and requests {choices} more; "
            f"accepted: at most {places} ({name})",
            retry_after=1.0,
            code=RATE_LIMIT,
            scope="engine" if self.places >= places else "request",
        )

    def check_priority(self, priority: int) -> None:
        """Raise InvalidRequest if a request may not have this priority."""
        if priority < self.limits.min_priority:
            raise InvalidRequest(
                f"priority is {priority}; key {self.name!r} may use {self.limits.min_priority} and larger "
                "numbers (min_priority)",
                param="priority",
                code="key_limit_exceeded",
            )

    def timeout(self, requested: float | None, usual: float) -> float | None:
        """Return the timeout of a request in seconds; None: no limit.

        requested: the request's own; None or 0: it names none.
        usual: the server's default; 0: none. It is lowered to the client's longest timeout.
        Raises InvalidRequest if the request's own is longer than the client's longest.
        """
        longest = self.limits.max_timeout_s
        if requested and longest and requested > longest:
            raise InvalidRequest(
                f"timeout is {requested:g} s; key {self.name!r} may use at most {longest:g} s "
                "(max_timeout_s)",
                param="timeout",
                code="key_limit_exceeded",
            )
        bounds = [seconds for seconds in (requested or usual, longest) if seconds]
        return min(bounds, default=None)

    def _changed(self, bucket: TokenBucket | None, per_minute: int) -> TokenBucket | None:
        if not per_minute:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        bucket.change_rate(per_minute)
        return bucket

    def _refuse(self, name: str, noun: str, bucket: TokenBucket, wait: float) -> None:
        raise Overloaded(
            f"key {self.name!r} may use {bucket.per_minute} {noun} per minute ({name}), and has used them; "
            f"try again in {wait:.3g} s",
            retry_after=wait,
            code=RATE_LIMIT,
            scope="request" if bucket.level >= 1 else "engine",
        )
