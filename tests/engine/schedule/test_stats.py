"""Tests of the scheduler's figures: ages of waiting requests, slots, checkpoints, window blocks."""

from __future__ import annotations

from fovea.engine.step.stats import scheduler_stats, waiting_ages
from tests.support.brains import SlotRunner, scheduler, sequence


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


def test_slots_and_checkpoints_of_states_are_counted() -> None:
    brains = scheduler(blocks=64, block_size=4, state_slots=3)
    runner = SlotRunner(brains)
    brains.add(sequence("first", 9, max_tokens=2))
    used = []
    while brains.running or brains.waiting:
        runner.step()
        used.append(scheduler_stats(brains)["state_slots_used"])
    stats = scheduler_stats(brains)
    assert used[0] == 1
    assert stats["state_slots_used"] == stats["state_evictions"] == 0
    assert (stats["state_slots_total"], stats["state_checkpoints"]) == (3, 2), "the prompt and its answer"
    brains.add(sequence("other", [7, 7, 7, 7, 7], max_tokens=2, arrival=1.0))
    runner.run()
    stats = scheduler_stats(brains)
    assert (stats["state_checkpoints"], stats["state_evictions"]) == (3, 1)


def test_blocks_behind_the_window_are_counted_when_they_return() -> None:
    brains = scheduler(blocks=64, block_size=4, window=5, window_blocks=32, max_step_tokens=4)
    brains.add(sequence("long", 40, max_tokens=1))
    SlotRunner(brains).run()
    stats = scheduler_stats(brains)
    assert brains.kv.window is not None
    assert stats["window_blocks_total"] == 32
    assert stats["window_blocks_used"] == 0
    assert stats["window_blocks_returned"] == brains.kv.window.first_visible(40) == 9


def test_models_without_states_and_windows_report_neither() -> None:
    assert not [name for name in scheduler_stats(scheduler()) if name.startswith(("state_", "window_"))]
