"""Clients of the server: their limits, what they use of them, and their places in the engine's queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fovea.access.bucket import TokenBucket
from fovea.core.errors import InvalidRequest, Overloaded
from fovea.core.protocols import EngineClient
from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that all keys of one client share. The defaults limit nothing."""

    requests_per_minute: int = setting(
        0, "Requests per minute. As many may come at once. 0: no limit.", low=0, high=10_000_000
    )
    tokens_per_minute: int = setting(
        0,
        "Tokens of prompts and answers per minute, visual tokens included. As many may come at once. "
        "0: no limit.",
        low=0,
        high=1_000_000_000,
    )
    places: int = setting(
        0,
        "Choices that load their images, wait or run at one time. 0: as max_places_per_key says.",
        low=0,
        high=1_000_000,
    )
    cache_share: float = setting(
        1.0,
        "Part of each cache of images that the client's entries may fill. Below 1 the server needs "
        "cache_scope key.",
        low=0,
        high=1,
    )
    min_priority: int = setting(
        -1000,
        "Smallest priority that a request may name; smaller ones are served first.",
        low=-1000,
        high=1000,
    )
    max_n: int = setting(
        0, "Most choices of one request, all its prompts together. 0: no limit.", low=0, high=4096
    )
    max_timeout_s: float = setting(
        0.0, "Longest timeout of a request in seconds, also of one that names none. 0: no limit.",
        low=0, high=86400,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)


NO_LIMITS = Limits()


@dataclass(slots=True)
class Totals:
    """Running totals of one client.

    requests: requests that count towards limits and have ended.
    refused: those of them that were answered with a status of 400 or above.
    prompt_tokens, completion_tokens: tokens of prompts, visual tokens included, and of answers.
    cached_tokens: prompt tokens whose KV was in the prefix cache, so that they were not computed.
    images: images and videos of requests that the engine has accepted.
    """

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens that the engine has computed for the client: the measure of its share in the costs."""
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens

    def count_end(self, *, refused: bool) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.refused += refused


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


ANYONE = "-"
"""Name of the client of a request without a key."""


@dataclass(slots=True)
class Caller:
    """The sender of a request, as its key tells.

    client: the client that owns the key; without keys, a client without limits.
    tenant: the part of the caches that belongs to it; "" if all clients share the caches.
    holder: a name of the client that stays the same when the server starts again, for what is kept on disk;
        "" without keys.
    fingerprint: the first 8 hex digits of the hash of the key that was sent; "-" if there was none.
    """

    client: Client = field(default_factory=lambda: Client(ANYONE))
    tenant: str = ""
    holder: str = ""
    fingerprint: str = "-"

    @property
    def owner(self) -> str:
        """The client's name, to count what it holds; "" without keys, where clients are not told apart."""
        return "" if self.client.name == ANYONE else self.client.name


class Places:
    """Places in the engine's queue, reserved for requests whose images are still being fetched.

    The engine counts a request only once the server hands it over. Without reservations, all requests that
    fetch images at the same time would find the same free place. Most of them would then be refused after
    they fetched images in vain.

    Each client's choices are counted, too, from the reservation to the end of the answer. If there are
    several clients, none takes all places: a client may hold at most half of the answers that are computed at
    a time, even with a single request, and its further requests only as many places as it leaves free.
    Otherwise one client with long answers, which it need not even read, would let all others wait for their
    ends. (Dynamic thresholds of buffers: Choudhury and Hahne, 1998.)

    Not thread-safe: for the event loop's thread.

    reserved: number of choices that hold a place now and that the engine does not count yet.
    """

    def __init__(
        self, engine: EngineClient, usual_places: int = 0, is_fair: Callable[[], bool] = lambda: False
    ) -> None:
        """usual_places: places of a client without a limit of its own; 0: no fixed number.

        is_fair: tells whether a client leaves places to others: at least half of the answers that are
            computed at a time, and from its second request on as many places as it holds.
        """
        self.reserved = 0
        self._engine = engine
        self._usual_places = usual_places
        self._is_fair = is_fair

    def take(self, client: Client, choices: int) -> None:
        """Reserve places for this many choices of a request. Call `hand_over` or `give_up` for each of them.

        Raises what `Client.check_choices` and EngineClient.check_room raise. If the client has to leave
        places to others, raises InvalidRequest for more choices than it may ever have, Overloaded for more
        than it may have now.
        """
        client.check_choices(choices, self._usual_places)
        fair = self._is_fair() and not client.limits.places
        if fair:
            self._check_size(client, choices)
        self._engine.check_room(choices, self.reserved)
        if fair and client.places:
            self._check_others(client, choices)
        self.reserved += choices
        client.places += choices

    def hand_over(self, choices: int) -> None:
        """Give up places that the engine counts from now on. The client's count of them stays.

        To be called right before the engine gets the request. An await in between would leave the place
        uncounted.
        """
        self.reserved -= choices

    def give_up(self, client: Client, choices: int) -> None:
        """Give up places that were not handed over."""
        self.reserved -= choices
        client.places -= choices

    @property
    def _most(self) -> int:
        """Most choices in flight of a client beside others. 0: any, while the engine computes none."""
        running = self._engine.info.max_running
        return max(1, running // 2) if running else 0

    def _check_size(self, client: Client, choices: int) -> None:
        """Raise InvalidRequest if the request alone has more choices than a client beside others may have."""
        if self._most and choices > self._most:
            raise InvalidRequest(
                f"{choices} choices are requested; key {client.name!r} may have at most "
                f"{self._most} in flight, half of the answers that are computed at a time "
                "(max_places_per_key)",
                param="n",
                code="key_limit_exceeded",
            )

    def _check_others(self, client: Client, choices: int) -> None:
        """Raise Overloaded if a further request of the client would hold too many places beside others."""
        if self._most and client.places + choices > self._most:
            raise Overloaded(
                f"key {client.name!r} has {client.places} choices in flight and requests {choices} more; "
                f"accepted: {self._most}, half of the answers that are computed at a time "
                "(max_places_per_key)",
                retry_after=1.0,
                code=RATE_LIMIT,
                scope="engine" if client.places >= self._most else "request",
            )
        try:
            self._engine.check_room(choices, self.reserved + client.places + choices)
        except Overloaded as full:
            raise Overloaded(
                f"key {client.name!r} has {client.places} choices in flight and requests {choices} more; "
                "accepted: at most as many as stay free for other keys (max_places_per_key)",
                retry_after=full.retry_after,
                code=RATE_LIMIT,
                scope="engine" if choices == 1 else "request",
            ) from None
