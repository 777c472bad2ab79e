"""Tests of benchmarks/gpu.py: its steps and their budgets, its pages, and what it prints without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu import LIMITS, environment, run_steps
from gpu_page import (
    STEPS,
    Outcome,
    Shape,
    Step,
    correctness_page,
    decode_seconds,
    figures,
    numbers_page,
    prefill_operations,
)
from tests.support import forks
from tests.support.forks import Fork

ROOT = Path(__file__).parents[2]
SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, linear=1000, head=500)
SHAPE_FIELDS = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "linear": 1000, "head": 500}
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


def numbers(**measured: float) -> str:
    outcomes = [Outcome("engine", shape=SHAPE_FIELDS), Outcome("all", 1.5, measured={**MEASURED, **measured})]
    return numbers_page("A GPU", "versions", outcomes)


def test_targets_are_judged_by_ratios() -> None:
    ratios = figures(SHAPE, MEASURED)
    assert ratios["decode_of_bound"] == pytest.approx(200 * 2 * 2140 / 1e6)
    assert ratios["prefill_of_peak"] == pytest.approx(prefill_operations(SHAPE, [100, 100]) / 1e6)
    text = numbers(transformers_tok_s=60.0, transformers_32_tok_s=450.0)
    decode = "decode, one request: share of the rate that memory bandwidth allows"
    assert f"| {decode} | 0.7 | 0.86 | met |" in text
    assert "transformers, one request after the other | 10 | 15.00 | met |" in text
    assert "all 32 in one batch: 2.00x" in text
    assert "| prefill of 8 x 1,024 visual tokens: share of the matrix rate | 0.55 | 2.99 | met |" in text
    assert "| 0.7 | 0.43 | MISSED |" in numbers(decode_tok_s=100.0)
    assert "transformers, one request after the other | 10 | not yet measured |" in numbers()


def test_the_page_says_which_steps_failed_and_which_figures_are_missing() -> None:
    failed = Outcome("decode", 3.0, "Traceback:\n  line\nRuntimeError: no kernel\n")
    text = numbers_page("A GPU", "versions", [Outcome("limits", 1.0, measured={"peak": 1e9}), failed])
    assert text.count("not yet measured") == 3
    assert "| decode | 3.0 | RuntimeError: no kernel |" in text
    assert "| limits | 1.0 | done |" in text
    assert "| matrix rate, operations/s | 1e+09 |" in text


SCRIPT = """
import json, os, sys, time
for name in sys.argv[1:]:
    print("words", flush=True)
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        os._exit(7)
    line = {"step": name, "seconds": 1.0, "measured": {name: float(os.getpid())}}
    if name == "fails":
        line["error"] = "ValueError: no"
    if name == "breaks":
        line |= {"error": "RuntimeError: CUDA", "ended": True}
    print(json.dumps(line), flush=True)
    if name == "breaks":
        time.sleep(60)
