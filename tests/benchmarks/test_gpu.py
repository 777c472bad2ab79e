"""Tests of the page of benchmarks/gpu.py: floors, targets, and the text for missing measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu import last_result
from gpu_page import Shape, decode_seconds, figures, page, prefill_operations
from tests.support import forks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, linear=1000, head=500)
MEASURED = {
    "bandwidth": 1e6, "peak": 1e9, "decode_tok_s": 200.0, "context": 10.0, "prefill_s": 0.001,
    "prompt_tokens": 100.0, "prompts": 2.0, "tok_s_32": 900.0,
}  # fmt: skip


def test_a_token_reads_every_weight_and_its_context() -> None:
    """1,500 parameters, and keys and values of 10 positions, 2 layers, 2 heads of size 8; 2 bytes each."""
    assert decode_seconds(SHAPE, 10, 1e6) == pytest.approx(2 * (1500 + 10 * 2 * 2 * 2 * 8) / 1e6)


def test_a_prompt_multiplies_every_row_and_pairs_below_the_diagonal() -> None:
    assert prefill_operations(SHAPE, [1]) == 2 * 1000 + 4 * 2 * 4 * 8 + 2 * 500
    assert prefill_operations(SHAPE, [3, 3]) == 2 * (2 * 1000 * 3 + 4 * 2 * 4 * 8 * 6 + 2 * 500)


def test_targets_are_judged_by_ratios() -> None:
    ratios = figures(SHAPE, MEASURED)
    assert ratios["decode_of_floor"] == pytest.approx(200 * 2 * 2140 / 1e6)
    assert ratios["prefill_of_peak"] == pytest.approx(prefill_operations(SHAPE, [100, 100]) / 1e6)
    both = {**MEASURED, "transformers_tok_s": 60.0, "transformers_32_tok_s": 450.0}
    text = page("A card", "versions", "5 passed", both, SHAPE, "")
    decode = "decode, one request: share of the rate that memory bandwidth allows"
    assert f"| {decode} | 0.7 | 0.86 | met |" in text
    assert "transformers, one request after the other | 10 | 15.00 | met |" in text
    assert "all 32 in one batch: 2.00x" in text
    assert "| prefill of 8 x 1,024 visual tokens: share of the matrix rate | 0.55 | 2.99 | met |" in text
    slow = page("A card", "versions", "5 passed", {**both, "decode_tok_s": 100.0}, SHAPE, "")
    assert "| 0.7 | 0.43 | MISSED |" in slow


def test_the_page_says_which_figures_were_not_measured() -> None:
    text = page("A card", "versions", "no output", {}, None, "it ended with exit code 124")
    assert text.count("not yet measured") == 3
    assert text.endswith("it ended with exit code 124\n")
    assert "transformers, one request after the other | 10 | not yet measured |" in page(
        "A card", "versions", "5 passed", MEASURED, SHAPE, ""
    )


def test_the_last_result_is_read_even_if_the_output_was_cut() -> None:
    first = json.dumps({"measured": {"a": 1}})
    assert last_result(f"x\n{first}\n{{'cut") == {"measured": {"a": 1}}
    assert last_result("Traceback") is None


@pytest.mark.parametrize("script", ["gpu.py", "gpu_speed.py"])
def test_without_a_gpu_the_script_ends_at_once_with_the_reason(script: str, tmp_path: Path) -> None:
    process = forks.script(BENCHMARKS / script, CUDA_VISIBLE_DEVICES="", OUT=str(tmp_path / "out"))
    told = process.communicate()[1]
    assert process.returncode == 2
    assert "torch sees no CUDA device; nothing was" in told
    assert not (tmp_path / "out").exists()
