"""Places in the engine's queue, reserved for requests whose images are still being fetched.

The engine counts a request only once the server hands it over. Without reservations, all requests that fetch
images at the same time would find the same free place. Most of them would then be refused after they fetched
images in vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fovea.core.protocols import EngineClient


class Reservations:
    """All reservations of a server. Not thread-safe: use it from one thread, for example the event loop's.

    reserved: number of choices that hold a place now.
    """

    def __init__(self, client: EngineClient) -> None:
        self.reserved = 0
        self._client = client

    @contextmanager
    def reserve(self, choices: int) -> Iterator[Reservation]:
        """Reserve places for this many choices, until they are handed over or the block ends.

        Raises what EngineClient.check_room raises.
        """
        self._client.check_room(choices, self.reserved)
        self.reserved += choices
        reservation = Reservation(self, choices)
        try:
            yield reservation
        finally:
            reservation.hand_over(reservation.choices)


class Reservation:
    """The places of one request.

    choices: number of places that it still holds.
    """

    def __init__(self, reservations: Reservations, choices: int) -> None:
        self.choices = choices
        self._reservations = reservations

    def hand_over(self, choices: int) -> None:
        """Give up places that the engine counts from now on.

        To be called right before the engine gets the request. An await in between would leave the place
        uncounted.
        """
        count = min(choices, self.choices)
        self.choices -= count
        self._reservations.reserved -= count
