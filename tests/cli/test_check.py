"""fovea models --check: a table for people, an object for programs, and an exit code for scripts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fovea.cli.models import FACTS, check_table, verdict
from fovea.engine.check import Finding, Report
from tests.cli.support import Caller
from tests.support.checkpoints import write


def test_a_folder_that_would_load(fovea: Caller, tiny: Path) -> None:
    outcome = fovea("models", "--check", tiny)
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert outcome.out.splitlines()[-1] == "This checkpoint would load."
    for words in ("Qwen3-VL", "qwen3_vl", "float32", "KV of a token", "tokens of a 1024x768 image"):
        assert words in outcome.out
    assert "states of a sequence" not in outcome.out


def test_a_hybrid_has_states_and_a_mixture_has_experts(fovea: Caller, tmp_path: Path) -> None:
    outcome = fovea("models", "--check", write("qwen3_5_moe", tmp_path))
    assert outcome.code == 0
    assert "states of a sequence" in outcome.out
    assert "experts of a layer          6, 2 per token" in outcome.out


def test_the_bundled_model(fovea: Caller) -> None:
    report = fovea("models", "--check", "fovea-tiny", "--json").json
    assert report["loads"] is True
    assert report["name"] == "fovea-tiny"
    assert report["errors"] == report["warnings"] == report["unchecked"] == []
    assert set(report["facts"]) <= set(FACTS)
    assert report["facts"]["parameters"] == 8820864


def test_a_folder_that_would_not_load(fovea: Caller, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "copy")
    (folder / "preprocessor_config.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    outcome = fovea("models", "--check", folder)
    assert (outcome.code, outcome.err) == (1, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    text = " ".join(outcome.out.split())
    assert "['pytorch_model.bin'] are pickles, which are not read: convert them" in text
    assert "has no preprocessor_config.json" in text
    assert text.endswith("This checkpoint does not load: 2 errors.")
    outcome = fovea("models", "--check", folder, "--json")
    assert outcome.code == 1
    assert [error["part"] for error in outcome.json["errors"]] == ["weights", "images"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--check", "/no/such/place"), "neither a folder, a GGUF file"),
        (("--check", "org/name"), "'org/name' is not on this machine"),
        (("--check", "fovea-tiny", "--revision", "main"), "is a folder; revisions are those of hub ids"),
        (("--check", "fovea-tiny", "--markdown"), "--markdown is for the list of models"),
        (("--revision", "main"), "--revision is for --check"),
    ],
)
def test_wrong_words_are_usage_errors(fovea: Caller, words: tuple[str, ...], message: str) -> None:
    outcome = fovea("models", *words)
    assert outcome.code == 2
    assert message in outcome.error_line
    assert outcome.out == ""


def test_text_of_a_checkpoint_cannot_control_the_terminal() -> None:
    """Names of tensors and tokens are a stranger's text; they are printed without control characters."""
    report = Report(
        "x\x1b[2J", Path("/f"), errors=[Finding("weights", "tensor '\x1b[31m\u202e' " + "y" * 300)]
    )
    text = check_table(report)
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert max(map(len, text.splitlines())) <= 80
    assert json.loads(json.dumps(report.as_json()))["errors"][0]["message"].startswith("tensor '\x1b")


def test_the_verdict_says_what_is_known() -> None:
    report = Report("x", Path("/f"), unchecked=[Finding("weights", "no file")])
    assert verdict(report) == "No error was found, but not everything was checked."
    report.add_error("config", "no")
    assert verdict(report) == "This checkpoint does not load: 1 error."
