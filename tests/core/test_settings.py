"""Declared settings: which values are accepted, what an error names, and how subjects nest."""

from __future__ import annotations

import math
from dataclasses import MISSING, FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.core.settings import (
    build_settings,
    check_settings,
    flat_values,
    inner_type,
    required,
    setting,
    settings_of,
    type_in_words,
)


def _even(number: int) -> str:
    return "" if number % 2 == 0 else "even numbers"


def _host(name: str) -> str:
    if " " in name:
        raise ConfigError("a host has no spaces", param="hosts")
    return "" if name.islower() else "lower-case names"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting of every kind."""

    count: int = setting(4, "A number of things.", low=1, high=10)
    share: float = setting(0.5, "A share.", low=0, high=1)
    stride: int = setting(16, "Zero turns it off.", low=8, high=32, or_zero=True)
    even: int = setting(2, "Every second number.", check=_even)
    free: int = setting(0, "Any whole number.")
    mode: str = setting("fast", "One of two words.", choices=("fast", "slow"))
    active: bool = setting(False, "A switch.")
    path: Path = setting(Path("here"), "A path.")
    limit: int | None = setting(None, "A bound, or none.", low=1, high=9)
    sizes: tuple[int, ...] = setting((1, 2), "Some sizes.", low=1, high=100)
    rates: tuple[float, ...] = setting((1.0,), "At least one rate.", low=0.5, high=8, nonempty=True)
    modes: tuple[str, ...] = setting((), "Some of two words.", choices=("fast", "slow"))
    hosts: tuple[str, ...] | None = setting(None, "Names, or none.", check=_host)
    label: str = setting("", "A text.", words="any text but this")
    secret: str = setting("", "Not for users.", internal=True)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Inner:
    """A subject of its own that holds another one."""

    depth: int = setting(3, "How deep.", low=0, high=9)
    leaf: Leaf = field(default_factory=Leaf)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Outer:
    """A setting without a default, two subjects, and a field that is not a setting."""

    name: str = required("A name.")
    inner: Inner = field(default_factory=Inner)
    width: int = setting(7, "How wide.", low=1, high=9)
    note: str = "no setting"

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("count", [1, 10]),
        ("share", [0, 1, 0.0, 1.0, 0.999]),
        ("stride", [0, 8, 32]),
        ("even", [0, -2, 100]),
        ("free", [-(10**30), 10**30]),
        ("mode", ["fast", "slow"]),
        ("active", [True, False]),
        ("path", [Path("/"), Path("a")]),
        ("limit", [None, 1, 9]),
        ("sizes", [(), (1,), (100, 1, 50)]),
        ("rates", [(0.5,), (8, 1.5)]),
        ("modes", [(), ("slow", "fast")]),
        ("hosts", [None, (), ("a", "b")]),
        ("label", ["", "anything"]),
    ],
)
def test_accepted_values(name: str, values: list[Any]) -> None:
    """Ranges include both ends."""
    for value in values:
        assert getattr(Leaf(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count is 0; accepted: 1 to 10"),
        ("count", 11, "count is 11; accepted: 1 to 10"),
        ("count", 4.0, "count is 4.0; accepted: 1 to 10"),
        ("count", "4", "count is '4'; accepted: 1 to 10"),
        ("count", None, "count is None; accepted: 1 to 10"),
        ("share", -0.001, "share is -0.001; accepted: 0 to 1"),
        ("share", 1.001, "share is 1.001; accepted: 0 to 1"),
        ("share", math.nan, "share is nan; accepted: 0 to 1"),
        ("share", math.inf, "share is inf; accepted: 0 to 1"),
        ("stride", 7, "stride is 7; accepted: 0, or 8 to 32"),
        ("stride", 33, "stride is 33; accepted: 0, or 8 to 32"),
        ("stride", -1, "stride is -1; accepted: 0, or 8 to 32"),
        ("even", 3, "even is 3; accepted: even numbers"),
        ("even", "3", "even is '3'; accepted: a whole number"),
        ("free", 1.5, "free is 1.5; accepted: a whole number"),
        ("mode", "Fast", "mode is 'Fast'; accepted: fast, slow"),
        ("mode", 1, "mode is 1; accepted: fast, slow"),
        ("active", "true", "active is 'true'; accepted: true or false"),
        ("active", 1, "active is 1; accepted: true or false"),
        ("path", "a", "path is 'a'; accepted: a path"),
        ("limit", 0, "limit is 0; accepted: 1 to 9, or none"),
        ("label", 3, "label is 3; accepted: any text but this"),
    ],
)
def test_an_error_names_setting_value_and_accepted_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Leaf(**{name: value})
    assert (caught.value.message, caught.value.param) == (message, name)


@pytest.mark.parametrize("name", ["count", "share", "stride", "free", "limit"])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_no_number(name: str, value: bool) -> None:
    """True is an instance of int in Python, and would pass for 1."""
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Leaf(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sizes", (5, 0, 101), "sizes has 0; accepted: 1 to 100"),
        ("sizes", (5, True), "sizes has True; accepted: 1 to 100"),
        ("sizes", [5], r"sizes is \[5\]; accepted: 1 to 100, as A,B"),
        ("sizes", 5, "sizes is 5; accepted: 1 to 100, as A,B"),
        ("rates", (1.0, math.nan), "rates has nan; accepted: 0.5 to 8"),
        ("rates", (), r"rates is \(\); accepted: 0.5 to 8, as A,B"),
        ("modes", ("fast", "quick", "best"), "modes has 'quick'; accepted: fast, slow"),
        ("hosts", ("a", "B", "C"), "hosts has 'B'; accepted: lower-case names"),
        ("hosts", "a", "hosts is 'a'; accepted: names, as A,B, or none"),
    ],
)
def test_the_error_of_a_tuple_names_its_first_wrong_item(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Leaf(**{name: value})


def test_a_check_may_raise_an_error_of_its_own() -> None:
    with pytest.raises(ConfigError, match="a host has no spaces"):
        Leaf(hosts=("a", "b c"))


def test_a_check_is_not_called_for_a_value_of_the_wrong_type() -> None:
    """Such a check would fail with a TypeError instead of a message."""
    with pytest.raises(ConfigError, match="even is None; accepted: a whole number"):
        Leaf(even=None)  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Leaf().count = 5  # type: ignore[misc]


def test_settings_of_a_class_in_order_of_declaration() -> None:
    entries = {entry.name: entry for entry in settings_of(Outer)}
    assert list(entries) == ["name", "depth", *(entry.name for entry in settings_of(Leaf)), "width"]
    assert [entries[name].subject for name in ("name", "depth", "count")] == [
        (),
        ("inner",),
        ("inner", "leaf"),
    ]
    assert (entries["name"].default, entries["width"].default) == (MISSING, 7)
    assert entries["limit"].hint == int | None
    assert entries["count"].rule.help == "A number of things."
    assert [entry.name for entry in settings_of(Outer, nested=False)] == ["name", "width"]
    assert entries["secret"].rule.internal


def test_a_nested_subject_checks_its_own_settings() -> None:
    with pytest.raises(ConfigError, match="count is 11; accepted: 1 to 10"):
        build_settings(Outer, {"name": "x", "count": 11})


def test_flat_values_build_nested_settings_and_come_back() -> None:
    values = {"name": "x", "depth": 5, "count": 9, "sizes": (7,), "width": 2}
    outer = build_settings(Outer, values)
    assert (outer.inner.depth, outer.inner.leaf.count, outer.inner.leaf.sizes, outer.width) == (5, 9, (7,), 2)
    assert outer.inner.leaf.mode == "fast", "a setting that is not given keeps its default"
    assert flat_values(outer).items() >= values.items()
    assert build_settings(Outer, flat_values(outer)) == outer
    assert build_settings(Outer, {"name": "x"}) == Outer("x")


@pytest.mark.parametrize("name", ["inner", "note", "hight"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str) -> None:
    """Subjects, and fields that are not settings, are unknown, too."""
    with pytest.raises(ConfigError) as caught:
        build_settings(Outer, {"name": "x", name: 1})
    assert caught.value.param == name
    assert caught.value.message.startswith(
        f"unknown setting {name!r}; known: active, count, depth, even, free"
    )


def test_a_setting_without_a_default_has_to_be_given() -> None:
    with pytest.raises(TypeError, match="name"):
        build_settings(Outer, {})


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (float, "a number"),
        (bool, "true or false"),
        (str, "text"),
        (Path, "a path"),
        (int | None, "a whole number, or none"),
        (tuple[int, ...], "whole numbers, as A,B"),
        (tuple[float, ...], "numbers, as A,B"),
        (tuple[str, ...] | None, "names, as A,B, or none"),
    ],
    ids=str,
)
def test_types_in_words(hint: Any, words: str) -> None:
    assert type_in_words(hint) == words


def test_the_type_inside_an_optional_one() -> None:
    assert (inner_type(int | None), inner_type(None | str)) == (int, str)
