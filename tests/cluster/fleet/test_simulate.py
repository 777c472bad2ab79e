"""A simulated fleet: each request ends once, a seed gives one run, and routing is that of the gateway."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.cluster.fleet import simulate
from fovea.cluster.fleet.front import MODEL, Front, Wanted, load_of
from fovea.cluster.fleet.replica import ReplicaSpec
from fovea.cluster.fleet.report import FleetFigures
from fovea.cluster.fleet.simulate import ROUTES, Conditions, PaperFleet, simulate_paper_fleet
from fovea.cluster.scaling import ScaleSettings
from fovea.core.errors import ConfigError
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.fleet import Fleet
from fovea.gateway.settings import ResilienceSettings
from fovea.planner.cost import CostModel
from tests.cluster.fleet.samples import LOAD, change, paper

HARD = Conditions(preempted=300, notice_s=1, rack=2, rack_lost_at=3, cold_start_s=2, scale_every_s=0.5)
SCALE = ScaleSettings(replicas_min=1, replicas_max=6, target_places=0.1, scale_down_s=2, scale_up_s=0.5)


def check(figures: FleetFigures, requests: int) -> None:
    assert figures.requests == sum(figures.outcomes.values()) <= requests
    counted = sum(sum(moment.outcomes.values()) for moment in figures.timeline)
    assert counted == figures.requests


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(ROUTES), st.integers(1, 5), st.integers(0, 2), st.booleans(), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_every_request_ends_once(
    route: str, replicas: int, encoders: int, hard: bool, scaled: bool, seed: int
) -> None:
    fleet = paper(
        size=Fleet(replicas, encoders), route=route, conditions=HARD if hard else Conditions(),
        scale=SCALE if scaled else None,
    )  # fmt: skip
    load = change(LOAD, requests=120, seed=seed)
    figures = simulate_paper_fleet(fleet, load)
    check(figures, 120)
    if not hard and not scaled:
        assert figures.requests == 120
        assert figures.outcomes["failed"] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_the_same_seed_gives_the_same_figures(route: str) -> None:
    fleet = paper(route=route, conditions=HARD, scale=SCALE)
    one, other = (simulate_paper_fleet(fleet, LOAD) for _ in range(2))
    assert one == other
    assert one != simulate_paper_fleet(fleet, change(LOAD, seed=3))


def test_the_clock_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = []

    class Noted:
        """`heapq`, whose pops are noted."""

        heappush = staticmethod(heapq.heappush)

        @staticmethod
        def heappop(heap: list[Any]) -> Any:
            entry = heapq.heappop(heap)
            moments.append(entry[0])
            return entry

    monkeypatch.setattr("fovea.cluster.fleet.simulate.heapq", Noted)
    simulate_paper_fleet(paper(conditions=HARD), LOAD)
    assert moments == sorted(moments)
    assert len(moments) > LOAD.requests


@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from(["round-robin", "least-busy", "cache-affine", "lod-cost"]))
def test_routing_is_that_of_the_gateways_router(data: st.DataObject, policy: str) -> None:
    """Two fronts see the same events. One keeps its lists, the other asks the router for every request."""
    ours, plain = Front(policy, ResilienceSettings()), Front(policy, ResilienceSettings())
    names = [f"r{number}" for number in range(4)]
    for front in (ours, plain):
        front.update(0.0, names, [])
    now = 0.0
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.0, 0.1, 2.0, 40.0]))
        name = data.draw(st.sampled_from(names))
        event = data.draw(st.sampled_from(["none", "pause", "broken", "drain", "gone", "back", "healthy"]))
        for front in (ours, plain):
            _disturb(front, name, event, now)
        image = data.draw(st.sampled_from(["", "a", "b", "c", "d"]))
        tried = data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
        wanted, load = Wanted(image, "conversation"), load_of(300, 100 * bool(image))
        plain._now = now
        expected = plain.router.choose(MODEL, wanted, load, tried)
        found = ours.choose(wanted, load, now, tried)
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            continue
        assert (found.backend.name, found.reason) == (expected.backend.name, expected.reason)
        for front, choice in ((ours, found), (plain, expected)):
            front.begin(choice.backend, load, now, vision=bool(image))


def _disturb(front: Front, name: str, event: str, now: float) -> None:
    backend = front.fleet.get(name)
    if event == "back":
        front.update(now, [name], [])
    if backend is None:
        return
    if event == "pause":
        front.pause(backend, now + 1.0)
    elif event == "broken":
        for _ in range(5):
            front.unreachable(backend, now)
    elif event == "gone":
        front.update(now, [], [name])
    elif event in ("drain", "healthy"):
        backend.note_check(now, passed=event == "healthy", draining=event == "drain")
        front.changed()


def test_affinity_finds_images_that_round_robin_scatters() -> None:
    load = change(LOAD, requests=1500, images=200)
    found = {route: simulate_paper_fleet(paper(8, route=route), load) for route in ROUTES}
    assert found["cache-affine"].encoder_hits > found["round-robin"].encoder_hits + 0.2
    assert found["cache-affine"].prefix_hits > found["round-robin"].prefix_hits + 0.2
    assert found["events"].encoder_hits >= found["cache-affine"].encoder_hits - 0.02


def test_cost_of_images_helps_where_large_ones_are_among_small_ones() -> None:
    """lod-cost was worse than round-robin here, because it took times to the first byte for speed."""
    cost = CostModel(  # about that of a 7 B on one L40S
        step_s=1.5e-3, decode_s=2e-5, context_s=9.5e-8, token_s=7.2e-5, chunk_s=2e-4, pair_s=2.2e-9,
        image_s=1e-3, visual_s=3.6e-5, visual_pair_s=2.3e-9, slice_s=2e-3, between_s=4e-4,
        read_s=0.0234, row_s=7.8e-5, overlap=4.0, kv_token_bytes=57344, visual_token_bytes=7168,
        max_context=128_000,
    )  # fmt: skip
    spec = ReplicaSpec.of(EngineConfig.of(kv_cache_mib=20_000, embed_cache_mib=1024), cost)
    load = change(
        LOAD, requests=1500, rate=24, images=10**6, zipf=0.0, turns=1.0, text=0.3, system_tokens=200,
        prompt_tokens=60, output_tokens=150, visual_tokens=(64, 64, 64, 64, 256, 256, 8192),
    )  # fmt: skip
    late = {
        route: simulate_paper_fleet(PaperFleet(spec, Fleet(8), route), load).ttft_p99_s
        for route in ("round-robin", "least-busy", "lod-cost")
    }
    assert late["lod-cost"] < 0.9 * late["least-busy"] < late["round-robin"]


def test_a_lost_rack_ends_what_had_begun_and_retries_the_rest() -> None:
    calm = simulate_paper_fleet(paper(8, route="least-busy"), change(LOAD, rate=100))
    lost = simulate_paper_fleet(
        paper(
            8,
            route="least-busy",
            conditions=Conditions(rack=4, rack_lost_at=1.5, cold_start_s=5),
            interval_s=1.0,
        ),
        change(LOAD, rate=100),
    )
    assert calm.outcomes["failed"] == calm.retries == 0
    assert 0 < lost.outcomes["failed"] < 0.3 * lost.requests
    assert lost.retries > 0
    assert min(moment.replicas for moment in lost.timeline) == 4


def test_a_notice_spares_answers() -> None:
    load = change(LOAD, requests=1000, rate=40, output_tokens=60)
    sudden = paper(4, conditions=Conditions(preempted=400, notice_s=0, cold_start_s=1))
    warned = change(sudden, conditions=replace(sudden.conditions, notice_s=3))
    assert simulate_paper_fleet(warned, load).outcomes["failed"] == 0
    assert simulate_paper_fleet(sudden, load).outcomes["failed"] > 0


def test_autoscaling_follows_the_load_within_its_bounds() -> None:
    load = change(LOAD, requests=4000, rate=40, shape="daily", day_s=100, swing=0.9, turns=1)
    scale = replace(SCALE, target_places=0.02)
    fleet = paper(2, scale=scale, conditions=Conditions(cold_start_s=1, scale_every_s=0.5), price_per_h=2.0)
    found = simulate_paper_fleet(change(fleet, interval_s=2.0), load)
    numbers = [moment.replicas for moment in found.timeline]
    assert found.most_replicas <= 6
    assert max(numbers[15:35]) > max(numbers[:4])
    assert numbers[-1] < max(numbers)
    assert found.replica_hours < 6 * found.seconds / 3600
    assert found.cost == pytest.approx(2.0 * found.replica_hours)
    assert found.cost_per_1000 == pytest.approx(1000 * 2.0 * found.replica_hours / found.good)


def test_encoders_apart_encode_all_images() -> None:
    found = simulate_paper_fleet(paper(size=Fleet(3, 2)), LOAD)
    world = simulate._World(paper(size=Fleet(3, 2)), LOAD)
    world.serve()
    assert sum(server.replica.encoded for server in world._servers.values()) == 0
    assert sum(one.images for one in world._encoders.values()) == found.images_encoded > 0
    assert all(peer.pending == 0 for peer in world._encoding.peers)


def test_outstanding_work_is_counted_down_to_nothing() -> None:
    world = simulate._World(paper(conditions=HARD), LOAD)
    world.serve()
    for one in world._front.fleet:
        assert (one.requests, one.tokens, one.begun, one.begun_text, one.begun_visual) == (0, 0, 0, 0, 0)
    assert not world._flights


def test_a_fleet_without_a_price_has_no_cost() -> None:
    found = simulate_paper_fleet(paper(), LOAD)
    assert found.cost is found.cost_per_1000 is None
    assert found.as_dict()["goodput"] == found.goodput > 0
    assert math.isclose(found.share("good") + found.share("late"), 1.0)


def test_an_unknown_route() -> None:
    with pytest.raises(ConfigError, match="route is 'random'; accepted: round-robin, least-busy"):
        PaperFleet(paper().spec, Fleet(1), "random")
