"""fovea plan: tables, JSON, files, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.cli.deploy import known_settings
from fovea.cli.plan import result
from fovea.deploy.read import read_spec
from fovea.engine.vision.token_rules import known_rule
from fovea.planner.shape import find, known_models
from tests.cli.support import Caller
from tests.support.checkpoints import write
from tests.support.hub import hub_cache
from tests.support.thorough import others_slow

FAST = ("--no-simulation", "--no-advice", "--hardware", "H100-SXM", "--devices", "1,8")
MODEL = "Qwen/Qwen3-VL-8B-Instruct"
ONE_PER_FAMILY = sorted(
    {shape.family: name for name in known_models() if (shape := find(name)) and known_rule(name)}.values()
)
CHOSEN = (
    "LiquidAI/LFM2-VL-450M", "OpenGVLab/InternVL3_5-8B", "Qwen/Qwen3-VL-30B-A3B-Thinking", "Qwen/Qwen3.8-27B",
    "google/gemma-3-4b-it", "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "meta-llama/Llama-3.2-11B-Vision-Instruct",
)  # fmt: skip
"""Families whose decoders, images or memory differ in kind."""

WORKLOAD = """
rate = 2.0
system = 100
ttft_ms = 3000
itl_ms = 100
[[request]]
name = "invoice"
images = [[1240, 1754]]
json = 1.0
[[request]]
name = "chat"
share = 3
follow_ups = 2
seen = 0.5
images = [[640, 480]]
"""


@pytest.mark.parametrize("model", others_slow(ONE_PER_FAMILY, CHOSEN))
def test_every_family_has_a_plan(fovea: Caller, model: str) -> None:
    outcome = fovea("plan", model, "--image", "1024x768", "--json", *FAST)
    assert outcome.code == 0, outcome.err
    plan = outcome.json
    assert plan["fovea_plan"] == 1
    assert plan["model"]["name"] == find(model).name  # type: ignore[union-attr]
    request, best = plan["requests"][0], plan["best"]
    assert request["visual"] > 0
    assert best["replicas"] >= 1
    assert best["room"] >= 1
    assert best["memory"]["total"] > sum(best["memory"]["weights"].values())
    assert all(seconds > 0 for seconds in best["stages"][0].values())
    assert [entry["clients"] for entry in best["sweep"]][:3] == [1, 2, 4][: best["room"]]
    assert best["price_per_request"] > 0
    assert best["joules_per_request"] > 0
    assert best["reasons"]


def test_tables_of_a_workload_file_fit_a_terminal(
    fovea: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "shop.toml"
    path.write_text(WORKLOAD, encoding="utf-8")
    outcome = fovea(
        "plan", MODEL, "--workload", path, "--hardware", "L4", "--hardware", "H100-SXM", "--no-simulation"
    )
    assert outcome.code == 0, outcome.err
    assert max(len(line) for line in outcome.out.splitlines()) <= 80
    for word in ("invoice", "chat", "Recommended", "simulated", "clients", "encoder cache", "Engine"):
        assert word in outcome.out
    assert "…" not in outcome.out
    assert "1240x1754" in outcome.out


def test_json_has_the_simulation_and_everything_else(fovea: Caller, tmp_path: Path) -> None:
    path = tmp_path / "shop.toml"
    # Short answers, because the simulation makes every step of every answer.
    path.write_text(WORKLOAD.replace("[[request]]", "[[request]]\nanswer = 4"), encoding="utf-8")
    words = ("--workload", path, "--hardware", "H100-SXM", "--devices", "1,2", "--json")
    plan = fovea("plan", MODEL, *words).json
    assert plan["simulated"]["requests"] >= 200
    assert {saving["name"] for saving in plan["savings"]} == {"encoder cache", "prefix cache"}
    assert plan["split"]["encoders"] >= 1
    assert plan["advice"]["ranked"]
    assert [entry["drafts"] for entry in plan["speculation"]] == [1, 2, 3, 5, 8]
    json.dumps(plan, allow_nan=False)


def test_files_are_written(fovea: Caller, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    outcome = fovea(
        "plan", "Qwen/Qwen3-VL-2B-Instruct", "--image", "640x480", "--emit", folder, "--no-simulation",
        "--no-advice", "--hardware", "RTX-4090", "--devices", "1",
    )  # fmt: skip
    assert outcome.code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["deploy.toml", "engine.toml"]
    assert read_spec(folder / "deploy.toml", known_settings()).pools[0].gpu == "RTX-4090"
    assert "engine.toml" in outcome.err


def test_a_plan_is_drawn(fovea: Caller, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart = tmp_path / "plan.svg"
    assert fovea("plan", MODEL, "--image", "640x480", "--plot", chart, *FAST).code == 0
    assert chart.read_text(encoding="utf-8").startswith("<?xml")


def test_impossible_targets_are_explained(fovea: Caller) -> None:
    outcome = fovea("plan", MODEL, "--image", "1024x768", "--ttft-ms", "1", *FAST)
    assert outcome.code == 1
    assert "No configuration meets the targets" in outcome.out
    assert "the target is 1 ms" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("Qwen/Qwen3-VL-8B-Instrukt",), "did you mean Qwen/Qwen3-VL-8B-Instruct"),
        ((), "which model?"),
        ((MODEL, "--image", "big"), "accepted: width and height in pixels, such as 1024x768"),
        ((MODEL, "--video", "x:1x1"), "accepted: frames and size"),
        ((MODEL, "--devices", "two"), "accepted: numbers from 1 to 1024"),
        ((MODEL, "--hardware", "H1000"), "hardware 'H1000' is not known"),
        ((MODEL, "--rate", "-1"), "rate is -1.0; accepted: 1e-06 to 1000000"),
        ((MODEL, "--percentile", "100"), "percentile is 100.0; accepted: 50 to 99.9"),
        ((MODEL, "--method", "darts"), "did you mean 'dart'?"),
        ((MODEL, "--workload", "no.toml"), "workload file no.toml cannot be read"),
    ],
)
def test_wrong_input_is_explained(fovea: Caller, words: tuple[str, ...], message: str) -> None:
    outcome = fovea("plan", *words)
    assert outcome.code == 2
    assert message in outcome.error_line


def test_lists_and_help(fovea: Caller) -> None:
    assert MODEL in fovea("plan", "--models").out.splitlines()
    assert "H100-SXM" in fovea("plan", "--list-hardware").out.splitlines()
    text = fovea("plan", "--help").out
    for flag in ("--workload", "--hardware-file", "--emit", "--check", "--no-simulation"):
        assert flag in text


def test_a_model_in_the_local_cache_of_the_hub_is_planned_by_its_own_files(
    fovea: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id that the table does not know was refused, although its files lay on the machine."""
    written = write("qwen3_vl", tmp_path / "checkpoint")
    snapshot, _ = hub_cache(written, tmp_path)
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    outcome = fovea("plan", "org/name", "--image", "64x64", "--json", *FAST)
    assert outcome.code == 0, outcome.err
    assert outcome.json["model"]["name"] == "org/name"
    assert outcome.json["requests"][0]["visual"] > 0
    absent = fovea("plan", "org/other")
    assert absent.code == 2
    assert "nor in the local cache of the hub" in absent.err


