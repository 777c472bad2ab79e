"""fovea profile on the bundled model: stages that add up, lower bounds, files, and errors."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fovea.kernels.calibrate import PLAIN, Machine
from fovea.observe.profile import STAGES, WAITING
from tests.cli.support import FORKED, SHORT, Caller, Outcome, finish
from tests.support.forks import Fork

pytestmark = pytest.mark.kernels

WITH_BOUND = {
    "fetch", "image decode", "resize", "patchify", "encoder", "projector", "prefill", "mixed step",
    "decode step", "head", "sampling",
}  # fmt: skip


SHORT_CALIBRATION = """
import fovea.kernels.calibrate as calibrate
calibrate.TRY_S, calibrate.TRIES, calibrate.CPU_PRODUCT, calibrate.CPU_ROWS = 0.0, 1, (256, 1024), (256,)
"""
"""No figure of the machine is asserted, so one call with small matrices is enough."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def outcome(files: Path) -> Outcome:
    """One run for all tests, in a process of its own, so that calibration and engine have all its threads."""
    words = (
        "profile", "--side", 300, "--tokens", 12, "--repeats", 2, "--requests", 4, "--concurrency", 2,
        "--threads", 1, "--json", "--trace", files / "trace.json", "--plot", files / "bars.png",
    )  # fmt: skip
    variables = os.environ | SHORT | {"FOVEA_KV_CACHE_MIB": "16"}
    done = finish(Fork(SHORT_CALIBRATION + FORKED, [str(word) for word in words], variables))
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def profile(outcome: Outcome) -> dict[str, Any]:
    return json.loads(outcome.out.splitlines()[-1])  # type: ignore[no-any-return]


def test_stages_of_one_request_add_up_to_it(profile: dict[str, Any]) -> None:
    one = profile["parts"][0]
    assert (one["requests"], one["tokens"]) == (1, 12)
    path = sum(stage["path_s"] for stage in one["stages"])
    assert path == pytest.approx(one["wall_s"])
    waiting = sum(stage["path_s"] for stage in one["stages"] if stage["stage"] == WAITING)
    assert 0 < one["attributed"] == pytest.approx(1 - waiting / one["wall_s"])
    assert one["ttft_s"] < one["wall_s"]


def test_every_stage_is_measured(profile: dict[str, Any]) -> None:
    one, load = profile["parts"]
    names = [stage["stage"] for stage in one["stages"]]
    assert names == [name for name in (*STAGES, WAITING) if name != "mixed step"]
    assert load["requests"] == 4
    assert {stage["stage"] for stage in load["stages"]} <= {*STAGES, WAITING}
    calls = {stage["stage"]: stage["calls"] for stage in one["stages"]}
    assert calls["fetch"] == calls["image decode"] == calls["tokenize"] == calls["patchify"] == 1
    assert calls["sampling"] == calls["detokenize"] == calls["head"] == 12
    assert calls["decode step"] == 11


def test_which_stages_have_a_lower_bound(profile: dict[str, Any]) -> None:
    machine = profile["machine"]
    assert machine["bandwidth"] > 0
    assert set(machine["peaks"]) == {profile["model"]["dtype"]}
    for part in profile["parts"]:
        bounds = {stage["stage"]: stage["floor_s"] for stage in part["stages"]}
        assert {name for name, bound in bounds.items() if bound is not None} == WITH_BOUND & set(bounds)
        assert part["floor_s"] == pytest.approx(sum(filter(None, bounds.values())))
        for stage in part["stages"]:
            if stage["floor_s"]:
                assert stage["floor_s"] >= max(stage["memory_s"], stage["arithmetic_s"]) * 0.999
                assert stage["ratio"] == pytest.approx(stage["busy_s"] / stage["floor_s"])


def test_the_load_demands_as_much_as_its_requests(profile: dict[str, Any]) -> None:
    """No cache helps: the load has four times the bounds of one image, and head rows for every token."""
    one, load = ({stage["stage"]: stage for stage in part["stages"]} for part in profile["parts"])
    for name in ("fetch", "image decode", "patchify", "encoder", "projector"):
        assert load[name]["floor_s"] == pytest.approx(4 * one[name]["floor_s"])
    assert load["sampling"]["memory_s"] == pytest.approx(4 * one["sampling"]["memory_s"])


