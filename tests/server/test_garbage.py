"""Garbage collections of a server that is ready."""

from __future__ import annotations

import gc

from fovea.server.garbage import keep_for_life
from fovea.server.starting import StartingClient
from tests.server.scripted import Script
from tests.server.support import until


def test_objects_of_a_ready_server_are_not_visited_again() -> None:
    """A body of 4096 short messages set off a full collection, which stopped all clients for 0.2 s."""
    gc.unfreeze()  # an earlier test may have had a server that was ready
    frozen = gc.get_freeze_count()
    try:
        client = StartingClient("x", Script, lambda: None)
        client.start()
        until(lambda: client.status == "ready")
        assert gc.get_freeze_count() > frozen + 10_000
        assert len(gc.get_objects()) < 10_000
        keep_for_life()
    finally:
        gc.unfreeze()
