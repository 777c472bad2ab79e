"""fovea bench against a server without a model: tables, JSON, files, exit codes, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.bench.support import Scripted, scripted
from tests.cli.support import Caller, interrupt, start, until, write_lines
from tests.support.servers import free_port

SMALL = ("--visual-tokens", 16, "--token-side", 32, "--output-tokens", 6, "--concurrency", 2, "--repeats", 1)
LOAD = ("--visual-tokens", "4,16", "--token-side", 32, "--output-tokens", 4, "--requests", 6, "--images", 3)


@pytest.fixture(autouse=True)
def _without_engine_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOVEA_THREADS")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """The URL and the process id of fovea serve --simulate."""
    port = free_port()
    process = start("serve", "--simulate", "--port", port, "--api-key", "open sesame")
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready)
        yield url, process.pid
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture
def url(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FOVEA_API_KEY", "open sesame")
    return server[0]


def test_the_fixed_workloads(fovea: Caller, url: str, server: tuple[str, int]) -> None:
    outcome = fovea("bench", url, *SMALL, "--pid", server[1], "--json")
    assert (outcome.code, outcome.err) == (0, "")
    body = outcome.json
    assert body["model"] == "fovea-simulated"
    assert "open sesame" not in outcome.out
    summaries = {result["name"]: result["summary"] for result in body["results"]}
    assert {name: (s["requests"], s["failed"]) for name, s in summaries.items()} == {
        "cold": (1, 0), "images": (2, 0), "questions": (2, 0), "followup": (1, 0), "known": (1, 0),
        "text": (2, 0), "stall": (1, 0),
    }  # fmt: skip
    assert summaries["cold"]["tokens"] == 6
    assert summaries["cold"]["image_tokens"] == 16
    assert summaries["stall"]["values"]["stall_ms"] > 0
    assert summaries["followup"]["cached_tokens"] > 0, "the image is not prefilled again"
    assert summaries["cold"]["cached_tokens"] < 16
    assert body["memory"]["peak_mib"] > 1


def test_tables_fit_the_terminal(fovea: Caller, url: str, server: tuple[str, int]) -> None:
    """The output once ended with kilobytes of JSON, after lines of 180 columns."""
    outcome = fovea("bench", url, "cold", "stall", *SMALL, "--pid", server[1])
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "{" not in outcome.out
    assert [line for line in lines if not line.startswith(" ")][1].startswith("stall: ")
    assert lines[-1].startswith("memory: ")
    assert "targets: " not in outcome.out


def test_loads_targets_files_and_ratios(fovea: Caller, url: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, chart = tmp_path / "old.json", tmp_path / "chart.png"
    words = ("bench", url, "open", "chat", "--rate", "40,80", "--turns", 2, "--clients", 4, *LOAD)
    outcome = fovea(*words, "--out", out, "--plot", chart)
    assert (outcome.code, outcome.err) == (0, "")
    assert "targets: production targets of the ARR-COC-0-1 documents" in outcome.out
    written = json.loads(out.read_text())
    assert [result["name"] for result in written["results"]] == ["open 40/s", "open 80/s", "chat"]
    assert [len(result["requests"]) for result in written["results"]] == [6, 6, 6]
    assert chart.stat().st_size > 1000
    again = fovea("bench", url, "--rate", 40, *LOAD, "--against", out)
    assert max(map(len, again.out.splitlines())) <= 80 + len(str(tmp_path))
    assert "differ in rate, clients, turns\n" in again.out
    against = fovea("bench", url, "--rate", 40, *LOAD, "--against", out, "--json").json["against"]
    assert {row["workload"] for row in against} == {"open 40/s"}
    assert all(row["ratio"] == pytest.approx(row["new"] / row["old"]) for row in against)


def test_a_trace_of_the_simulator_is_sent(fovea: Caller, url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    fovea("simulate", "--requests", 10, "--rate", 50, "--output-tokens", 4, "--save-trace", trace)
    body = fovea("bench", url, "--trace", trace, "--json").json
    (result,) = body["results"]
    assert (result["name"], result["summary"]["requests"], result["summary"]["failed"]) == ("trace", 10, 0)


def test_missed_targets_and_failures_are_exit_code_1(fovea: Caller, url: str, tmp_path: Path) -> None:
    strict = tmp_path / "sla.toml"
    strict.write_text('source = "dreams"\n[targets]\nend_to_end_p50_ms = 0.001\n')
    missed = fovea("bench", url, "--clients", 2, *LOAD, "--sla", strict)
    assert missed.code == 1
    assert "MISSED        end_to_end_p50_ms" in missed.out
    assert "targets: dreams" in missed.out
    hasty = write_lines(tmp_path / "t.jsonl", {"at": 0, "text": 5, "output": 3, "timeout": 1e-6})
    failed = fovea("bench", url, "--trace", hasty)
    assert failed.code == 1
    assert "error: 1 x timeout; the first: no end within 1e-06 s" in failed.out


def test_images_are_sent_ahead(fovea: Caller, url: str) -> None:
    outcome = fovea("bench", url, "cold", *SMALL, "--images-as", "encoded", "--json")
    assert outcome.code == 0
    assert outcome.json["settings"]["images_as"] == "encoded"


def test_an_old_server_gets_the_fields_that_it_knows(fovea: Caller) -> None:
    with scripted(Scripted(refuses=frozenset({"stream_options", "ignore_eos"}))) as old:
        outcome = fovea("bench", old.url, "cold", *SMALL)
    assert outcome.code == 0
    assert "note: the server does not know stream_options: tokens are counted by events" in outcome.out
    assert "note: the server does not know ignore_eos" in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cold", "--api-key", "no"], "the server refuses the API key (401: "),
        (["--model", "other"], "the server has no model 'other'; served: fovea-simulated"),
        (["colt"], "there is no workload 'colt'; accepted: cold, images, questions"),
        (["cold", "--rate", "3"], "--rate is for open; the workloads are cold"),
        (["--rate", "3", "--repeats", "2"], "--repeats is for cold, images"),
        (["open", "--rate", "fast"], "--rate is 'fast'; accepted: numbers, as A,B"),
        (["open", "--arrivals", "flood"], "accepted: poisson, ramp, burst"),
        (["trace"], "the workload trace needs --trace FILE"),
        (["--trace", "none.jsonl"], "none.jsonl cannot be read"),
        (["--sla", "none.toml"], "none.toml cannot be read"),
        (["--against", "none.json"], "none.json cannot be read"),
        (["--out", "/none/at/all.json"], "/none/at/all.json cannot be written"),
        (["--plot", "chart.jpg"], "--plot is 'chart.jpg'; accepted: a name that ends in .png"),
        (["--images-as", "files"], "--images-as: images_as is 'files'; accepted: data, sent, encoded"),
        (["--pid", "999999999"], "--pid is 999999999, and /proc shows no such process"),
    ],
)
def test_errors_name_the_flag_the_value_and_the_accepted_values(
    fovea: Caller, url: str, words: list[str], message: str
) -> None:
    outcome = fovea("bench", url, *words)
    assert outcome.code == 2
    assert message in outcome.error_line


def test_a_server_that_cannot_be_reached(fovea: Caller) -> None:
    outcome = fovea("bench", f"http://127.0.0.1:{free_port()}")
    assert outcome.code == 2
    assert "cannot be reached: " in outcome.error_line


def test_charts_need_their_library(fovea: Caller, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = fovea("bench", url, "--plot", "a.png")
    assert outcome.code == 2
    assert outcome.error_line.endswith("is not installed: pip install 'fovea-vlm[bench]'")
    assert not Path("a.png").exists()


def test_control_c_ends_the_command() -> None:
    with scripted(Scripted()) as server:
        process = start("bench", server.url, "--rate", "0.001", "--requests", 5)
        until(lambda: bool(server.questions) or process.poll() is not None)
        ended = interrupt(process)
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == "fovea: interrupted\n"


def test_the_command_imports_no_torch() -> None:
    """A load generator may run on a machine without an engine."""
    code = (
        "import sys, fovea.bench.session, fovea.bench.plot; "
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.split() == ["False", "False"]
