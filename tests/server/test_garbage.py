"""Garbage collections of a server that is ready."""

from __future__ import annotations

import asyncio
import gc
from unittest.mock import Mock

import pytest

from fovea.server.run import collect_regularly
from fovea.server.starting import StartingClient
from tests.server.scripted import Script
from tests.server.support import until


def test_objects_of_a_ready_server_are_not_visited_again() -> None:
    """A body of 4096 short messages set off a full collection, which stopped all clients for 0.2 s."""
    loaded = [[number] for number in range(20_000)]
    frozen = gc.get_freeze_count()
    client = StartingClient("x", Script, lambda: None)
    client.start()
    until(lambda: client.status == "ready")
    assert gc.get_freeze_count() > frozen + len(loaded) / 2
    assert len(gc.get_objects()) < len(loaded) / 2


async def test_circles_of_failed_requests_are_freed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of images of clients that had left stayed in memory until some later request needed much."""
    monkeypatch.setattr("fovea.server.run.EVERY_S", 0.001)
    monkeypatch.setattr("gc.get_freeze_count", lambda: 1)
    monkeypatch.setattr("gc.collect", (collected := Mock()))
    collecting = asyncio.create_task(collect_regularly())
    async with asyncio.timeout(20):
        while not collected.called:
            await asyncio.sleep(0.001)
    collecting.cancel()
