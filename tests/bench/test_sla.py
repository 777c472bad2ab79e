"""Targets: what a file may say, and when one is met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.bench.measure import Bounds, Round, Summary
from fovea.bench.sample import Failure
from fovea.bench.sla import DOCUMENTED, KNOWN, Sla, judge, read_sla
from fovea.core.errors import ConfigError
from tests.bench.support import sample

TOML = """
source = "ours"
fixed_visual_tokens = 100
[good]
ttft_ms = 300
[targets]
ttft_p95_ms = 250.0
error_rate = 0
"""


def summary(*seconds: float, failures: int = 0, image_tokens: int | None = None) -> Summary:
    whole = [
        sample(*(at / 2, at), images=image_tokens is not None, image_tokens=image_tokens) for at in seconds
    ]
    return Summary.of(
        [Round([*whole, *(sample(failure=Failure("timeout", "")) for _ in range(failures))])], Bounds()
    )


def verdicts(targets: dict[str, float], found: Summary, **other: float) -> dict[str, bool | None]:
    return {verdict.name: verdict.met for verdict in judge(Sla("", Bounds(), targets), found, **other)}


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.json").write_text(
        json.dumps(
            {
                "source": "ours",
                "fixed_visual_tokens": 100,
                "good": {"ttft_ms": 300},
                "targets": {"ttft_p95_ms": 250.0, "error_rate": 0},
            }
        )
    )
    expected = Sla("ours", Bounds(ttft_ms=300), {"ttft_p95_ms": 250.0, "error_rate": 0}, 100)
    assert read_sla(tmp_path / "a.toml") == read_sla(tmp_path / "a.json") == expected


def test_an_empty_file_promises_nothing_and_is_its_own_source(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("")
    assert read_sla(tmp_path / "a.toml") == Sla(str(tmp_path / "a.toml"), Bounds(), {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = ", "is no TOML"),
        ("goods = 1", "unknown key 'goods'; did you mean 'good'?"),
        ("good = 1", "good is 1; accepted: names and numbers"),
        ("[good]\nttft = 1", "unknown key 'ttft'; did you mean 'ttft_ms'?"),
        ("[good]\nttft_ms = true", "ttft_ms is True; accepted: a number from 0 on"),
        ("[targets]\nerrors_rate = 1", "unknown target 'errors_rate'; did you mean 'error_rate'?"),
        ("[targets]\ngood = -1", "good is -1; accepted: a number from 0 on"),
        ("[targets]\ngood = nan", "good is nan"),
        ("source = 1", "source is 1; accepted: text"),
        ("fixed_visual_tokens = 0", "fixed_visual_tokens is 0; accepted: a whole number from 1 on"),
    ],
)
def test_a_wrong_file_is_told_by_its_key(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_sla(path)
    assert raised.value.message.startswith(f"{path}")
    assert told in raised.value.message


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "b.json").write_text("{")
    for name, told in (("a", "not an object"), ("b", "is no JSON"), ("c", "can not be read")):
        with pytest.raises(ConfigError, match=told):
            read_sla(tmp_path / f"{name}.json")


def test_a_target_is_met_at_its_limit() -> None:
    found = summary(0.5)
    assert verdicts({"end_to_end_p99_ms": 500, "tokens_per_s": 4, "good": 1.0}, found) == {
        "end_to_end_p99_ms": True, "tokens_per_s": True, "good": True,
    }  # fmt: skip
    assert verdicts({"end_to_end_p99_ms": 499, "tokens_per_s": 4.1}, found) == {
        "end_to_end_p99_ms": False, "tokens_per_s": False,
    }  # fmt: skip


def test_the_share_of_errors() -> None:
    assert verdicts({"error_rate": 0.25}, summary(1, 1, 1, failures=1)) == {"error_rate": True}
    assert verdicts({"error_rate": 0.24}, summary(1, 1, 1, failures=1)) == {"error_rate": False}


def test_visual_tokens_are_a_share_of_a_fixed_number() -> None:
    (verdict,) = judge(Sla("", Bounds(), {"visual_tokens_saved": 0.5}), summary(1, 1, image_tokens=64))
    assert (verdict.value, verdict.met) == (0.75, True)


def test_what_is_served_has_a_price() -> None:
    (verdict,) = judge(Sla("", Bounds(), {"cost_per_request": 1}), summary(1, 2), 3600.0)
    assert (verdict.value, verdict.met) == (1.0, True), "two seconds at one a second, for two answers"


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    targets = {"cost_per_request": 1.0, "visual_tokens_saved": 0.3, "tpot_p50_ms": 5.0}
    assert verdicts(targets, summary()) == dict.fromkeys(targets)


def test_more_than_came_can_not_be_served() -> None:
    found = summary(1.0)
    assert verdicts({"requests_per_s": 50}, found, offered=2.0) == {"requests_per_s": None}
    assert verdicts({"requests_per_s": 50}, found, offered=60.0) == {"requests_per_s": False}
    assert verdicts({"requests_per_s": 50}, found) == {"requests_per_s": False}


def test_every_known_target_can_be_judged() -> None:
    found = judge(Sla("", Bounds(), dict.fromkeys(KNOWN, 1.0)), summary(1.0, image_tokens=64), 1.0)
    assert {verdict.name for verdict in found} == set(KNOWN)
    assert all(verdict.met is not None for verdict in found)


def test_the_documents_table() -> None:
    found = judge(DOCUMENTED, summary(*[0.1] * 60, image_tokens=128), 0.35)
    assert {verdict.name: verdict.met for verdict in found} == dict.fromkeys(DOCUMENTED.targets, True)