"""


def test_a_step_that_fails_hangs_or_crashes_does_not_end_the_others(tmp_path: Path) -> None:
    """Steps share a process as long as it lives. Those after a failed one get a new process."""
    script, results, log = (tmp_path / name for name in ("script.py", "results.jsonl", "log.txt"))
    script.write_text(SCRIPT)
    names = ["a", "fails", "b", "hangs", "c", "crashes", "d", "breaks", "e"]
    steps = [Step(name, 1 if name == "hangs" else 30) for name in names]
    outcomes = run_steps(steps, time.monotonic() + 60, log, results, dict(os.environ), script)
    errors = {outcome.step: outcome.error for outcome in outcomes if outcome.error}
    assert errors == {
        "fails": "ValueError: no",
        "hangs": "it took more than 1 s",
        "crashes": "its process ended with code 7",
        "breaks": "RuntimeError: CUDA",
    }
    processes = {outcome.step: outcome.measured.get(outcome.step) for outcome in outcomes}
    assert processes["a"] == processes["fails"] == processes["b"]
    assert len({processes[name] for name in "acde"}) == 4
    assert [json.loads(line)["step"] for line in results.read_text().splitlines()] == names


def test_steps_without_time_are_reported(tmp_path: Path) -> None:
    outcomes = run_steps(STEPS, time.monotonic(), tmp_path / "log", tmp_path / "results", {})
    assert {outcome.error for outcome in outcomes} == {"no time was left"}
    assert len(outcomes) == len(STEPS)


def test_packages_of_the_caller_stay_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/carried")
    assert environment("/site")["PYTHONPATH"].split(":")[2:] == ["/site", "/carried"]


def test_the_page_of_tests_counts_results_and_shows_failures() -> None:
    results = [
        {"test": "a", "outcome": "passed", "text": ""},
        {"test": "b", "outcome": "passed", "text": ""},
        {"test": "b", "outcome": "failed", "text": "E assert 1 == 2"},
        {"test": "b", "outcome": "failed", "text": "worker 'gw0' crashed"},
        {"test": "c", "outcome": "skipped", "text": "Skipped: no NVML"},
    ]
    text = correctness_page("A GPU", "versions", "the time ran out", ["a", "b", "c", "d"], results)
    assert "Tests: 1 passed, 1 failed, 1 skipped, 1 without a result; the time ran out" in text
    assert "- no result: d" in text
    assert "- skipped: Skipped: no NVML" in text
    assert "## b\n\n```\nE assert 1 == 2\n```" in text


def test_each_result_is_written_when_the_test_ends(tmp_path: Path) -> None:
    """The second test reads the result of the first. A file that cannot be imported is a failed test."""
    results, tests = tmp_path / "results.jsonl", tmp_path / "test_two.py"
    broken = tmp_path / "test_broken.py"
    broken.write_text("import no_such_module")
    tests.write_text(
        "import pathlib\n"
        "def test_first():\n    print('a figure')\n    assert 1 == 2\n"
        "def test_second():\n"
        f"    assert 'test_first' in pathlib.Path({str(results)!r}).read_text().splitlines()[2]\n"
    )
    code = (
        "import sys, pytest\n"
        "sys.exit(pytest.main(['--continue-on-collection-errors', '-p', 'tests.support.gpu_results', '-p', "
        f"'no:cacheprovider', '-c', {str(tmp_path / 'none.ini')!r}, {str(broken)!r}, {str(tests)!r}]))"
    )
    (tmp_path / "none.ini").write_text("[pytest]\n")
    process = Fork(
        code,
        [],
        os.environ
        | {"FOVEA_GPU_RESULTS": str(results), "PYTHONPATH": str(ROOT)}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    out, _ = process.communicate()
    assert process.returncode == 1, out
    error, collected, first, second = map(json.loads, results.read_text().splitlines())
    assert error["outcome"] == "failed"
    assert "No module named 'no_such_module'" in error["text"]
    assert [name.rpartition("::")[2] for name in collected["collected"]] == ["test_first", "test_second"]
    assert first["outcome"] == "failed"
    assert "assert 1 == 2" in first["text"]
    assert "a figure" in first["text"]
    assert second["outcome"] == "passed"


@pytest.mark.slow
def test_a_process_whose_gpu_no_longer_answers_is_replaced(tmp_path: Path) -> None:
    """The first test leaves such a process behind. Both have a result, from two processes."""
    results, tests = tmp_path / "results.jsonl", tmp_path / "test_two.py"
    tests.write_text(
        "import os, torch\n"
        "def refuse():\n    raise RuntimeError('CUDA error')\n"
        "def test_breaks():\n"
        "    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, refuse\n"
        "    assert 1 == 2\n"
        "def test_next():\n    assert not torch.cuda.is_initialized()\n"
        "def test_last():\n    assert not torch.cuda.is_initialized()\n"
    )
    (tmp_path / "none.ini").write_text("[pytest]\n")
    command = ["-q", "-n", "1", "-p", "tests.support.gpu_results", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *command, "-c", str(tmp_path / "none.ini"), str(tests)],
        env=os.environ | {"FOVEA_GPU_RESULTS": str(results), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        check=False,
    )
    assert process.returncode == 1
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    outcomes = {line["test"].rpartition("::")[2]: line["outcome"] for line in lines if "test" in line}
    assert outcomes == {"test_breaks": "failed", "test_next": "passed", "test_last": "passed"}


def test_without_a_gpu_the_commands_for_one_are_printed(tmp_path: Path) -> None:
    process = forks.script(ROOT / "benchmarks/gpu.py", CUDA_VISIBLE_DEVICES="", OUT=str(tmp_path / "out"))
    told = process.communicate()[0]
    assert process.returncode == 0
    for part, limit in LIMITS.items():
        assert f"timeout {limit} python3 benchmarks/gpu.py {part}\n" in told
    assert "python3 -m tools.gpu_wheels" in told


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=" ".join(command), marks=pytest.mark.slow if "numbers" in command else [])
        for command in (["gpu.py", "correctness"], ["gpu.py", "numbers"], ["gpu_speed.py"])
    ],
)
def test_without_a_gpu_a_part_ends_at_once_with_the_reason(command: list[str], tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / command[0]
    process = forks.script(script, *command[1:], CUDA_VISIBLE_DEVICES="", OUT=str(tmp_path / "out"))
    told = process.communicate()[1]
    assert process.returncode == 2
    assert "torch sees no CUDA device; nothing was" in told
    assert not (tmp_path / "out").exists()