def test_a_plan_says_whether_encoders_are_worth_it(fovea: Caller) -> None:
    base = ("plan", MODEL, *FAST, "--quantization", "none")
    text = fovea(*base)
    assert "no request has an image to encode" in " ".join(text.out.split())
    image = fovea(*base, "--image", "1024x768", "--rate", 40)
    assert "Encoders apart: no, let all " in " ".join(image.out.split())


def test_a_split_is_simulated_before_it_is_recommended(
    fovea: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "CONVERSATIONS", 10)
    monkeypatch.setattr(result, "CONVERSATIONS_PER_REPLICA", 10)
    workload = tmp_path / "mix.toml"
    workload.write_text(
        "rate = 5.0\nitl_ms = 30\npercentile = 99\n"
        "[[request]]\nname = 'chat'\nshare = 0.9\ntext = 200\nanswer = 300\n"
        "[[request]]\nname = 'ask'\nshare = 0.1\nimages = [[448, 448], [448, 448], [448, 448], [448, 448]]\n"
    )
    words = ("plan", "Qwen/Qwen2.5-VL-7B-Instruct", "--hardware", "L40S", "--quantization", "none",
             "--devices", "1", "--workload", workload, "--no-advice")  # fmt: skip
    folder = tmp_path / "files"
    formulas = fovea(*words, "--no-simulation", "--emit", folder)
    assert "(by formulas alone)" in " ".join(formulas.out.split())
    assert 'role = "encode"' in (folder / "encode.toml").read_text()
    played = json.loads(fovea(*words, "--json").out.splitlines()[-1])["split"]
    assert played["played"] is not None
    assert played["recommended"] == (played["played"]["met"] and not played["played"]["integrated_met"])
