"""Slow backends are ejected, but never too many, and not for noise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.backends.backend import Backend
from fovea.gateway.backends.watch import LEAST_SAMPLES, LONGEST, eject_outliers
from fovea.gateway.settings import ResilienceSettings
from tests.gateway.samples import backend

SETTINGS = ResilienceSettings()


def measured(*seconds: float | None) -> list[Backend]:
    """Backends with these times to the first byte; None: it has answered nothing yet."""
    made = []
    for number, each in enumerate(seconds):
        one = backend(f"b{number}")
        if each is not None:
            for _ in range(LEAST_SAMPLES):
                one.note_first_byte(each)
        made.append(one)
    return made


def names(ejected: list[Backend]) -> list[str]:
    return [one.name for one in ejected]


def test_the_slow_one_is_ejected() -> None:
    fleet = measured(0.2, 0.2, 0.21, 0.7)
    assert names(eject_outliers(fleet, SETTINGS, 100.0)) == ["b3"]
    assert fleet[3].why_not(129.0, vision=False) == "ejected"
    assert fleet[3].accepts(131.0, vision=False)
    assert eject_outliers(fleet, SETTINGS, 101.0) == []


def test_the_slowest_goes_first() -> None:
    assert names(eject_outliers(measured(0.1, 0.1, 0.1, 2.0, 9.0), SETTINGS, 0.0)) == ["b4", "b3"]
    assert names(eject_outliers(measured(0.1, 0.1, 0.1, 2.0, 9.0, 8.0), SETTINGS, 0.0)) == ["b4", "b5", "b3"]


def test_noise_is_ignored() -> None:
    assert eject_outliers(measured(0.001, 0.001, 0.001, 0.05), SETTINGS, 0.0) == []
    assert names(eject_outliers(measured(0.001, 0.001, 0.001, 0.052), SETTINGS, 0.0)) == ["b3"]


def test_less_than_the_factor_is_usual() -> None:
    assert eject_outliers(measured(1.0, 1.0, 1.0, 2.99), SETTINGS, 0.0) == []


def test_unknown_times_are_not_judged() -> None:
    assert eject_outliers(measured(None, 9.0), SETTINGS, 0.0) == []
    assert eject_outliers(measured(9.0), SETTINGS, 0.0) == []
    assert eject_outliers([], SETTINGS, 0.0) == []
    few = measured(0.1, 0.1, None)
    for _ in range(LEAST_SAMPLES - 1):
        few[2].note_first_byte(9.0)
    assert eject_outliers(few, SETTINGS, 0.0) == []


def test_it_can_be_turned_off() -> None:
    assert eject_outliers(measured(0.1, 0.1, 9.0), ResilienceSettings(outlier_factor=0), 0.0) == []
    assert eject_outliers(measured(0.1, 0.1, 9.0), ResilienceSettings(max_ejected=0), 0.0) == []


def test_a_repeated_ejection_lasts_longer_up_to_a_bound() -> None:
    fleet = measured(0.1, 0.1, 0.1, 0.1)
    slow, now, lengths = fleet[3], 0.0, []
    for _ in range(LONGEST + 3):
        for _ in range(LEAST_SAMPLES):
            slow.note_first_byte(5.0)
        slow.first_bytes.extend([5.0] * 64)
        assert eject_outliers(fleet, SETTINGS, now) == [slow]
        lengths.append(slow.ejected_until - now)
        now = slow.ejected_until + SETTINGS.slow_start_s  # before, its caches are cold
    assert lengths == [30.0 * min(number, LONGEST) for number in range(1, LONGEST + 4)]


def test_it_comes_back_with_a_part_of_its_weight() -> None:
    fleet = measured(0.1, 0.1, 0.1, 9.0)
    eject_outliers(fleet, SETTINGS, 0.0)
    back = fleet[3].ejected_until
    assert fleet[3].weight(back) < 0.2
    assert fleet[3].weight(back + 30) == 1.0


@given(
    st.lists(st.none() | st.floats(0.001, 20), max_size=9),
    st.sets(st.integers(0, 8)),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_never_more_than_the_allowed_part(
    seconds: list[float | None], already: set[int], most: float
) -> None:
    settings, fleet = ResilienceSettings(max_ejected=most), measured(*seconds)
    for number in already:
        if number < len(fleet):
            fleet[number].ejected_until = 50.0
    before = sum(one.ejected_until > 10.0 for one in fleet)
    ejected = eject_outliers(fleet, settings, 10.0)
    away = sum(one.ejected_until > 10.0 for one in fleet)
    assert away == before + len(ejected)
    assert not ejected or away <= most * len(fleet)
    assert all(one.median_first_byte(1) is None for one in ejected)
