"""The choice of the body that has to give way when the memory for request bodies is full."""

from __future__ import annotations

import pytest

from fovea.core.errors import ConfigError, Overloaded
from fovea.http.bodies import FREE, BodyBudget, BodyMemory
from fovea.server.settings import ServerSettings

MIB = 1024 * 1024


class Bodies:
    """Bodies of one budget.

    stopped: names of the bodies that had to give way, in order.
    """

    def __init__(self, capacity: int) -> None:
        self.budget = BodyBudget(capacity, capacity)
        self.stopped: list[str] = []

    def body(self, name: str, owner: str = "-", size: int = 0) -> BodyMemory:
        memory = self.budget.begin(owner, lambda: self.stopped.append(name))
        if size:
            memory.add(FREE + size)
        return memory


def test_bytes_are_counted_as_they_arrive_and_given_back_once() -> None:
    budget = BodyBudget(10 * MIB, MIB)
    memory = budget.begin("-", lambda: None)
    memory.add(FREE - 1)
    assert budget.held == 0
    memory.add(MIB + 1)
    assert budget.held == MIB
    memory.arrived()
    memory.shrink(100)
    memory.shrink(5 * MIB)
    assert budget.held == 0
    memory.add(10)
    memory.release()
    memory.release()
    memory.end()
    assert budget.held == 0


def test_the_largest_arriving_body_gives_way() -> None:
    """Attack: twenty clients sent 63 of 64 MiB and then nothing more; 1.2 GB stayed in memory."""
    bodies = Bodies(100)
    bodies.body("small", size=30)
    bodies.body("large", size=60)
    bodies.body("new", size=20)
    assert bodies.stopped == ["large"]
    assert bodies.budget.held == 50
    assert bodies.budget.refused == 1


def test_a_new_body_gives_way_if_it_is_the_largest() -> None:
    bodies = Bodies(100)
    bodies.body("other", size=40)
    new = bodies.body("new", size=50)
    with pytest.raises(Overloaded, match="max_bodies_mib") as caught:
        new.add(20)
    assert (caught.value.code, caught.value.status) == ("bodies_full", 429)
    assert bodies.stopped == ["new"]
    assert bodies.budget.held == 40


def test_complete_bodies_are_never_refused() -> None:
    bodies = Bodies(100)
    bodies.body("complete", size=90).arrived()
    with pytest.raises(Overloaded):
        bodies.body("new", size=20)
    assert bodies.stopped == ["new"]


def test_small_bodies_always_pass() -> None:
    bodies = Bodies(100)
    bodies.body("complete", size=100).arrived()
    bodies.body("small").add(FREE)
    assert bodies.stopped == []


def test_a_client_with_more_than_half_gives_way_before_others() -> None:
    """Attack: one key fills the memory with many bodies, each smaller than those of others."""
    bodies = Bodies(100)
    bodies.body("other", "b", 40)
    for at in range(6):
        bodies.body(f"greedy {at}", "a", 10)
    bodies.body("late", "c", 5)
    assert bodies.stopped == ["greedy 0"]


def test_several_give_way_for_one() -> None:
    bodies = Bodies(100)
    for at in range(10):
        bodies.body(str(at), "a", 10)
    bodies.body("new", "b", 25)
    assert len(bodies.stopped) == 3
    assert "new" not in bodies.stopped
    assert bodies.budget.held == 95


def test_one_body_must_fit_into_the_memory_of_all() -> None:
    with pytest.raises(ConfigError, match="max_bodies_mib is 8; accepted: at least max_body_mib"):
        ServerSettings.of(max_body_mib=9, max_bodies_mib=8)
    assert ServerSettings.of(max_body_mib=8, max_bodies_mib=8).bodies.max_bodies_mib == 8
