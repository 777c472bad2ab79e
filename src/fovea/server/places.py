"""Places in the engine's queue, reserved for requests whose images are still being fetched.

The engine counts a request only once the server hands it over. Without reservations, all requests that fetch
images at the same time would find the same free place. Most of them would then be refused after they fetched
images in vain.

Each client's choices are counted, too, from the reservation to the end of the answer. If there are several
clients, none takes all places: a client may hold at most half of the answers that are computed at a time,
even with a single request, and its further requests only as many places as it leaves free. Otherwise one
client with long answers, which it need not even read, would let all others wait for their ends. (Dynamic
thresholds of buffers: Choudhury and Hahne, 1998.)
"""

from __future__ import annotations

from collections.abc import Callable

from fovea.core.errors import InvalidRequest, Overloaded
from fovea.core.protocols import EngineClient
from fovea.server.clients import RATE_LIMIT, Client


class Places:
    """All reservations of a server. Not thread-safe: for the event loop's thread.

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
