"""fovea profile on the bundled model: stages that add up, floors, the files, and what is wrong in one line."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fovea.observe.profile import STAGES, WAITING
from tests.cli.support import Caller, Outcome

WITH_FLOOR = {
    "fetch", "image decode", "resize", "patchify", "encoder", "projector", "prefill", "mixed step", "decode step", "head",
    "sampling",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def outcome(files: Path) -> Outcome:
    """One run for all tests, as a process of its own: calibration and engine have their threads to themselves."""
    from tests.cli.support import finish, start

    words = (
        "--side",
        300,
        "--tokens",
        12,
        "--repeats",
        3,
        "--requests",
        4,
        "--concurrency",
        2,
        "--threads",
        1,
    )
    process = start(
        "profile",
        *words,
        "--json",
        "--trace",
        files / "trace.json",
        "--plot",
        files / "bars.png",
        FOVEA_KV_CACHE_MIB="16",
    )
    done = finish(process)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def found(outcome: Outcome) -> dict[str, Any]:
    return json.loads(outcome.out.splitlines()[-1])  # type: ignore[no-any-return]


def test_stages_of_one_request_add_up_to_it(found: dict[str, Any]) -> None:
    one = found["parts"][0]
    assert (one["requests"], one["tokens"]) == (1, 12)
    path = sum(stage["path_s"] for stage in one["stages"])
    assert path == pytest.approx(one["wall_s"])
    waiting = sum(stage["path_s"] for stage in one["stages"] if stage["stage"] == WAITING)
    assert 0 < one["attributed"] == pytest.approx(1 - waiting / one["wall_s"])
    assert one["ttft_s"] < one["wall_s"]


def test_every_stage_is_there(found: dict[str, Any]) -> None:
    one, load = found["parts"]
    names = [stage["stage"] for stage in one["stages"]]
    assert names == [name for name in (*STAGES, WAITING) if name != "mixed step"]
    assert load["requests"] == 4
    assert {stage["stage"] for stage in load["stages"]} <= {*STAGES, WAITING}
    calls = {stage["stage"]: stage["calls"] for stage in one["stages"]}
    assert calls["fetch"] == calls["image decode"] == calls["tokenize"] == calls["patchify"] == 1
    assert calls["sampling"] == calls["detokenize"] == calls["head"] == 12
    assert calls["decode step"] == 11


def test_what_has_a_floor_and_what_has_none(found: dict[str, Any]) -> None:
    machine = found["machine"]
    assert machine["bandwidth"] > 0
    assert set(machine["peaks"]) == {found["model"]["dtype"]}
    for part in found["parts"]:
        floors = {stage["stage"]: stage["floor_s"] for stage in part["stages"]}
        assert {name for name, floor in floors.items() if floor is not None} == WITH_FLOOR & set(floors)
        assert part["floor_s"] == pytest.approx(sum(filter(None, floors.values())))
        for stage in part["stages"]:
            if stage["floor_s"]:
                assert stage["floor_s"] >= max(stage["memory_s"], stage["arithmetic_s"]) * 0.999
                assert stage["ratio"] == pytest.approx(stage["busy_s"] / stage["floor_s"])


def test_the_load_asks_for_as_much_as_so_many_requests(found: dict[str, Any]) -> None:
    """No cache knows them: four times the image's floors, and head rows for every token."""
    one, load = ({stage["stage"]: stage for stage in part["stages"]} for part in found["parts"])
    for name in ("fetch", "image decode", "patchify", "encoder", "projector"):
        assert load[name]["floor_s"] == pytest.approx(4 * one[name]["floor_s"])
    assert load["sampling"]["memory_s"] == pytest.approx(4 * one["sampling"]["memory_s"])


def test_table_and_chart(outcome: Outcome, files: Path) -> None:
    lines = outcome.out.splitlines()
    assert lines[0].startswith("fovea-tiny: 8.8 M parameters")
    for name in ("server", "encoder", "decode step", "waiting", "all"):
        assert sum(line.strip().startswith(name) for line in lines) == 2
    assert (files / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_trace_is_nested_complete_events(files: Path) -> None:
    """Within a track spans lie side by side or inside each other, never across: what viewers need to stack them."""
    trace = json.loads((files / "trace.json").read_text())
    tracks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["name"] in {*STAGES, WAITING}
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) >= 5
    for spans in tracks.values():
        around: list[float] = []
        for start, end in spans:
            while around and around[-1] <= start + 0.002:  # times are rounded to nanoseconds
                around.pop()
            assert not around or end <= around[-1] + 0.002
            around.append(end)
    requests = [event["name"] for event in trace["traceEvents"] if event["ph"] == "b"]
    assert requests == [f"alone {n}" for n in range(3)] + [f"load {n}" for n in range(4)]


def test_text_alone(fovea: Caller) -> None:
    made = fovea("profile", "--side", 0, "--tokens", 3, "--repeats", 1, "--requests", 0, "--json")
    assert made.code == 0, made.err
    (one,) = json.loads(made.out.splitlines()[-1])["parts"]
    names = {stage["stage"] for stage in one["stages"]}
    assert {"tokenize", "prefill", "decode step", "server", "client"} <= names
    assert not names & {"fetch", "image decode", "patchify", "encoder", "projector"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", 1), "--tokens: tokens is 1; accepted: 2 to 100000"),
        (("--concurrency", 0), "--concurrency: concurrency is 0; accepted: 1 to 1024"),
        (("--image", "a.png", "--side", 64), "--side: side is for a generated picture, but an image is given"),
        (("--image", "/nowhere/a.png"), "/nowhere/a.png cannot be read: No such file or directory"),
        (("--plot", "bars.gif"), "--plot is 'bars.gif'; accepted: a name that ends in .png, .svg, .pdf"),
        (("--trace", "/nowhere/t.json"), "/nowhere/t.json cannot be written: No such file or directory"),
        (("--quantization", "int3"), "--quantization: quantization is 'int3'; accepted: none, int8, int4, fp8"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    fovea: Caller, words: tuple[object, ...], said: str
) -> None:
    outcome = fovea("profile", "/no/such/model", *words)
    assert outcome.code == 2
    assert outcome.told == f"fovea: {said}"


def test_a_file_that_is_no_picture(fovea: Caller, folder: Path) -> None:
    outcome = fovea("profile", "--image", folder / "no.png")
    assert outcome.code == 2
    assert "accepted" in outcome.told or "image" in outcome.told
