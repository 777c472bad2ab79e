"""Tests of the page of benchmarks/peers: medians, best peers, ratios, targets, and missing peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "peers"))

from page import chart, page
from rows import ROWS, best_peer, figures, verdicts

BY_NAME = {row.name: row for row in ROWS}


def a_round(**figures: float) -> dict[str, Any]:
    names = ("ttft_ms", "decode_per_s", "tokens_per_s", "stall_ms")
    return {"failed": 0, "why": None, **dict.fromkeys(names), **figures}


FAILED = {**a_round(tokens_per_s=0.0), "failed": 2, "why": "http 500: out of blocks"}


def an_engine(title: str, **rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "title": title, "rounds": rounds, "versions": {title: "1.0"}, "precision": "as it is",
        "pools_mib": 100, "start_s": 3.0, "lacks": {},
    }  # fmt: skip


def the_engines() -> dict[str, Any]:
    return {
        "fovea": an_engine(
            "Fovea",
            cold=[a_round(ttft_ms=value, decode_per_s=42.0) for value in (80.0, 100.0, 400.0)],
            stall=[a_round(stall_ms=149.0, ttft_ms=900.0)],
            memory=[{"failed": 0, "why": None, "peak_mib": 1500.0}],
        ),
        "vllm": an_engine(
            "vLLM",
            cold=[a_round(ttft_ms=200.0, decode_per_s=30.0)],
            images=[FAILED],
            memory=[{"failed": 0, "why": None, "peak_mib": 4000.0}],
        ),
        "llamacpp": an_engine("llama.cpp", cold=[a_round(ttft_ms=300.0, decode_per_s=45.0)]),
        "openvino": {"title": "OpenVINO", "reason": "pip ended with 1: no such version"},
    }


def the_results() -> dict[str, Any]:
    machine = {
        "cpu": "a processor", "cores": [0, 1], "cores_in_all": 4, "memory_gib": 24.0, "system": "Linux",
        "python": "3.11", "commit": "abc",
    }  # fmt: skip
    return {
        "date": "2026-11-21", "machine": machine, "checkpoint_mib": 1000.0, "repeats": 3,
        "shape": {"visual_tokens": 256, "text_tokens": 56, "output_tokens": 64},
        "precisions": {"bf16": {"engines": the_engines()}},
    }  # fmt: skip


def test_figures_are_medians_and_failed_rounds_have_none() -> None:
    by_engine = figures(BY_NAME["cold"], the_engines())
    ours = by_engine["fovea"]
    assert (ours.median, ours.low, ours.high) == (100.0, 80.0, 400.0)
    assert "openvino" not in by_engine
    assert figures(BY_NAME["images"], the_engines()) == {}


@pytest.mark.parametrize(("row", "best"), [("cold", "vllm"), ("decode", "llamacpp")])
def test_the_best_peer_is_the_lowest_or_the_highest_and_never_fovea(row: str, best: str) -> None:
    assert best_peer(BY_NAME[row], figures(BY_NAME[row], the_engines())) == best


def test_targets_are_ratios_to_the_best_or_to_a_named_peer() -> None:
    def results(row: str) -> list[tuple[str, bool | None]]:
        by_engine = figures(BY_NAME[row], the_engines())
        return [(verdict.words, verdict.met) for verdict in verdicts(BY_NAME[row], "bf16", by_engine, 1400.0)]

    assert results("cold") == [("at most 0.85x the best peer", True)]
    # 42 tokens per second: 1.4 times 30 exactly, but less than 0.95 times 45.
    assert results("decode") == [("at least 1.4x vllm", True), ("at least 0.95x llamacpp", False)]
    assert results("stall") == [("at most 150 ms", True)]
    assert results("memory") == [("at most 1.3x the checkpoint, plus the configured caches (1,400)", False)]
    assert results("text") == [("at least 1.3x the best peer", None)]
    assert verdicts(BY_NAME["known"], "int8", {}) == []


def test_the_page_shows_ratios_spreads_targets_and_reasons_for_missing_figures() -> None:
    text = page(the_results())
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    cold = lines["first token, one request, new image, ms"]
    assert (
        "| 100 (80.0 to 400) | 200 (200 to 200) | 300 (300 to 300) | 0.50x vLLM "
        "| at most 0.85x the best peer: met |" in cold
    )
    assert "at least 0.95x llamacpp: **missed**" in lines["decode, one request, tok/s"]
    # 1.3 times the checkpoint, plus the 100 MiB that Fovea's caches are configured with.
    assert "the configured caches (1,400): **missed**" in lines["peak memory, MiB"]
    assert "- OpenVINO: not compared: pip ended with 1: no such version" in text
    assert "not results" not in text


def test_the_page_of_a_quick_run_says_that_its_figures_are_not_results() -> None:
    assert "its figures are not results" in page({**the_results(), "repeats": 1})


def test_a_workload_that_failed_with_every_engine_has_a_row() -> None:
    assert "| 8 at once, 8 new images, tok/s | - | failed: http 500: out of blocks | - | - |" in page(
        the_results()
    )


def test_without_fovea_nothing_is_met_or_missed() -> None:
    results = the_results()
    del results["precisions"]["bf16"]["engines"]["fovea"]
    assert "not measured" in page(results)
    assert "missed" not in page(results)


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart(the_results(), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
