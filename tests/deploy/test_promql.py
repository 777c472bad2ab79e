"""The reader of PromQL finds every metric, and nothing else."""

from __future__ import annotations

import pytest

from tests.deploy.promql import filled, selectors, without_offset


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("fovea:ready == 0", ["fovea:ready"]),
        ('sum by (le) (rate(a_bucket{le="0.5", x=~"a|b"}[5m])) * 1e-9', ['a_bucket{le="0.5", x=~"a|b"}']),
        ("a / on (slo) group_left () b", ["a", "b"]),
        ("(sum(x{a=\"}\"}) or vector(0)) / (y > 0)", ['x{a="}"}', "y"]),
        ("max_over_time(m[1h] offset 6h) > 1.2 and deriv(m[2h]) > 0", ["m"]),
        ("sum(sum_over_time((up == 1)[5m:1s])) * 1000 / 3600000", ["up"]),
        ("absent(up) unless a_b", ["up", "a_b"]),
    ],
)  # fmt: skip
def test_selectors(expression: str, found: list[str]) -> None:
    assert selectors(expression) == found


def test_variables_are_filled() -> None:
    assert filled('x{job=~"$job"}[$__range:$__interval] * $__interval_ms') == ('x{job=~".+"}[5m:1s] * 1000')


def test_the_past_becomes_the_present() -> None:
    assert without_offset("a[1h] offset 6h > b") == "a[1h] > b"
