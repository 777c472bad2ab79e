"""A tenant with 20 times the load costs another one at most 20% of its p95, on a virtual clock."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "gateway"))

from fairness import SCENARIOS, compare

from fovea.gateway.settings import QueueSettings
from tests.support.thorough import is_thorough, others_slow

SECONDS = 600.0 if is_thorough() else 200.0
"""Length of a simulation."""


@pytest.mark.parametrize("title", others_slow(SCENARIOS, ["usual", "bursts", "large", "few", "slowdown"]))
def test_a_flood_costs_another_tenant_little(title: str) -> None:
    runs = compare(SCENARIOS[title]._replace(seconds=SECONDS), 7, QueueSettings().queue_headroom)
    alone, fair = runs["alone"]["p95_s"], runs["order and headroom"]["p95_s"]
    assert fair <= 1.2 * alone
    assert runs["first come, first served"]["p95_s"] > 4 * alone, "the flood would cost much"
    assert runs["order and headroom"]["flood_per_s"] > 0.8 * runs["order only"]["flood_per_s"]


def test_the_headroom_is_what_meets_the_figure_beside_large_requests() -> None:
    runs = compare(SCENARIOS["large"]._replace(seconds=SECONDS), 7, QueueSettings().queue_headroom)
    assert runs["order only"]["p95_s"] > 1.2 * runs["alone"]["p95_s"]