def test_table_and_chart(outcome: Outcome, files: Path) -> None:
    lines = outcome.out.splitlines()
    assert lines[0].startswith("fovea-tiny: 8.8 M parameters")
    for name in ("server", "encoder", "decode step", "waiting", "all"):
        assert sum(line.strip().startswith(name) for line in lines) == 2
    assert (files / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_no_figure_of_the_table_has_two_definitions(outcome: Outcome, profile: dict[str, Any]) -> None:
    """`x bound` was busy time over bound for a stage, and the whole time over all bounds in the last row.

    The first line of the load called the time of all requests, divided by their number, that of a request.
    """
    lines, unwrapped = outcome.out.splitlines(), outcome.out.replace("\n    ", " ").splitlines()
    assert max(map(len, lines[:-1])) <= 80
    one, load = profile["parts"]
    for part, how in ((one, "one request: "), (load, "steady load: 4 requests in ")):
        title = next(line for line in unwrapped if line.startswith(how))
        assert title.startswith(f"{how}{part['wall_s'] * 1e3:.1f} ms")
        assert f"; {part['wall_s'] / part['floor_s']:.2f} times the sum of the lower bounds" in title
    rows = [line.split() for line in lines if line.startswith("  all ")]
    assert [len(row) for row in rows] == [3, 3]
    for row, part in zip(rows, (one, load), strict=True):
        assert float(row[1]) == pytest.approx(part["wall_s"] * 1e3 / part["requests"], abs=0.01)
    decode = next(line.split() for line in lines if line.startswith("  decode step"))
    [stage] = [stage for stage in one["stages"] if stage["stage"] == "decode step"]
    assert float(decode[-1]) == pytest.approx(stage["busy_s"] / stage["floor_s"], abs=0.01)


@pytest.mark.usefixtures("outcome")  # which writes the file
def test_trace_is_nested_complete_events(files: Path) -> None:
    """Spans of one track are disjoint or nested, never overlapping: viewers need this to stack them."""
    trace = json.loads((files / "trace.json").read_text())
    tracks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["name"] in {*STAGES, WAITING}
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) >= 5
    for spans in tracks.values():
        open_ends: list[float] = []
        for start, end in spans:
            while open_ends and open_ends[-1] <= start + 0.002:  # times are rounded to nanoseconds
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.002
            open_ends.append(end)
    requests = [event["name"] for event in trace["traceEvents"] if event["ph"] == "b"]
    assert requests == [f"alone {n}" for n in range(2)] + [f"load {n}" for n in range(4)]


def test_text_alone(fovea: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1e10, {PLAIN: 1e11}, 1, 1 << 20, "a machine that was measured before")
    monkeypatch.setattr("fovea.cli.profile.measure.calibrate", lambda *_, **__: machine)
    outcome = fovea("profile", "--side", 0, "--tokens", 3, "--repeats", 1, "--requests", 0, "--json")
    assert outcome.code == 0, outcome.err
    (one,) = json.loads(outcome.out.splitlines()[-1])["parts"]
    names = {stage["stage"] for stage in one["stages"]}
    assert {"tokenize", "prefill", "decode step", "server", "client"} <= names
    assert not names & {"fetch", "image decode", "patchify", "encoder", "projector"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", 1), "--tokens: tokens is 1; accepted: 2 to 100000"),
        (("--concurrency", 0), "--concurrency: concurrency is 0; accepted: 1 to 1024"),
        (
            ("--image", "a.png", "--side", 64),
            "--side: side is for a generated image, but a file is given",
        ),
        (("--image", "/nowhere/a.png"), "/nowhere/a.png cannot be read: No such file or directory"),
        (
            ("--plot", "bars.gif"),
            "--plot is 'bars.gif'; accepted: a name that ends in .png, .svg, .pdf",
        ),
        (("--trace", "/nowhere/t.json"), "/nowhere/t.json cannot be written: No such file or directory"),
        (
            ("--quantization", "int3"),
            "--quantization: quantization is 'int3'; accepted: none, int8, int4, fp8, dequantize",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_errors_before_a_model_is_loaded(
    fovea: Caller, words: tuple[object, ...], message: str
) -> None:
    outcome = fovea("profile", "/no/such/model", *words)
    assert outcome.code == 2
    assert outcome.error_line == f"fovea: {message}"


def test_a_file_that_is_no_image(fovea: Caller, folder: Path) -> None:
    outcome = fovea("profile", "--image", folder / "no.png")
    assert outcome.code == 2
    assert "accepted" in outcome.error_line or "image" in outcome.error_line
