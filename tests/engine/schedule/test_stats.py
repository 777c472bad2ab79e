"""Tests of the scheduler's figures about waiting requests."""

from __future__ import annotations

from fovea.engine.schedule.stats import waiting_ages
from tests.support.brains import scheduler, sequence


def test_each_of_the_two_queues_has_its_age() -> None:
    brains = scheduler()
    assert set(waiting_ages(brains, 9.0).values()) == {0.0}
    brains.add(sequence("image", [1, ("cat", 4), 2], arrival=2.0))
    brains.add(sequence("text", 3, arrival=5.0))
    brains.add(sequence("later", 3, arrival=6.0))
    assert waiting_ages(brains, 9.0) == {
        "oldest_waiting_seconds": 7.0,
        "oldest_waiting_ready_seconds": 4.0,
        "oldest_waiting_image_seconds": 7.0,
    }
    brains.embeddings.put("cat", "features", 8, set())
    assert waiting_ages(brains, 9.0)["oldest_waiting_ready_seconds"] == 7.0
