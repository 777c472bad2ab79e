"""Tests of benchmarks/roles.py: the page on invented results, and its counters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from roles_page import FIGURES, INTEGRATED, NOT_HERE, SETUPS, page

WHERE = {"machine": "2026-01-01 at abc: a CPU", "minutes": 2.0}


def figures(scale: float) -> dict[str, float]:
    handed_over = {"images": 4, "by_peers": 4, "transfer_kb_per_image": 300.0, "transfer_ms_per_image": 2.0}
    return {**dict.fromkeys(FIGURES, 10.0 * scale), **handed_over}


def section(rounds: int) -> dict[str, Any]:
    turns = [
        {name: figures(1.0 if name == INTEGRATED else 2.0 + number) for name in SETUPS}
        for number in range(rounds)
    ]
    return {
        "model": "m",
        "cells": [{"side": 448, "load": 0.5, "images_per_s": 2.0, "rounds": turns}],
        **WHERE,
    }


def fault(gap: float) -> dict[str, Any]:
    usual = {"ttft_ms": 500.0, "gap_p99_ms": 20.0, "gap_longest_ms": 40.0}
    killed = {"ttft_ms": 900.0, "gap_p99_ms": 30.0, "gap_longest_ms": gap}
    return {"model": "m", "side": 448, "usual": usual, "killed": killed, "without": usual, **WHERE}


def test_ratios_are_those_within_a_round_with_their_spread() -> None:
    text = page({"tiny": section(3)})
    assert "| 448x448, 50% | encode apart | 3.00x (2.00x - 4.00x) |" in text
    assert "| 448x448, 50% | prefill apart | 12 of 12 | 300 (300 - 300) | 2.00 (2.00 - 2.00) |" in text
    assert f"## Random weights, 0.5 B parameters\n\n{NOT_HERE}" in text


def test_one_round_has_no_spread() -> None:
    assert "| 448x448, 50% | encode apart | 2.00x | 2.00x |" in page({"small": section(1)})


def test_the_gap_after_a_death_is_judged() -> None:
    assert "1.50 times the usual one (target: at most 2; kept)" in page({"fault": fault(60.0)})
    assert "2.25 times the usual one (target: at most 2; **missed**)" in page({"fault": fault(90.0)})
