"""Tests of benchmarks/peers: medians, best peers, ratios, targets, missing peers, and instruction sets."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "peers"))

from earlier import earlier
from instructions import ALL, AMX, AVX2, CHOICES, FILES, page_of, pages
from rows import ROWS, best_peer, figures, verdicts
from sampling import BEYOND, MATRIX, OTHER, VECTOR, Samples, kind, next_instructions
from servers import NAMES, ONLY_AVX2, load, names
from servers.base import Home

from page import chart, page

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


def the_avx2_results() -> dict[str, Any]:
    results = {**the_results(), "instructions": AVX2, "limited": True}
    engines = results["precisions"]["bf16"]["engines"]
    seen = {"kinds": {VECTOR: 300, OTHER: 100}, "beyond_in": {}}
    engines["fovea"].update(limit="`SWITCH=avx2`", instructions=seen)
    engines["vllm"].update(
        limit="`OTHER=1`", instructions={"kinds": {BEYOND: 7, VECTOR: 3}, "beyond_in": {"libc.so.6": 7}}
    )
    return results


def test_on_the_page_of_avx2_the_target_of_every_row_is_to_be_first() -> None:
    def met(row: str, name: str = AVX2) -> list[tuple[str, bool | None]]:
        by_engine = figures(BY_NAME[row], the_engines())
        return [(v.words, v.met) for v in verdicts(BY_NAME[row], "int4", by_engine, instructions=name)]

    assert met("cold") == [("first", True)]
    assert met("decode") == [("first", False)]
    assert met("memory") == [("first", True)]
    assert met("stall") == [("first", None)]  # no peer has a figure
    assert met("images") == [("first", None)]
    assert met("cold", ALL) == []


def test_as_good_as_the_best_peer_is_not_first() -> None:
    same = {"fovea": figures(BY_NAME["cold"], the_engines())["vllm"]}
    by_engine = {**same, "vllm": same["fovea"]}
    assert verdicts(BY_NAME["cold"], "bf16", by_engine, instructions=AVX2)[0].met is False


def test_the_page_of_avx2_names_its_switches_and_the_instructions_that_were_seen() -> None:
    text = page(the_avx2_results())
    assert text.startswith("# Fovea beside other engines on a machine with AVX2 and without AVX-512")
    assert "This machine also has AVX-512." in text
    assert "`python benchmarks/peers/run.py --instructions avx2`" in text
    assert "  - kept to AVX2 by `SWITCH=avx2`" in text
    assert "  - of 400 sampled instructions: 0 beyond AVX2, 300 AVX and AVX2, 100 other\n" in text
    assert "  - of 10 sampled instructions: 7 beyond AVX2, 3 AVX and AVX2, 0 other (in libc.so.6)" in text
    assert "**missed**" in text


def test_without_a_restriction_the_page_says_nothing_of_one() -> None:
    for results in (the_results(), {**the_results(), "instructions": AVX2, "limited": False}):
        text = page(results)
        assert "also has AVX-512" not in text
        assert "kept to" not in text


@pytest.mark.parametrize("flags", [["avx2", "avx512f"], ["avx2", "amx_tile"]])
def test_a_wide_machine_has_a_page_for_each_name(flags: list[str]) -> None:
    assert pages([AVX2, ALL], flags) == (ALL, AVX2)
    assert pages([ALL], flags) == (ALL,)
    assert pages([AVX2], flags) == (AVX2,)


@pytest.mark.parametrize("asked", [[ALL], [AVX2], [ALL, AVX2]])
def test_a_machine_without_avx512_has_only_the_page_of_avx2(asked: list[str]) -> None:
    assert pages(asked, ["avx2", "avx_vnni"]) == (AVX2,)


def test_pages_have_files_and_engines_of_their_own() -> None:
    assert set(FILES) == {*CHOICES, AMX}
    assert len(set(FILES.values())) == len(FILES)
    assert page_of(ALL, ["avx512f", "amx_tile"]) == AMX
    assert page_of(AVX2, ["avx512f", "amx_tile"]) == AVX2
    assert page_of(ALL, ["avx512f"]) == ALL
    assert names(ALL) == NAMES
    assert set(names(AVX2)) == {*NAMES, *ONLY_AVX2}


def test_an_unknown_instruction_set_is_refused_with_those_that_are_accepted() -> None:
    with pytest.raises(ValueError, match="--instructions is sse; accepted: all, avx2"):
        pages([ALL, "sse"], ["avx2"])


@pytest.mark.parametrize("name", names(AVX2))
def test_every_engine_can_be_kept_to_avx2_and_names_how(name: str) -> None:
    plain, limited = load(name), load(name, AVX2)
    assert plain.limit == ""
    assert "avx512" in limited.limit.lower()
    assert limited.title == plain.title
    assert limited.precisions.keys() == plain.precisions.keys()
    # Another build must not be installed over the first one.
    assert (limited.recipe == plain.recipe) == (limited.folder == plain.folder)


def test_limited_engines_start_with_their_switches(tmp_path: Path) -> None:
    start = load("fovea", AVX2).start(Home(tmp_path, (0, 1)), tmp_path, "bf16", 80)
    assert start.env["FOVEA_NATIVE_KERNELS"] == "avx2"
    assert start.env["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert load("fovea").start(Home(tmp_path, (0, 1)), tmp_path, "bf16", 80).env == {}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("62f27e4852c1", BEYOND),  # vdpbf16ps zmm0, zmm0, zmm1
        ("62f1fe086f07", BEYOND),  # vmovdqu64 xmm0, [rdi]: AVX-512 is not only 512 bits wide
        ("c4e27550c2", BEYOND),  # vpdpbusd ymm0, ymm1, ymm2: AVX-VNNI
        ("c4e27a5cc1", MATRIX),  # tdpbf16ps tmm0, tmm1, tmm0
        ("c4e275b8c2", VECTOR),  # vfmadd231ps ymm0, ymm1, ymm2
        ("c4e27504c2", VECTOR),  # vpmaddubsw ymm0, ymm1, ymm2
        ("c4e17d50c0", VECTOR),  # vmovmskpd: opcode 50 of another map
        ("c5f458c2", VECTOR),  # vaddps ymm0, ymm1, ymm2
        ("0f58c1cc", OTHER),  # addps xmm0, xmm1
        ("4883c008", OTHER),  # add rax, 8
    ],
)
def test_instructions_are_told_apart_by_their_first_bytes(code: str, expected: str) -> None:
    assert kind(bytes.fromhex(code)) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_instruction_of_a_stopped_process_is_found_and_a_waiting_one_does_not_count() -> None:
    def seen(code: str, start_s: float) -> dict[str, int]:
        with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
            time.sleep(start_s)
            samples = Samples()
            for _ in range(5):
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.05)
                samples.add(next_instructions(process.pid))
                process.send_signal(signal.SIGCONT)
            process.kill()
        return samples.seen()["kinds"]

    assert sum(seen("while True: pass", 0.05).values()) >= 3
    assert seen("import time; time.sleep(60)", 0.5) == {}


def test_the_files_of_instructions_beyond_avx2_are_counted() -> None:
    samples = Samples()
    samples.add(iter([(BEYOND, "libc.so.6"), (VECTOR, ""), (BEYOND, "libc.so.6")]))
    assert samples.seen() == {"kinds": {BEYOND: 2, VECTOR: 1}, "beyond_in": {"libc.so.6": 2}}


def test_precisions_of_an_earlier_run_keep_their_date_and_commit() -> None:
    old = the_avx2_results()
    machine = {**old["machine"], "commit": "def", "cores": (0, 1)}
    new = {**old, "machine": machine, "precisions": {}}
    int8 = {"engines": the_engines(), "date": "2026-11-23", "commit": "def"}
    new["precisions"] = {"int8": int8, **earlier(old, new)}
    text = page(new)
    assert text.index("## bf16") < text.index("Measured on 2026-11-21 at commit abc.") < text.index("## int8")
    assert text.count("Measured on") == 1


@pytest.mark.parametrize("change", [{"repeats": 5}, {"instructions": ALL}])
def test_results_with_other_settings_are_not_added_to(change: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match=f"the earlier results differ in {next(iter(change))}"):
        earlier(the_avx2_results(), {**the_avx2_results(), **change})
