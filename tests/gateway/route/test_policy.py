"""Policies: all choose from the candidates, and each keeps its own promise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import ConfigError
from fovea.gateway.backends.backend import Backend, Load
from fovea.gateway.backends.route import Choice, Situation, make_policy, order
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.settings import POLICIES, RouteSettings
from tests.gateway.samples import backend, backends, busy, demand

SETTINGS = RouteSettings()


def situation(
    candidates: Sequence[Backend],
    given: Demand | None = None,
    *,
    members: Sequence[Backend] = (),
    load: Load | None = None,
    now: float = 0.0,
) -> Situation:
    return Situation(candidates, members or candidates, "m", given or demand(), load or Load(100, 0), now, 1)


def affine(among: Sequence[Backend], given: Demand, **options: Any) -> Choice:
    return make_policy("cache-affine", options.pop("settings", SETTINGS))(situation(among, given, **options))


def first_of(given: Demand, among: Sequence[Backend]) -> str:
    return order(next(given.keys())[1], [(one.name, one.config.weight) for one in among])[0]


STATES = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 20), st.integers(0, 5000), st.integers(0, 5000),
        st.sampled_from([0.001, 0.5, 1.0, 7.0]), st.integers(0, 2), st.booleans(),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(st.sampled_from(POLICIES), STATES, st.text(max_size=5), st.integers(0, 9999), st.integers(0, 9999))
def test_all_policies_choose_only_candidates(
    name: str, states: list[Any], key: str, text: int, visual: int
) -> None:
    members = []
    for number, (_, requests, tokens, pixels, weight, priority, cold) in enumerate(states):
        one = backend(f"b{number}", weight=weight, priority=priority, max_requests=number)
        one.requests, one.text, one.visual = requests, tokens, pixels
        if cold:
            one.come_back(100.0)
        members.append(one)
    candidates = [one for one, state in zip(members, states, strict=True) if state[0]] or members
    policy = make_policy(name, SETTINGS)
    seen = [
        policy(situation(candidates, demand("x", key), members=members, load=Load(text, visual), now=100.0))
        for _ in range(4)
    ]
    assert all(choice.backend in candidates for choice in seen)
    assert all(choice.reason and choice.reason.isascii() for choice in seen)
    assert name == "round-robin" or len(set(seen)) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_made(name: str) -> None:
    assert make_policy(name, SETTINGS)(situation(backends(1))).backend.name == "b0"


def test_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="'fastest'; accepted: cache-affine, least-busy") as caught:
        make_policy("fastest", SETTINGS)
    assert caught.value.param == "policy"


def test_the_least_busy_for_its_weight() -> None:
    light, heavy = backend("light"), backend("heavy", weight=4.0)
    busy(light, 100)
    busy(heavy, 300)
    assert make_policy("least-busy", SETTINGS)(situation([light, heavy])).backend is heavy


def test_one_image_goes_to_one_backend() -> None:
    among, policy = backends(4), make_policy("cache-affine", SETTINGS)
    for number in range(50):
        given = demand(f"question {number}", f"image {number % 5}")
        choice = policy(situation(among, given))
        assert choice == Choice(choice.backend, "image")
        assert choice.backend.name == first_of(given, among)


def test_a_session_goes_to_one_backend_and_so_does_a_conversation() -> None:
    among = backends(4)
    named = [affine(among, demand(str(number), session="talk")) for number in range(10)]
    assert {choice.reason for choice in named} == {"session"}
    assert len({choice.backend.name for choice in named}) == 1
    assert affine(among, demand("hello")).reason == "prefix"


def test_a_backend_that_is_away_moves_only_its_own_keys() -> None:
    among = backends(4)
    for number in range(200):
        given = demand("x", f"image {number}")
        all_there, first_away = affine(among, given), affine(among[1:], given, members=among)
        if all_there.backend.name == "b0":
            assert first_away.reason == "image, next"
        else:
            assert first_away == all_there


def test_the_overflow_of_one_image_goes_to_one_place() -> None:
    among, given = backends(4), demand("x", "popular")
    names = order("popular", [(one.name, 1.0) for one in among])
    by_name = {one.name: one for one in among}
    for _ in range(SETTINGS.busy_requests):
        assert affine(among, given).backend.name == names[0]
        busy(by_name[names[0]], 1000)
    assert affine(among, given) == Choice(by_name[names[1]], "image, next")


@given(st.integers(0, 10_000), st.sampled_from([1.0, 1.25, 2.0]), st.sampled_from([0, 2, 8]), st.booleans())
def test_loads_are_bounded(seed: int, balance: float, free: int, weighted: bool) -> None:
    """No backend gets more than `balance` times its part of the work, besides its free requests."""
    settings = RouteSettings(balance=balance, busy_requests=free)
    policy, random_ = make_policy("cache-affine", settings), random.Random(seed)
    among = [backend(f"b{number}", weight=1.0 + number * weighted) for number in range(4)]
    running: list[tuple[Backend, Load]] = []
    for _ in range(60):
        load = Load(random_.randint(1, 500), random_.choice([0, 400]))
        given = demand("x", f"image {random_.choice([0, 0, 0, 1, 2])}")
        chosen, reason = policy(situation(among, given, load=load))
        total = sum(one.tokens for one in among) + load.tokens
        part = total * chosen.config.weight / sum(one.config.weight for one in among)
        within = chosen.tokens + load.tokens <= balance * part * (1 + 1e-9)
        assert within or chosen.requests < free or reason == "image, all busy"
        if reason == "image, all busy":
            assert all(one.tokens + load.tokens > 0.999 * balance * total * one.config.weight / sum(
                each.config.weight for each in among) for one in among)  # fmt: skip
        chosen.begin(load, 0.0, vision=True)
        running.append((chosen, load))
        if random_.random() < 0.5:
            ended, load = running.pop(random_.randrange(len(running)))
            ended.end(load)


def test_if_all_are_too_busy_the_least_busy_one_is_taken() -> None:
    among = backends(2)
    for one, tokens in zip(among, (5000, 4000), strict=True):
        for _ in range(SETTINGS.busy_requests):
            busy(one, tokens)
    choice = affine(among, demand("x", "i"), load=Load(1_000_000, 0))
    assert choice == Choice(among[1], "image, all busy")


def test_a_backend_that_came_back_gets_a_smaller_part() -> None:
    cold, warm = backend("cold"), backend("warm")
    cold.come_back(0.0)
    policy, settled = make_policy("cache-affine", SETTINGS), Counter[str]()
    for number in range(400):
        chosen = policy(situation([cold, warm], demand("x", f"image {number}"))).backend
        busy(chosen, 100)
        settled[chosen.name] += 1
    assert settled["cold"] < 0.2 * settled.total()


def test_lod_cost_counts_visual_tokens_more() -> None:
    images, texts = backend("images"), backend("texts")
    busy(images, 0, visual=1000)
    busy(texts, 1500)
    policy = make_policy("lod-cost", SETTINGS)
    assert policy(situation([images, texts])).backend is texts
    assert make_policy("least-busy", SETTINGS)(situation([images, texts])).backend is images
    cheap = make_policy("lod-cost", RouteSettings(visual_cost=1.0))
    assert cheap(situation([images, texts])).backend is images


def test_lod_cost_counts_images_until_their_answer_begins() -> None:
    """least-busy passes over a backend that streams about a large document, though it is free."""
    streaming, encoding = backend("streaming"), backend("encoding")
    document, thumbnail = Load(300, 4096), Load(300, 64)
    for one, load in ((streaming, document), (encoding, thumbnail)):
        one.begin(load, 0.0, vision=True)
    streaming.begin_answer(document)
    both = situation([streaming, encoding])
    assert make_policy("lod-cost", SETTINGS)(both).backend is streaming
    assert make_policy("least-busy", SETTINGS)(both).backend is encoding
    streaming.end(document, begun=True)
    assert (streaming.begun, streaming.begun_text, streaming.begun_visual, streaming.tokens) == (0, 0, 0, 0)


def test_lod_cost_goes_by_weights_and_never_by_times() -> None:
    slow, fast = backend("slow"), backend("fast", weight=2.0)
    for one in (slow, fast):
        one.note_first_byte(0.1 if one is slow else 5.0)
    policy = make_policy("lod-cost", SETTINGS)
    assert policy(situation([slow, fast])).backend is fast
    busy(fast, 150)
    assert policy(situation([slow, fast])).backend is slow


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5), (0.5, 1.5)])
def test_round_robin_follows_the_weights_exactly(weights: tuple[float, ...]) -> None:
    among = [backend(f"b{number}", weight=weight) for number, weight in enumerate(weights)]
    policy, rounds = make_policy("round-robin", SETTINGS), 40
    chosen = [policy(situation(among)).backend for _ in range(int(sum(weights)) * rounds)]
    found = Counter(one.name for one in chosen)
    assert [found[one.name] for one in among] == [weight * rounds for weight in weights]


def test_round_robin_goes_on_while_one_is_away() -> None:
    among, policy = backends(3), make_policy("round-robin", SETTINGS)
    found = Counter(policy(situation(among[:2])).backend.name for _ in range(100))
    assert found == {"b0": 50, "b1": 50}
    found = Counter(policy(situation(among)).backend.name for _ in range(300))
    assert max(found.values()) - min(found.values()) <= 2


def test_the_smallest_priority_is_used_until_it_is_full() -> None:
    first = [backend("a", priority=1, max_requests=2), backend("b", priority=1, max_requests=1)]
    second = [backend("c", priority=5)]
    among, policy = [*second, *first], make_policy("priority", SETTINGS)
    seen = []
    for _ in range(5):
        choice = policy(situation(among))
        busy(choice.backend, 10)
        seen.append((choice.backend.name, choice.reason))
    assert sorted(seen[:3]) == [("a", "priority 1"), ("a", "priority 1"), ("b", "priority 1")]
    assert seen[3:] == [("c", "priority 5")] * 2


def test_if_all_priorities_are_full_the_least_busy_is_taken() -> None:
    among = [backend("a", max_requests=1), backend("b", priority=1, max_requests=1)]
    busy(among[0], 100)
    busy(among[1], 10)
    assert make_policy("priority", SETTINGS)(situation(among)) == Choice(among[1], "priority, all full")
    endless = make_policy("priority", RouteSettings(requests_per_backend=0))
    plain = [backend("a"), backend("b", priority=1)]
    for _ in range(2000):
        busy(plain[0], 1)
    assert endless(situation(plain)).backend is plain[0]


def test_a_backend_that_holds_the_image_goes_before_the_order() -> None:
    among, given = backends(6), demand("x", "image")
    names = order("image", [(one.name, one.config.weight) for one in among])
    by_name = {one.name: one for one in among}
    first, third, last = (by_name[names[place]] for place in (0, 2, 5))
    assert affine(among, given) == (first, "image")
    third.holdings, last.holdings = {"image"}, {"image", "other"}
    assert affine(among, given) == (third, "image, held")
    third.holdings = {"other"}
    assert affine(among, given) == (last, "image, held")
    first.holdings = {"image"}
    assert affine(among, given) == (first, "image")
    first.holdings = last.holdings = frozenset()
    assert affine(among, given) == (first, "image")


def test_a_holder_that_is_too_busy_is_passed_over() -> None:
    among, given = backends(4), demand("x", "image")
    names = order("image", [(one.name, one.config.weight) for one in among])
    by_name = {one.name: one for one in among}
    holder = by_name[names[2]]
    holder.holdings = {"image"}
    for _ in range(SETTINGS.busy_requests):
        busy(holder, 1000)
    assert affine(among, given) == (by_name[names[0]], "image")
