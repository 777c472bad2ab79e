"""fovea advise: the advice of the rules, in short, with sources, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.cli.main import main


def test_the_best_engine_comes_first_and_its_reasons_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--device", "browser"]) == 0
    out = capsys.readouterr().out
    assert "Engine: MLC LLM" in out
    assert "ruled out: Fovea" in out


def test_sources_name_an_address_and_a_day_for_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--device", "x86-cpu", "--sources"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert main(["advise", "--device", "x86-cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rules = [
        rule for one in found["ranked"] for kind in ("ruled_out", "for", "against") for rule in one[kind]
    ]
    assert len(rules) > 10
    assert text.replace(" ", "").count(", 20".replace(" ", "")) >= len(rules)
    assert found["best"] == [found["ranked"][0]["engine"]]


def test_the_environment_of_a_server_says_nothing_about_the_situation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FOVEA_DEVICE=cuda is where a server computes; here it was read as a wrong kind of device."""
    monkeypatch.setenv("FOVEA_DEVICE", "cuda")
    assert main(["advise", "--device", "mobile"]) == 0
    assert main(["advise"]) == 0
    assert "Engine:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "gpu"], "--device: device is 'gpu'; accepted: nvidia-gpu"),
        (["--rules", "/nowhere.toml"], "/nowhere.toml cannot be read"),
    ],
)
def test_wrong_input_is_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *flags]) == 2
    assert message in capsys.readouterr().err


def test_own_rules_replace_the_built_in_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fovea.planner.advisor as advisor

    own = tmp_path / "rules.toml"
    text = advisor.FILE.read_text(encoding="utf-8")
    own.write_text(
        text.replace('name = "vLLM"', 'name = "House"').replace('engine = "vLLM"', 'engine = "House"')
    )
    assert main(["advise", "--device", "amd-gpu", "--rules", str(own)]) == 0
    assert "Engine: House" in capsys.readouterr().out
