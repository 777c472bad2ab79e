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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fovea.core.errors import InvalidRequest, Overloaded
from fovea.core.protocols import EngineClient
from fovea.server.clients import RATE_LIMIT, Caller


@dataclass(slots=True)
class _Count:
    reserved: int = 0


class Reservations:
    """All reservations of a server. Not thread-safe: use it from one thread, for example the event loop's.

    reserved: number of choices that hold a place now and that the engine does not count yet.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._count = _Count()
        self._caller = Caller()
        self._usual_places = 0
        self._fair = False

    @property
    def reserved(self) -> int:
        return self._count.reserved

    def of(self, caller: Caller, *, usual_places: int = 0, fair: bool = False) -> Reservations:
        """Return the same reservations, for the requests of one caller.

        usual_places: places of a client without a limit of its own; 0: no fixed number.
        fair: whether a client leaves places to others: at least half of the answers that are computed at a
            time, and from its second request on as many places as it holds.
        """
        view = Reservations(self._client)
        view._count = self._count
        view._caller, view._usual_places, view._fair = caller, usual_places, fair
        return view

    @contextmanager
    def reserve(self, choices: int) -> Iterator[Reservation]:
        """Reserve places for this many choices, until they are handed over or the block ends.

        Raises what `Client.check_choices` and EngineClient.check_room raise. If the client has to leave
        places to others, raises InvalidRequest for more choices than it may ever have, Overloaded for more
        than it may have now.
        """
        client = self._caller.client
        client.check_choices(choices, self._usual_places)
        fair = self._fair and not client.limits.places
        if fair:
            self._check_size(choices)
        self._client.check_room(choices, self.reserved)
        if fair and client.places:
            self._check_share(choices)
        self._count.reserved += choices
        client.places += choices
        reservation = Reservation(self._count, self._caller, choices)
        try:
            yield reservation
        finally:
            reservation.give_up()

    @property
    def _share(self) -> int:
        """Most choices in flight of a client beside others. 0: any, while the engine computes none."""
        running = self._client.info.max_running
        return max(1, running // 2) if running else 0

    def _check_size(self, choices: int) -> None:
        """Raise InvalidRequest if the request alone has more choices than a client beside others may have."""
        if self._share and choices > self._share:
            raise InvalidRequest(
                f"{choices} choices are requested; key {self._caller.client.name!r} may have at most "
                f"{self._share} in flight, half of the answers that are computed at a time "
                "(max_places_per_key)",
                param="n",
                code="key_limit_exceeded",
            )

    def _check_share(self, choices: int) -> None:
        """Raise Overloaded if a further request of the client would hold too many places beside others."""
        client = self._caller.client
        if self._share and client.places + choices > self._share:
            raise Overloaded(
                f"key {client.name!r} has {client.places} choices in flight and requests {choices} more; "
                f"accepted: {self._share}, half of the answers that are computed at a time "
                "(max_places_per_key)",
                retry_after=1.0,
                code=RATE_LIMIT,
                scope="engine" if client.places >= self._share else "request",
            )
        try:
            self._client.check_room(choices, self.reserved + client.places + choices)
        except Overloaded as full:
            raise Overloaded(
                f"key {client.name!r} has {client.places} choices in flight and requests {choices} more; "
                "accepted: at most as many as stay free for other keys (max_places_per_key)",
                retry_after=full.retry_after,
                code=RATE_LIMIT,
                scope="engine" if choices == 1 else "request",
            ) from None


class Reservation:
    """The places of one request.

    choices: number of places that it still holds.
    caller: the caller of the request.
    begun: whether the engine has got a part of the request already.
    """

    def __init__(self, count: _Count, caller: Caller, choices: int) -> None:
        self.choices = choices
        self.caller = caller
        self.begun = False
        self._count = count

    def hand_over(self, choices: int) -> None:
        """Give up places that the engine counts from now on. The client's count of them stays, until `end`.

        To be called right before the engine gets the request. An await in between would leave the place
        uncounted.
        """
        self.begun = True
        count = min(choices, self.choices)
        self.choices -= count
        self._count.reserved -= count

    def end(self, choices: int) -> None:
        """Count choices no longer that were handed over and have ended."""
        self.caller.client.places -= choices

    def give_up(self) -> None:
        """Give up the places that were not handed over."""
        left = self.choices
        self.hand_over(left)
        self.end(left)
