"""A coarse replica: everything that it accepts ends once, in time, and within its memory."""

from __future__ import annotations

import heapq
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.cluster.fleet.replica import SYSTEM, Lru, Replica, ReplicaSpec, Request
from fovea.engine.config import EngineConfig
from fovea.planner.cost import Composition, CostModel, pairs_of
from tests.cluster.fleet.samples import SPEC, change


def request(number: int = 0, **fields: Any) -> Request:
    values: dict[str, Any] = {
        "conversation": f"c{number}", "image": "", "system": 0, "visual": 0, "history": 0, "text": 40,
        "output": 10, "arrival": 0.0,
    }  # fmt: skip
    return Request(**values | fields)


def serve(replica: Replica, requests: list[Request]) -> list[float]:
    """Send requests at their arrivals, and return the times at which the replica was woken."""
    arrivals = [(one.arrival, number) for number, one in enumerate(requests)]
    heapq.heapify(arrivals)
    moments = []
    while arrivals or replica.wake_at < math.inf:
        if arrivals and arrivals[0][0] < replica.wake_at:
            at, number = heapq.heappop(arrivals)
            if replica.accepts(requests[number]):
                replica.submit(requests[number], at)
            continue
        moments.append(replica.wake_at)
        replica.wake(replica.wake_at)
        assert replica.outputs.used <= SPEC.output_bytes
        assert replica.prefixes.used <= replica.prefixes.capacity <= SPEC.kv_tokens
    return moments


REQUESTS = st.lists(
    st.builds(
        lambda number, image, text, output, arrival: request(
            number, image=image, visual=128 * bool(image), text=text, output=output, arrival=arrival,
            system=32,
        ),
        st.integers(0, 9), st.sampled_from(["", "a", "b", "c"]), st.integers(1, 3000), st.integers(1, 200),
        st.floats(0, 2),
    ),
    max_size=30,
)  # fmt: skip


@settings(deadline=None)
@given(REQUESTS, st.sampled_from([0.0, 2.5]), st.integers(1, 5))
def test_all_that_is_accepted_ends_once_and_in_order(requests: list[Request], pace: float, most: int) -> None:
    spec = change(SPEC, pace=pace, max_running=most, max_in_flight=20, kv_tokens=8192)
    replica = Replica(spec, "r")
    moments = serve(replica, requests)
    assert moments == sorted(moments)
    assert not replica.unfinished
    assert replica.queued_s == pytest.approx(0, abs=1e-9)
    for one in requests:
        if one.last < math.inf:
            assert one.arrival < one.first <= one.last
            assert one.left == 0
            assert one.cached < one.prompt
    assert replica._taken == replica._context == replica._waiting == 0


def test_one_request_takes_the_time_of_its_steps() -> None:
    cost = CostModel()
    replica, one = Replica(SPEC, "r"), request(text=100, output=50)
    serve(replica, [one])
    first = cost.step(Composition(0, 0, 100, 1, pairs_of(0, 100)))
    assert one.first == pytest.approx(first)
    decodes = sum(cost.step(Composition(1, 101 + step)) + cost.between_s for step in range(49))
    assert one.last == pytest.approx(first + decodes)


def test_a_request_joins_after_the_step_that_runs() -> None:
    replica, long, late = Replica(SPEC, "r"), request(output=500), request(1, arrival=0.05)
    serve(replica, [long, late])
    assert late.first - late.arrival < 0.02
    assert long.last > late.last


def test_an_image_is_encoded_once_for_all_that_wait() -> None:
    replica = Replica(SPEC, "r")
    requests = [request(number, image="a", visual=256) for number in range(5)]
    serve(replica, requests)
    assert replica.encoded == 1
    assert [one.fresh for one in requests] == [True, False, False, False, False]
    assert [one.cached for one in requests] == [0, 256, 256, 256, 256]
    assert "a" in replica.holdings
    assert "b" not in replica.holdings


def test_a_further_question_finds_its_conversation() -> None:
    replica, first = Replica(SPEC, "r"), request(image="a", visual=256, system=64)
    serve(replica, [first])
    second = request(image="a", visual=256, system=64, history=first.prompt + 10, arrival=5.0)
    serve(replica, [second])
    assert second.cached == (first.prompt + 10 - 1) // 16 * 16
    replica.prefixes.shrink(0)
    third = request(image="a", visual=256, system=64, history=first.prompt + 10, arrival=9.0)
    serve(replica, [third])
    assert third.cached == 0
    assert not third.fresh  # the output of the encoder is cached still


def test_the_queue_is_bounded_and_a_prompt_must_fit() -> None:
    replica = Replica(change(SPEC, max_in_flight=2), "r")
    for number in range(2):
        assert replica.accepts(request(number))
        replica.submit(request(number), 0.0)
    assert not replica.accepts(request(3))
    assert not Replica(SPEC, "r").accepts(request(text=SPEC.cost.max_context, output=1))


def test_what_was_not_ended_is_lost() -> None:
    replica, one = Replica(SPEC, "r"), request()
    replica.submit(one, 0.0)
    assert replica.kill() == [one]
    assert not replica.accepts(request(1))
    assert replica.wake_at == math.inf


def test_signals_tell_the_work_that_waits() -> None:
    replica, one = Replica(SPEC, "r"), request(image="a", visual=256)
    replica.submit(one, 1.0)
    signals = replica.signals(3.0, 0.9)
    cost = SPEC.cost
    assert signals.queued_s == pytest.approx(one.work_s)
    assert signals.queued_s > cost.image(256)
    assert signals.oldest_s == 3.0
    assert (signals.in_flight, signals.good, signals.places) == (1, 0.9, 64.0)


def test_a_cache_drops_the_least_recently_used() -> None:
    cache = Lru(10)
    for key in "abc":
        cache.put(key, 3)
    cache.touch("a")
    cache.put("d", 4)
    assert [key in cache for key in "abcd"] == [True, False, True, True]
    cache.put("e", 11)
    assert len(cache) == cache.used == 0


def test_abilities_follow_from_the_settings_of_an_engine() -> None:
    spec = ReplicaSpec.of(EngineConfig.of(kv_blocks=100, max_running=8, max_queue=2, pace=3), CostModel())
    assert spec.kv_tokens == 1600
    assert (spec.max_running, spec.max_in_flight, spec.pace) == (8, 10, 3)
    assert SYSTEM not in Replica(spec, "r").prefixes
