"""A gateway process chooses, counts, takes ratings, bounds copies, and follows decisions of others."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.gateway.experiments.config import Experiment, Shadow, Variant
from fovea.gateway.experiments.experiments import Assignment, Experiments
from fovea.gateway.experiments.statistics import Statistics, rating_of
from fovea.gateway.experiments.store import Store
from tests.gateway.experiments.support import NEW, NEXT, OLD, a_config, an_experiment, an_outcome

SHADOWED = an_experiment(variants=(OLD, NEW, NEXT), shadow=Shadow("next", share=0.25, in_flight=2))


class Clock:
    """Seconds of the epoch that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gateway:
    """Makes the experiments of several processes with one state file and one clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Clock()
        self.opened: list[Experiments] = []

    def __call__(self, *experiments: Experiment, **values: Any) -> Experiments:
        made = Experiments(a_config(self.folder, *experiments, **values), clock=self.clock)
        self.opened.append(made)
        return made

    @property
    def store(self) -> Store:
        return self.opened[0]._store


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path)
    yield made
    for each in made.opened:
        each.close()


def answer(experiments: Experiments, count: int, prefix: str = "", **values: Any) -> Counter[str]:
    """Answer requests of as many users. Returns how many each variant got."""
    counts: Counter[str] = Counter()
    for number in range(count):
        assignment = experiments.choose("vlm", None, f"user-{number}")
        assert assignment is not None
        counts[assignment.variant] += 1
        experiments.record(assignment, an_outcome(number, request_id=f"{prefix}{number}", **values))
    return counts


def test_a_model_without_an_experiment(gateway: Gateway) -> None:
    experiments = gateway()
    assert experiments.choose("other", None, "user") is None
    assert experiments.shadow("other") is None
    assert experiments.of("other") is None
    assert experiments.of("vlm") == an_experiment()


def test_processes_choose_alike(gateway: Gateway) -> None:
    first, second = gateway(), gateway()
    for number in range(50):
        assert first.choose("vlm", None, f"user-{number}") == second.choose("vlm", None, f"user-{number}")
    assert first.choose("vlm", None, "user-1") == Assignment("v2", "old", "vlm-1", "split", 0)


def test_requests_without_a_sticky_value_are_drawn_one_by_one(gateway: Gateway) -> None:
    experiments = gateway(an_experiment(variants=(Variant("old", "a", 1.0), Variant("new", "b", 1.0))))
    chosen = [experiments.choose("vlm", None, None) for _ in range(200)]
    counts = Counter(each.variant for each in chosen if each is not None)
    assert 60 < counts["new"] < 140


def test_a_header_names_the_variant_and_the_request_does_not_count(gateway: Gateway) -> None:
    experiments = gateway()
    assignment = experiments.choose("vlm", "new", "user-1")
    assert assignment == Assignment("v2", "new", "vlm-2", "header", 0)
    experiments.record(assignment, an_outcome(request_id="r"))
    experiments.flush()
    assert gateway.store.sums("v2") == {}
    assert not experiments.rate("r", 5)
    with pytest.raises(InvalidRequest, match="x-experiment is 'newer'; accepted: old, new, or no header"):
        experiments.choose("vlm", "newer", "user-1")


def test_all_processes_count_into_one_sum(gateway: Gateway) -> None:
    first, second = gateway(), gateway()
    counts = answer(first, 200) + answer(second, 300)
    for each in (first, second, first):
        each.flush()
    sums = gateway.store.sums("v2")
    assert {name: each.requests for name, each in sums.items()} == counts
    together = Statistics()
    for each in sums.values():
        together.merge(each)
    assert together.count("completion_tokens") == 500 * 80
    assert sum(together.histogram("latency").values()) == 500
    assert together.percentile("ttft", 50) == pytest.approx(0.25, rel=0.02)


def test_sums_that_could_not_be_written_are_kept(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = gateway(recent_requests=30)
    answer(experiments, 20)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "add", fail)
        with pytest.raises(sqlite3.OperationalError):
            experiments.flush()
        answer(experiments, 15, "more-")
        with pytest.raises(sqlite3.OperationalError):
            experiments.flush()
    experiments.flush()
    assert sum(each.requests for each in gateway.store.sums("v2").values()) == 35


def test_any_process_takes_ratings_and_the_last_one_counts(gateway: Gateway) -> None:
    first, second = gateway(), gateway()
    (variant,) = answer(first, 1, "a")
    assert first.rate("a0", 2), "its own request is known at once"
    assert second.rate("a0", 5)
    assert not second.rate("unknown", 5)
    sums = gateway.store.sums("v2")[variant]
    assert (sums.rating, sums.ratings) == (5.0, 1)


def test_old_requests_cannot_be_rated_any_more(gateway: Gateway) -> None:
    experiments = gateway(recent_requests=10)
    answer(experiments, 20)
    experiments.flush()
    kept = [experiments.rate(str(number), 4) for number in range(20)]
    assert kept.count(True) == 10


@pytest.mark.parametrize(
    ("value", "rating"),
    [(1, 1), (5, 5), ("up", 5), ("down", 1), (0, None), (6, None), (True, None), (4.5, None), ("5", None)],
)  # fmt: skip
def test_accepted_ratings(value: object, rating: int | None) -> None:
    assert rating_of(value) == rating


def test_copies_are_a_share_of_the_requests_and_bounded(gateway: Gateway) -> None:
    experiments = gateway(SHADOWED)
    copies = [experiments.shadow("vlm") for _ in range(12)]
    assert [number for number, each in enumerate(copies, 1) if each is not None] == [4, 8]
    assert copies[3] == Assignment("v2", "next", "vlm-3", "shadow", 0)
    experiments.record(copies[3], an_outcome(request_id="copy"))
    assert experiments.shadow("vlm") is not None, "the next copy was due and there is a place"
    experiments.drop(copies[7])
    assert sum(experiments.shadow("vlm") is not None for _ in range(8)) == 1, "one place is left"
    experiments.flush()
    assert gateway.store.sums("v2")["next"].requests == 1
    assert not experiments.rate("copy", 5), "nobody sees the answer of a copy"


def test_all_processes_follow_a_decision(gateway: Gateway) -> None:
    first, second = gateway(), gateway()
    gateway.store.promote("v2", "new", "a person", 5.0)
    for each in (first, second):
        each.sync()
        assert each.choose("vlm", None, "user-1") == Assignment("v2", "new", "vlm-2", "promoted", 0)
        assert each.choose("vlm", "old", "user-1") == Assignment("v2", "old", "vlm-1", "header", 0)
    assert answer(first, 10) == {"new": 10}
    gateway.store.end("v2", "a person", 6.0)
    first.sync()
    assert first.choose("vlm", None, "user-1") == Assignment("v2", "old", "vlm-1", "rolled_back", 0)
    assert gateway.store.sums("v2") == {}, "a decided experiment counts nothing"


def test_a_variant_that_fails_is_rolled_back_by_one_process_for_all(gateway: Gateway) -> None:
    experiment = an_experiment(variants=(Variant("old", "a", 1.0), Variant("new", "b", 1.0)))
    first, second = gateway(experiment), gateway(experiment)
    for number in range(300):
        assignment = first.choose("vlm", None, f"user-{number}")
        assert assignment is not None
        failed = assignment.variant == "new" and number % 2 == 0
        first.record(assignment, an_outcome(number, failed=failed))
    first.sync()
    second.sync()
    state = gateway.store.states()["v2"]
    assert state.state == "rolled_back"
    assert state.removed == ("new",)
    assert state.reason.startswith("automatic: new: guard rail errors: certainly above 0.05")
    assert set(answer(second, 50)) == {"old"}
    with pytest.raises(InvalidRequest, match="accepted: old, or no header"):
        second.choose("vlm", "new", "user-1")


def test_guard_rails_are_checked_in_turn(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = gateway(check_s=5.0), gateway(check_s=5.0)
    checks: list[str] = []
    monkeypatch.setattr(Experiments, "verdicts", lambda self, name: checks.append(name) or ())
    for now in (1000.0, 1002.0, 1004.9, 1005.0, 1006.0):
        gateway.clock.now = now
        first.sync()
        second.sync()
    assert checks == ["v2", "v2"]


def test_a_removed_shadow_gets_no_copies(gateway: Gateway) -> None:
    experiments = gateway(SHADOWED)
    gateway.store.roll_back("v2", ["next"], "slow", 5.0)
    experiments.sync()
    assert [experiments.shadow("vlm") for _ in range(8)] == [None] * 8
    assert set(answer(experiments, 100)) == {"old", "new"}


def test_late_sums_do_not_count_after_a_reset(gateway: Gateway) -> None:
    first, second = gateway(), gateway()
    answer(first, 50)
    first.flush()
    answer(second, 50)
    gateway.store.reset("v2", "again", 5.0)
    second.flush()
    assert gateway.store.sums("v2") == {}
    second.sync()
    answer(second, 20)
    second.flush()
    assert sum(each.requests for each in gateway.store.sums("v2").values()) == 20


def test_a_process_with_old_variants_does_not_count_into_new_ones(gateway: Gateway) -> None:
    old = gateway()
    gateway.store.reset("v2", "again", 5.0)
    gateway(an_experiment(variants=(OLD, Variant("new", "vlm-9", 10.0))))
    old.sync()
    answer(old, 30)
    old.flush()
    assert gateway.store.sums("v2") == {}


def test_changed_variants_stop_the_start(gateway: Gateway) -> None:
    gateway()
    with pytest.raises(ConfigError, match="accepted: another name"):
        gateway(an_experiment(variants=(OLD, NEXT)))


def eventually(holds: Callable[[], bool]) -> bool:
    """Wait for something that another thread does."""
    for _ in range(500):
        if holds():
            return True
        time.sleep(0.02)
    return False


def test_the_thread_writes_and_follows_and_survives_errors(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    experiments = gateway(flush_s=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "states", lambda: 1 // 0)
        experiments.start()
        assert eventually(lambda: "could not be updated" in caplog.text)
    answer(experiments, 10)
    assert eventually(lambda: sum(each.requests for each in gateway.store.sums("v2").values()) == 10)
    gateway.store.promote("v2", "new", "a person", 5.0)
    assert eventually(lambda: set(answer(experiments, 5)) == {"new"})
