"""Places in the engine's queue that requests hold while their images are fetched.

The engine counts a request from when it is handed over. Without a place held until then, all requests that fetch at one
moment would see the same free place, and most of them would be refused after their images were fetched for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fovea.core.protocols import EngineClient


class Rooms:
    """For one thread, as the event loop is. reserved: answers that hold a place now."""

    def __init__(self, client: EngineClient) -> None:
        self.reserved = 0
        self._client = client

    @contextmanager
    def hold(self, answers: int) -> Iterator[Room]:
        """Places for that many answers until they are handed over, or the block ends.

        Raises what EngineClient.check_room raises.
        """
        self._client.check_room(answers, self.reserved)
        self.reserved += answers
        room = Room(self, answers)
        try:
            yield room
        finally:
            room.hand_over(room.answers)


class Room:
    """answers: places still held."""

    def __init__(self, rooms: Rooms, answers: int) -> None:
        self.answers = answers
        self._rooms = rooms

    def hand_over(self, answers: int) -> None:
        """The engine counts these from now on; to be called right before it is asked, with no await between."""
        given = min(answers, self.answers)
        self.answers -= given
        self._rooms.reserved -= given
