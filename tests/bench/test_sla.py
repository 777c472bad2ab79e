"""Service-level targets: the files that define them, and when a target is met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.bench.measure import Bounds, Failure, Round, Summary
from fovea.bench.sla import DEFAULT_SLA, KNOWN_TARGETS, Sla, judge, read_sla
from fovea.core.errors import ConfigError
from tests.bench.support import sample

TOML = """
source = "ours"
[good]
ttft_ms = 300
[targets]
ttft_p95_ms = 250.0
error_rate = 0
"""


def summary(
    *seconds: float, failures: int = 0, image_tokens: int | None = None, unreduced_tokens: int | None = None
) -> Summary:
    tokens = {"image_tokens": image_tokens, "unreduced_tokens": unreduced_tokens}
    answers = [sample(*(at / 2, at), images=image_tokens is not None, **tokens) for at in seconds]
    return Summary.of(
        [Round([*answers, *(sample(failure=Failure("timeout", "")) for _ in range(failures))])], Bounds()
    )


def verdicts(targets: dict[str, float], figures: Summary, **other: float) -> dict[str, bool | None]:
    return {verdict.name: verdict.met for verdict in judge(Sla("", Bounds(), targets), figures, **other)}


def test_toml_and_json_are_equivalent(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.json").write_text(
        json.dumps(
            {
                "source": "ours",
                "good": {"ttft_ms": 300},
                "targets": {"ttft_p95_ms": 250.0, "error_rate": 0},
            }
        )
    )
    expected = Sla("ours", Bounds(ttft_ms=300), {"ttft_p95_ms": 250.0, "error_rate": 0})
    assert read_sla(tmp_path / "a.toml") == read_sla(tmp_path / "a.json") == expected


def test_empty_file_has_no_targets_and_is_its_own_source(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("")
    assert read_sla(tmp_path / "a.toml") == Sla(str(tmp_path / "a.toml"), Bounds(), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "is not TOML"),
        ("goods = 1", "unknown key 'goods'; did you mean 'good'?"),
        ("good = 1", "good is 1; accepted: a table [good] of names and numbers"),
        ("[good]\nttft = 1", "unknown key 'ttft'; did you mean 'ttft_ms'?"),
        ("[good]\nttft_ms = true", "ttft_ms is True; accepted: a number from 0 on"),
        ("[targets]\nerrors_rate = 1", "unknown target 'errors_rate'; did you mean 'error_rate'?"),
        ("[targets]\ngood = -1", "good is -1; accepted: a number from 0 on"),
        ("[targets]\ngood = nan", "good is nan"),
        ("source = 1", "source is 1; accepted: a text in quotes"),
    ],
)
def test_errors_name_the_wrong_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_sla(path)
    assert raised.value.message.startswith(f"{path}")
    assert message in raised.value.message


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "b.json").write_text("{")
    for name, message in (("a", "is not an object"), ("b", "is not JSON"), ("c", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            read_sla(tmp_path / f"{name}.json")


def test_target_is_met_at_its_limit() -> None:
    figures = summary(0.5)
    assert verdicts({"end_to_end_p99_ms": 500, "tokens_per_s": 4, "good": 1.0}, figures) == {
        "end_to_end_p99_ms": True, "tokens_per_s": True, "good": True,
    }  # fmt: skip
    assert verdicts({"end_to_end_p99_ms": 499, "tokens_per_s": 4.1}, figures) == {
        "end_to_end_p99_ms": False, "tokens_per_s": False,
    }  # fmt: skip


def test_error_rate() -> None:
    assert verdicts({"error_rate": 0.25}, summary(1, 1, 1, failures=1)) == {"error_rate": True}
    assert verdicts({"error_rate": 0.24}, summary(1, 1, 1, failures=1)) == {"error_rate": False}


def test_visual_tokens_saved() -> None:
    """A small picture saves nothing: only tokens that were left out count, as the server reports them."""
    sla = Sla("", Bounds(), {"visual_tokens_saved": 0.5})
    (verdict,) = judge(sla, summary(1, 1, image_tokens=64, unreduced_tokens=256))
    assert (verdict.value, verdict.met) == (0.75, True)
    (verdict,) = judge(sla, summary(1, 1, image_tokens=64, unreduced_tokens=64))
    assert (verdict.value, verdict.met) == (0.0, False)
    (verdict,) = judge(sla, summary(1, 1, image_tokens=64))
    assert verdict.met is None


def test_cost_per_request() -> None:
    (verdict,) = judge(Sla("", Bounds(), {"cost_per_request": 1}), summary(1, 2), 3600.0)
    assert (verdict.value, verdict.met) == (1.0, True), (
        "two seconds at a price of 1 per second, for two answers"
    )


def test_unmeasured_targets_are_neither_met_nor_missed() -> None:
    targets = {"cost_per_request": 1.0, "visual_tokens_saved": 0.3, "tpot_p50_ms": 5.0}
    assert verdicts(targets, summary()) == dict.fromkeys(targets)


def test_rate_targets_above_the_offered_rate_are_not_tested() -> None:
    figures = summary(1.0)
    assert verdicts({"requests_per_s": 50}, figures, offered_rate=2.0) == {"requests_per_s": None}
    assert verdicts({"requests_per_s": 50}, figures, offered_rate=60.0) == {"requests_per_s": False}
    assert verdicts({"requests_per_s": 50}, figures) == {"requests_per_s": False}


def test_every_known_target_can_be_judged() -> None:
    results = judge(
        Sla("", Bounds(), dict.fromkeys(KNOWN_TARGETS, 1.0)),
        summary(1.0, image_tokens=64, unreduced_tokens=64),
        1.0,
    )
    assert {verdict.name for verdict in results} == set(KNOWN_TARGETS)
    assert all(verdict.met is not None for verdict in results)


def test_default_targets() -> None:
    results = judge(DEFAULT_SLA, summary(*[0.1] * 60, image_tokens=128, unreduced_tokens=256), 0.35)
    assert {verdict.name: verdict.met for verdict in results} == dict.fromkeys(DEFAULT_SLA.targets, True)
