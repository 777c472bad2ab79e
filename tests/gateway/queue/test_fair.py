"""The fair queue's decisions: capacity, bounds, priorities, and no starvation, for any sequence of calls."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.gateway.fair_queue import FairQueue, QueueSlot, State
from fovea.gateway.settings import QueueSettings
from tests.support.thorough import examples


def slot(tenant: str, cost: int = 100, priority: int = 0, weight: float = 1.0) -> QueueSlot:
    return QueueSlot(tenant, weight, priority, cost)


def queue(tokens: int = 1000, requests: int = 10, **values: float) -> FairQueue:
    return FairQueue(QueueSettings(**values), tokens, requests)  # type: ignore[arg-type]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("offer", "offer", "offer", "finish", "withdraw", "resize")),
        st.integers(0, 4),
        st.integers(1, 1500),
        st.integers(-1, 2),
        st.integers(0, 10**6),
    ),
    max_size=60,
)


class Driver:
    """Calls a queue, and checks what must hold after every call."""

    def __init__(self, fair: FairQueue) -> None:
        self.fair = fair
        self.running: list[QueueSlot] = []
        self.waiting: list[QueueSlot] = []
        self.now_s = 0.0

    def act(self, action: str, tenant: int, cost: int, priority: int, place: int) -> None:
        self.now_s += cost / 100
        if action == "offer":
            new = slot(f"t{tenant}", cost, priority, weight=0.5 + tenant)
            self.waiting.append(new)
            started, refusal = self.fair.offer(new, self.now_s)
            if refusal is not None:
                self.waiting.remove(new)
                assert new.state is State.ENDED
                assert refusal.retry_after >= 1
        elif action == "finish" and self.running:
            started = self.fair.finish(self.running.pop(place % len(self.running)), self.now_s)
        elif action == "withdraw" and self.waiting:
            started = self.fair.withdraw(self.waiting.pop(place % len(self.waiting)), self.now_s)
        elif action == "resize":
            started = self.fair.resize(cost * 2, tenant * 3)
        else:
            return
        self.check(started)

    def check(self, started: list[QueueSlot]) -> None:
        for each in started:
            self.waiting.remove(each)
            self.running.append(each)
            assert each.state is State.RUNNING
        tokens, requests = self.fair.capacity
        if started:
            assert len(self.running) <= requests
            assert sum(each.cost for each in self.running) <= tokens or len(self.running) == 1
        assert (self.fair.running, self.fair.waiting) == (len(self.running), len(self.waiting))
        assert self.fair.running_tokens == sum(each.cost for each in self.running)
        if not self.running and tokens and requests:
            assert not self.waiting, "the capacity is empty, so something must run"


@given(ACTIONS)
@settings(max_examples=examples(150), deadline=None)
def test_the_capacity_is_never_exceeded_and_everything_ends(
    actions: list[tuple[str, int, int, int, int]],
) -> None:
    driver = Driver(queue(queue_length=12, queue_length_per_tenant=5, queue_quantum=300))
    for action in actions:
        driver.act(*action)
    driver.check(driver.fair.resize(1000, 4))
    while driver.running:
        driver.act("finish", 0, 1, 0, 0)
    assert (driver.fair.waiting, driver.fair.running_tokens) == (0, 0)


def test_a_request_larger_than_the_capacity_runs_alone() -> None:
    fair = queue(tokens=1000)
    small, large, after = slot("a"), slot("b", 5000), slot("a")
    assert fair.offer(small, 0).started == [small]
    assert fair.offer(large, 0).started == []
    assert fair.offer(after, 0).started == [], "room gathers for the large one"
    assert fair.finish(small, 1) == [large]
    assert fair.finish(large, 2) == [after]


def test_without_capacity_nothing_runs_until_there_is_some() -> None:
    fair = queue(tokens=0, requests=0)
    one, two = slot("a"), slot("a")
    assert fair.offer(one, 0).started == fair.offer(two, 0).started == []
    assert fair.resize(150, 5) == [one]
    assert fair.resize(200, 5) == [two]


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (0.5, 4), (1, 2, 5)])
@pytest.mark.parametrize("recent", [False, True])
def test_shares_follow_the_weights_within_a_quantum_and_a_request(
    weights: tuple[float, ...], recent: bool
) -> None:
    """recent: whether there is another tenant that does not wait, so that headroom is kept."""
    quantum, largest, draw = 2000, 1500, random.Random(1)
    fair = queue(6000, 50, queue_quantum=quantum, queue_recent_s=1e4, queue_length_per_tenant=700)
    if recent:
        fair.finish(fair.offer(slot("other"), 0).started[0], 0)
    names = {f"t{place}": weight for place, weight in enumerate(weights)}
    sent: Counter[str] = Counter()
    running: list[QueueSlot] = []
    for name in names:
        for _ in range(700):
            running += fair.offer(slot(name, draw.randint(1, largest), weight=names[name]), 0).started
    for now_s in range(600):
        started = fair.finish(running.pop(draw.randrange(len(running))), now_s)
        running += started
        for each in started:
            sent[each.tenant] += each.cost
        shares = [sent[name] / weight for name, weight in names.items()]
        assert max(shares) - min(shares) <= quantum + 2 * largest / min(weights)
    assert min(sent.values()) > 10 * quantum * min(weights)


def test_tenants_are_charged_for_what_they_used() -> None:
    """One tenant's requests use three times the estimate, so it sends a third of the other one's."""
    fair = queue(1000, 10, queue_quantum=256, queue_length_per_tenant=800)
    sent: Counter[str] = Counter()
    running: list[QueueSlot] = []
    for name in ("honest", "low"):
        for _ in range(800):
            running += fair.offer(slot(name), 0).started
    for _ in range(800):
        ended = running.pop(0)
        running += fair.finish(ended, 0, 300 if ended.tenant == "low" else 100)
        sent[ended.tenant] += 1
    assert 2.8 < sent["honest"] / sent["low"] < 3.2


def test_large_requests_one_at_a_time_win_nothing() -> None:
    """A tenant that always has one request in the queue, of ten quanta, gets its share and no more."""
    fair = queue(20_000, 10, queue_quantum=256)
    sent: Counter[str] = Counter()
    running = [each for _ in range(500) for each in fair.offer(slot("flood"), 0).started]
    running += fair.offer(slot("large", 2560), 0).started
    for now_s in range(4000):
        ended = running.pop(0)
        sent[ended.tenant] += ended.cost
        running += fair.finish(ended, now_s)
        running += fair.offer(slot(ended.tenant, ended.cost), now_s).started
    assert 0.8 < sent["large"] / sent["flood"] < 1.1


def test_one_enormous_number_does_not_turn_the_ring_for_long() -> None:
    fair = queue(1000, 10)
    enormous, later = slot("a", 10**18), slot("a")
    assert fair.offer(enormous, 0).started == [enormous]
    assert fair.offer(later, 0).started == []
    assert fair.finish(enormous, 1, 10**18) == [later]


def test_an_idle_tenant_goes_first_and_uses_the_headroom() -> None:
    fair = queue(tokens=1000, requests=100, queue_headroom=0.2, queue_quantum=256)
    (visit,) = fair.offer(slot("quiet"), 0).started
    fair.finish(visit, 0)
    flood = [slot("flood") for _ in range(20)]
    started = [each for one in flood for each in fair.offer(one, 1).started]
    assert len(started) == 8, "up to the headroom"
    fair.finish(started[0], 2)
    quiet = slot("quiet")
    assert fair.offer(quiet, 2).started == [quiet], "the headroom is for the tenant that was idle"
    assert fair.finish(started[1], 3) == [], "the headroom is filled again first"


@pytest.mark.parametrize(("headroom", "expected"), [(0.125, 4), (0.0, 5)])
def test_a_large_request_leaves_as_much_room_as_it_takes(headroom: float, expected: int) -> None:
    """Five requests of 175 tokens would leave an eighth of 1000, but not 175."""
    fair = queue(tokens=1000, requests=100, queue_headroom=headroom, queue_quantum=256)
    fair.finish(fair.offer(slot("quiet"), 0).started[0], 0)
    assert sum(len(fair.offer(slot("flood", 175), 1).started) for _ in range(10)) == expected


def test_without_other_tenants_nothing_is_kept_free() -> None:
    fair = queue(tokens=1000, requests=100, queue_headroom=0.5, queue_recent_s=10)
    fair.finish(fair.offer(slot("quiet"), 0).started[0], 0)
    assert sum(len(fair.offer(slot("flood", 10), 11).started) for _ in range(150)) == 100
    assert fair.tenants == 1, "the other tenant is forgotten"


def test_more_urgent_requests_go_first_and_others_get_their_share() -> None:
    fair = queue(tokens=100, requests=1, queue_class_share=0.1, queue_length_per_tenant=2000)
    (running,) = fair.offer(slot("a", priority=-5), 0).started
    late = [slot("b", priority=7) for _ in range(30)] + [slot("c", priority=3) for _ in range(30)]
    for each in late:
        fair.offer(each, 0)
    urgent = [slot("a", priority=-5) for _ in range(400)]
    for each in urgent:
        fair.offer(each, 0)
    order: list[int] = []
    for _ in range(220):
        (running,) = fair.finish(running, 0)
        order.append(running.priority)
    counts = Counter(order)
    assert counts == {-5: 200, 3: 10, 7: 10}
    assert order[:10] == [-5] * 10
    gaps = [place for place, priority in enumerate(order) if priority == 7]
    assert max(b - a for a, b in zip(gaps, gaps[1:], strict=False)) <= 22, "the stated bound"


def test_bounds_of_the_queue_name_themselves_and_the_time_to_wait() -> None:
    fair = queue(tokens=100, requests=1, queue_length=4, queue_length_per_tenant=2)
    (running,) = fair.offer(slot("a"), 0).started
    for number in range(1, 11):
        fair.offer(slot("a"), number)
        (running,) = fair.finish(running, number)  # 100 tokens end per second
    fair.offer(slot("a"), 10)
    fair.offer(slot("a"), 10)
    refusal = fair.offer(slot("a"), 10).refusal
    assert refusal is not None
    assert (refusal.status, refusal.code) == (429, "queue_full")
    assert "2 requests of this client wait already" in refusal.message
    assert 2 <= refusal.retry_after <= 4, "three requests of one second each wait"
    for tenant in "bc":
        assert fair.offer(slot(tenant), 10).refusal is None
    refusal = fair.offer(slot("d"), 10).refusal
    assert refusal is not None
    assert "4 requests wait already" in refusal.message
    assert fair.waiting == 4


def test_a_full_queue_still_takes_what_can_run_at_once() -> None:
    fair = queue(tokens=1000, requests=100, queue_headroom=0.2, queue_length=1, queue_quantum=256)
    fair.finish(fair.offer(slot("quiet"), 0).started[0], 0)
    refusals = [fair.offer(slot("flood"), 1).refusal for _ in range(20)]
    assert sum(each is not None for each in refusals) == 11, "eight run, and one waits"
    assert len(fair.offer(slot("quiet"), 1).started) == 1


def test_a_withdrawn_request_makes_room_for_those_behind_it() -> None:
    fair = queue(tokens=1000)
    fair.offer(slot("a", 600), 0)
    large, small = slot("b", 900), slot("b", 100)
    fair.offer(large, 0)
    fair.offer(small, 0)
    assert fair.withdraw(large, 1) == [small]
    assert large.state is State.ENDED


def test_work_per_request_does_not_grow_with_the_number_of_tenants() -> None:
    """The executed lines are counted, as times would depend on the machine."""

    def lines(tenants: int) -> float:
        draw = random.Random(2)
        fair = queue(tokens=5000, requests=50, queue_length=10**6, queue_length_per_tenant=10**6)
        running = []
        for _ in range(4):
            for number in range(tenants):
                running += fair.offer(slot(f"t{number}", draw.randint(1, 20_000)), 0).started
        count = 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        before, ended = sys.gettrace(), 0
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            while running:
                running += fair.finish(running.pop(), 1.0)
                ended += 1
        finally:
            sys.settrace(before)
        return count / ended

    assert lines(400) < 1.3 * lines(20)
