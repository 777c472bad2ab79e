"""Results as text and as JSON, the comparison with an earlier run, and charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.bench.measure import Bounds, Failure, Round, Spread, Summary, by_label
from fovea.bench.plot import check_plot, draw
from fovea.bench.report import VERSION, compare, format_result, read_results, request_rows
from fovea.bench.run import WorkloadResult, notes_on
from fovea.bench.sla import Verdict
from fovea.core.errors import ConfigError
from tests.bench.support import sample

NAN = float("nan")


def result(name: str = "open 2/s", scale: float = 1.0, verdicts: tuple[Verdict, ...] = ()) -> WorkloadResult:
    samples = [
        sample(scale, 1.5 * scale, 2 * scale, label="text"),
        sample(2 * scale, 3 * scale, label="new image"),
        sample(failure=Failure("http 429", "full")),
    ]
    rounds = [Round(samples, {"stall_ms": 10 * scale})]
    classes = {label: Summary.of(part, Bounds()) for label, part in by_label(rounds).items()}
    summary = Summary.of(rounds, Bounds())
    return WorkloadResult(
        name, "a load", True, rounds, summary, classes, Spread.of([]), ["mind this"], 2.0, verdicts
    )


def as_document(*results: WorkloadResult, **settings: Any) -> dict[str, Any]:
    entries = json.loads(json.dumps([one.as_dict() for one in results]))
    return {"fovea_bench": VERSION, "settings": settings, "results": entries}


def test_format_result() -> None:
    text = format_result(
        result(
            verdicts=(
                Verdict("ttft_p95_ms", 2000, 2500, True, True),
                Verdict("requests_per_s", 1, 50, False, False),
                Verdict("cost_per_request", NAN, 1, True, None),
            )
        )
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "open 2/s: a load"
    assert lines[1].startswith(
        "3 requests in 3.0 s, 1 failed; 1.67 tokens/s (1.67 to 1.67), 0.667 requests/s;"
    )
    for line in (
        "p50 p90 p95 p99 longest",
        "TTFT ms 1000 2000 2000 2000 2000",
        "gap ms 500.0 1000 1000 1000 1000",
        "TTFT ms, new image 2000 2000 2000 2000 2000",
        "stall_ms 10.0",
        "error: 1 x http 429; the first: full",
        "note: mind this",
        "met ttft_p95_ms 2000 at most 2500",
        "MISSED requests_per_s 1 at least 50",
        "not tested cost_per_request - at most 1",
    ):
        assert line in lines


def test_result_as_json() -> None:
    document = json.loads(json.dumps(result().as_dict(), allow_nan=False))
    assert document["summary"]["errors"] == {"http 429": [1, "full"]}
    assert document["classes"]["all"]["ttft"]["p50"] is None
    assert document["offered_per_s"] == 2.0
    assert document["client_core_share"] is None


def test_request_rows() -> None:
    first, _, third = json.loads(json.dumps(request_rows(result()), allow_nan=False))
    assert first == {
        "round": 0, "class": "text", "due_s": 0.0, "late_ms": 0.0, "ttft_ms": 1000.0, "end_to_end_ms": 2000.0,
        "longest_gap_ms": 500.0, "tokens": 3, "error": None,
    }  # fmt: skip
    assert (third["error"], third["ttft_ms"]) == ("http 429", None)


def test_compare_gives_ratios_of_new_to_old() -> None:
    new, old = as_document(result(scale=0.5), result("chat")), as_document(result(), result("cold"))
    lines, rows = compare(new, old)
    ratios = {row["what"]: row["ratio"] for row in rows}
    assert {row["workload"] for row in rows} == {"open 2/s"}, "only the workload that both runs have"
    assert ratios["ttft p50"] == ratios["gap p99"] == ratios["stall_ms"] == 0.5
    assert ratios["tokens_per_s"] == pytest.approx(2.0)
    assert any(line.split() == ["open", "2/s,", "ttft", "p50", "1000", "500.0", "0.50x"] for line in lines)


def test_compare_notes_different_settings_except_the_nonce() -> None:
    lines, _ = compare(as_document(result(), seed=1, nonce="a"), as_document(result(), seed=2, nonce="b"))
    assert lines[-1] == "note: the two runs differ in seed"
    lines, rows = compare(as_document(result()), as_document(result("cold")))
    assert (lines, rows) == (["the two runs have no workload in common"], [])


def test_read_results_from_a_file_or_from_printed_output(tmp_path: Path) -> None:
    path, document = tmp_path / "old.json", as_document(result())
    path.write_text(json.dumps(document, indent=1))
    assert read_results(path) == document
    path.write_text(f"a table\n{json.dumps(document)}\n")
    assert read_results(path) == document


@pytest.mark.parametrize("text", ["", "words", "{}", '{"fovea_bench": 99}', "[1]"])
def test_read_results_refuses_other_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no results of fovea bench"):
        read_results(path)


@pytest.mark.parametrize(
    ("late_s", "lag_s", "core_share", "messages"),
    [
        (0.001, 0.001, 0.79, []),
        (0.001, 0.001, NAN, []),
        (0.05, 0.001, 0.1, ["the load generator was late: requests left up to 50 ms after they were due"]),
        (0.001, 0.05, 0.1, ["the load generator's own loop was late by up to 50 ms"]),
        (0.001, 0.001, 0.934, ["the load generator itself was at its limit: it used 93% of one core"]),
    ],
)
def test_notes_on_a_slow_load_generator(
    late_s: float, lag_s: float, core_share: float, messages: list[str]
) -> None:
    summary = Summary.of([Round([sample(1.0, tokens=1, sent_at=late_s)])], Bounds())
    notes = notes_on(summary, Spread.of([lag_s]), core_share, usage=True)
    assert [note.startswith(message) for note, message in zip(notes, messages, strict=True)] == [True] * len(
        messages
    )


def test_draw_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for results in ([result("cold")], [result("open 1/s"), result("open 4/s", 2.0)]):
        draw(tmp_path / "a.png", results, "a title")
        with Image.open(tmp_path / "a.png") as image:
            assert image.width > image.height > 500
            assert len(set(image.convert("L").resize((64, 64)).tobytes())) > 10, "something is drawn"
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(tmp_path / "none" / "a.png", [result()], "")


def test_check_plot_names_accepted_formats() -> None:
    with pytest.raises(
        ConfigError, match=r"--plot is 'a.jpg'; accepted: a name that ends in .png, .svg, .pdf"
    ):
        check_plot(Path("a.jpg"))
