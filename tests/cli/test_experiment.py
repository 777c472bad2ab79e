"""fovea experiment: lists, shows and decides experiments of a state file, also of a running gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.gateway.experiments.experiments import SPLIT, Assignment, Experiments
from tests.cli.support import Caller
from tests.gateway.experiments.support import a_config, an_outcome

TOML = """
[experiments]
folder = "state"
[[experiment]]
name = "v2"
model = "vlm"
variants = [{ name = "old", model = "vlm-1", weight = 90 }, { name = "new", model = "vlm-2", weight = 10 }]
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state file with 60 requests of each variant; a fifth of those of `new` failed."""
    config = a_config(tmp_path / "state")
    experiments = Experiments(config)
    for number in range(60):
        for variant in ("old", "new"):
            failed = variant == "new" and number % 5 == 0
            outcome = an_outcome(number, failed=failed, request_id=f"{variant}-{number}")
            experiments.record(Assignment("v2", variant, "m", SPLIT), outcome)
    for rating in range(1, 6):
        experiments.rate(f"new-{rating}", rating)
    experiments.close()
    return config.path


def test_list(state: Path, fovea: Caller) -> None:
    assert fovea("experiment", "list", "--state", state).out == "v2  vlm  active  old 60, new 60\n"
    (row,) = fovea("experiment", "list", "--state", state, "--json").json
    assert (row["name"], row["requests"], row["removed"]) == ("v2", {"old": 60, "new": 60}, [])


def test_show_json(state: Path, fovea: Caller) -> None:
    shown = fovea("experiment", "show", "v2", "--state", state, "--json").json
    old, new = shown["variants"]
    assert (old["requests"], old["error_rate"], new["error_rate"]) == (60, 0.0, 0.2)
    assert (new["rating"], new["ratings"], old["rating"]) == (3.0, 5, None)
    assert old["cost_per_request"] == pytest.approx(0.002015, rel=0.01)
    assert old["visual_tokens"] == 60_000
    assert old["p50_s"] == pytest.approx(4.0, rel=0.02)
    (verdict,) = shown["verdicts"]
    assert (verdict["variant"], verdict["decision"]) == ("new", "continue")
    rating = next(each for each in verdict["reasons"] if each["name"] == "rating")
    assert rating["interval"] == {"low": 0.0, "high": None}, "JSON has no infinity"


def test_show_table(state: Path, fovea: Caller) -> None:
    """Its 13 columns once had heads such as "var…" at 80 columns."""
    out = fovea("experiment", "show", "v2", "--state", state).out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert out.startswith("v2: model vlm, active since ")
    assert "new against old" in out
    assert "verdict: continue: p95: no difference is certain" in out
    figures = {line[:16].strip(): line[16:].split() for line in out.splitlines()}
    assert figures["errors"] == ["0.00%", "20.00%"]
    assert figures["visual tokens"] == ["1,000", "1,000"]
    assert figures["rating"] == ["-", "3.00", "(5)"]


def test_decide(state: Path, fovea: Caller) -> None:
    assert (
        fovea("experiment", "decide", "v2", "--promote", "new", "--state", state).out
        == "v2: promoted (new)\n"
    )
    assert "promoted (new) since" in fovea("experiment", "show", "v2", "--state", state).out
    rolled = fovea("experiment", "decide", "v2", "--roll-back", "--state", state, "--json").json
    assert (rolled["state"], rolled["promoted"], rolled["reason"]) == (
        "rolled_back",
        None,
        "decided by a person",
    )
    assert fovea("experiment", "decide", "v2", "--reset", "--state", state).out == "v2: active\n"
    (row,) = fovea("experiment", "list", "--state", state, "--json").json
    assert row["requests"] == {"old": 0, "new": 0}


def test_the_state_file_of_a_configuration(state: Path, fovea: Caller, tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(TOML)
    assert fovea("experiment", "list", "--config", config).out == "v2  vlm  active  old 60, new 60\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "v3", "--state", "{state}"), "there is no experiment 'v3'; accepted: v2"),
        (("decide", "v2", "--promote", "x", "--state", "{state}"), "--promote is 'x'; accepted: old, new"),
        (("list", "--state", "{folder}/none.sqlite"), "a gateway with experiments writes it"),
        (("list", "--config", "{folder}/none.toml"), "none.toml cannot be read: No such file"),
    ],
)
def test_errors(state: Path, fovea: Caller, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    outcome = fovea("experiment", *(word.format(state=state, folder=tmp_path) for word in words))
    assert outcome.code == 2
    assert message in outcome.error_line


def test_a_configuration_that_is_no_toml(fovea: Caller, tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("= 3")
    assert "is not TOML" in fovea("experiment", "list", "--config", config).error_line
