"""The depth of JSON values."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.json_text import is_nested_deeper


@pytest.mark.parametrize(
    ("value", "depth"), [({}, 1), ([1, "a"], 1), ({"a": 1, "b": [2]}, 2), ([[], {"a": {"b": None}}], 3)]
)
def test_a_value_is_as_deep_as_its_deepest_part(value: Any, depth: int) -> None:
    assert not is_nested_deeper(value, depth)
    assert is_nested_deeper(value, depth - 1)


def test_a_value_too_deep_for_a_recursion_is_measured() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert is_nested_deeper(value, 100)
    assert not is_nested_deeper(value, 100_001)
