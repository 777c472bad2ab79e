"""One sticky value gets one variant, weights are kept, and a changed weight moves no more than it has to."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.experiments.config import Experiment, Shadow, Variant
from fovea.gateway.experiments.experiments import Splitter
from tests.gateway.experiments.support import NEW, NEXT, OLD, an_experiment

USERS = [f"user-{number}" for number in range(4000)]
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=2, max_size=5)


def weighted(weights: list[float], name: str = "v2") -> Experiment:
    variants = tuple(Variant(f"variant-{i}", f"model-{i}", weight) for i, weight in enumerate(weights))
    return an_experiment(name=name, variants=variants)


def chosen(experiment: Experiment, users: list[str] = USERS, removed: tuple[str, ...] = ()) -> list[str]:
    splitter = Splitter(experiment, removed)
    return [splitter.choose(user).name for user in users]


def test_shares_follow_the_weights() -> None:
    counts = Counter(chosen(weighted([60, 30, 10])))
    for name, share in (("variant-0", 0.6), ("variant-1", 0.3), ("variant-2", 0.1)):
        assert abs(counts[name] / len(USERS) - share) < 0.03


@given(WEIGHTS, st.text())
def test_the_choice_depends_on_the_value_alone(weights: list[float], user: str) -> None:
    assert chosen(weighted(weights), [user]) == chosen(weighted(weights), [user])


@given(WEIGHTS, st.floats(1.1, 20))
def test_a_heavier_variant_takes_requests_from_others_and_gives_none(
    weights: list[float], factor: float
) -> None:
    users = USERS[:300]
    before = chosen(weighted(weights), users)
    after = chosen(weighted([weights[0] * factor, *weights[1:]]), users)
    assert {new for old, new in zip(before, after, strict=True) if old != new} <= {"variant-0"}


def test_no_more_than_the_necessary_share_moves() -> None:
    before, after = chosen(weighted([90, 10])), chosen(weighted([80, 20]))
    moved = sum(old != new for old, new in zip(before, after, strict=True)) / len(USERS)
    assert abs(moved - 0.1) < 0.02


@given(WEIGHTS)
def test_requests_of_a_removed_variant_move_and_no_others(weights: list[float]) -> None:
    experiment, users = weighted(weights), USERS[:300]
    before, after = chosen(experiment, users), chosen(experiment, users, ("variant-1",))
    assert "variant-1" not in after
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "variant-1")


def test_order_in_the_file_does_not_matter() -> None:
    assert chosen(an_experiment(variants=(OLD, NEW, NEXT))) == chosen(
        an_experiment(variants=(NEXT, NEW, OLD))
    )


def test_splits_of_two_experiments_are_independent() -> None:
    pairs = Counter(zip(chosen(weighted([1, 1], "a")), chosen(weighted([1, 1], "b")), strict=True))
    assert all(abs(count / len(USERS) - 0.25) < 0.04 for count in pairs.values())
    assert len(pairs) == 4


def test_a_shadow_and_a_variant_of_weight_0_get_no_requests() -> None:
    experiment = an_experiment(variants=(OLD, Variant("off", "vlm-4", 0.0), NEXT), shadow=Shadow("next"))
    assert set(chosen(experiment)) == {"old"}
