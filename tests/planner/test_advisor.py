"""The engine advisor: what it recommends, why, and how its rules are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.planner_pages import SHORT

from fovea.core.errors import ConfigError
from fovea.planner.advisor import (
    DEVICES,
    FILE,
    HIGHEST,
    Advice,
    Recommendation,
    Situation,
    advise,
    known_advice,
    read_advice,
)

ROOT = Path(__file__).resolve().parents[2]
ENGINES, RULES = known_advice()
ENGINE = """
[[engine]]
name = "one"
licence = "MIT"
url = "https://example.org"
date = 2026-01-02
note = "An engine."
"""
RULE = """
[[rule]]
engine = "one"
when = { device = "x86-cpu" }
points = 2
reason = "It is fast"
url = "https://example.org"
date = 2026-01-02
"""


def of(found: Recommendation, name: str) -> Advice:
    return next(one for one in found.ranked if one.engine.name == name)


def written(folder: Path, text: str) -> Path:
    path = folder / "advice.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("situation", "best"),
    [
        (Situation(device="x86-cpu"), {"Fovea"}),
        (Situation(device="x86-cpu", follow_ups=True), {"Fovea"}),
        (Situation(device="x86-cpu", steady_streams=True), {"Fovea"}),
        (Situation(device="x86-cpu", visual_budgets=True), {"Fovea"}),
        (Situation(device="x86-cpu", proven=True), {"vLLM"}),
        (Situation(device="x86-cpu", lora=True), {"vLLM"}),
        (Situation(device="x86-cpu", checkpoint="awq"), {"vLLM"}),
        (Situation(device="x86-cpu", checkpoint="fp8"), {"Fovea"}),
        (Situation(device="x86-cpu", checkpoint="gguf"), {"llama.cpp"}),
        (Situation(device="arm-cpu"), {"llama.cpp", "vLLM"}),
        (Situation(), {"SGLang", "TensorRT-LLM", "vLLM"}),
        (Situation(aim="throughput"), {"SGLang", "vLLM"}),
        (Situation(aim="latency"), {"TensorRT-LLM"}),
        (Situation(follow_ups=True), {"SGLang"}),
        (Situation(several_devices=True), {"SGLang", "TensorRT-LLM", "vLLM"}),
        (Situation(lora=True), {"SGLang", "TensorRT-LLM", "vLLM"}),
        (Situation(checkpoint="awq"), {"LMDeploy", "SGLang", "vLLM"}),
        (Situation(checkpoint="gguf"), {"llama.cpp"}),
        (Situation(device="amd-gpu"), {"vLLM"}),
        (Situation(device="apple"), {"llama.cpp"}),
        (Situation(device="intel-gpu"), {"OpenVINO GenAI"}),
        (Situation(device="intel-npu"), {"OpenVINO GenAI"}),
        (Situation(device="browser"), {"MLC LLM"}),
        (Situation(device="mobile"), {"MLC LLM"}),
    ],
    # A set has another order in every process, and names of tests must be the same in all.
    ids=lambda value: str(value) if isinstance(value, Situation) else " or ".join(sorted(value)),
)
def test_recommendations(situation: Situation, best: set[str]) -> None:
    found = advise(situation)
    assert set(found.best) == best
    assert found.tie == (len(best) > 1)


@pytest.mark.parametrize(
    "situation",
    [
        Situation(several_devices=True),
        Situation(device="x86-cpu", several_devices=True),
        Situation(device="x86-cpu", lora=True),
        Situation(device="x86-cpu", checkpoint="gguf"),
        *(Situation(device=name) for name in ("amd-gpu", "intel-gpu", "intel-npu", "browser", "mobile")),
    ],
    ids=str,
)
def test_fovea_says_that_it_cannot(situation: Situation) -> None:
    assert of(advise(situation), "Fovea").ruled_out


def test_fovea_is_never_the_advice_for_a_gpu_without_a_measurement_there() -> None:
    needs = ("follow_ups", "steady_streams", "json_answers", "visual_budgets", "strangers", "tenants")
    for need in needs:
        assert "Fovea" not in advise(Situation(device="nvidia-gpu", **{need: True})).best
    assert of(advise(Situation()), "Fovea").points < 0


@pytest.mark.parametrize("device", DEVICES)
def test_points_are_the_sum_of_the_reasons_and_the_best_come_first(device: str) -> None:
    found = advise(Situation(device=device, follow_ups=True, json_answers=True))
    for one in found.ranked:
        assert one.points == sum(rule.points for rule in one.reasons_for + one.reasons_against)
        assert all(rule.points >= 0 for rule in one.reasons_for)
        assert all(rule.points < 0 for rule in one.reasons_against)
    keys = [(bool(one.ruled_out), -one.points) for one in found.ranked]
    assert keys == sorted(keys)
    assert {one.engine.name for one in found.ranked} == {engine.name for engine in ENGINES}


def test_a_family_that_is_listed_helps_and_one_that_is_not_costs() -> None:
    base, found = advise(Situation()), advise(Situation(family="mllama"))
    assert of(found, "SGLang").points == of(base, "SGLang").points + 1
    assert of(found, "vLLM").points == of(base, "vLLM").points - 2
    assert any("mllama" in rule.reason for rule in of(found, "vLLM").reasons_against)


def test_fovea_lists_all_of_its_families_so_others_are_ruled_out() -> None:
    found = advise(Situation(device="x86-cpu", family="kosmos"))
    assert "kosmos" in of(found, "Fovea").ruled_out[0].reason
    assert found.best == ("OpenVINO GenAI", "vLLM")


def test_fovea_s_families_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    table = text[text.index("| model_type |") :].split("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    fovea = next(engine for engine in ENGINES if engine.name == "Fovea")
    assert set(fovea.families) == set(listed)


def test_what_you_know_replaces_the_lists() -> None:
    situation = Situation(family="mllama")
    found = advise(situation, {"vLLM": True, "SGLang": False})
    assert of(found, "vLLM").points == of(advise(Situation()), "vLLM").points
    assert "You say" in of(found, "SGLang").ruled_out[0].reason
    assert found.best == ("TensorRT-LLM",)
    with pytest.raises(ConfigError, match=r"unknown key 'vLLN'; did you mean 'vLLM'\?"):
        advise(situation, {"vLLN": True})


def test_licences() -> None:
    found = advise(Situation(device="x86-cpu", licences=("MIT",)))
    assert found.best == ("llama.cpp",)
    assert of(found, "vLLM").ruled_out[0].reason == "Its licence is Apache-2.0"


def test_a_tie_decides_nothing_and_no_engine_is_said_to_be_none() -> None:
    assert advise(Situation(device="arm-cpu")).tie
    none = advise(Situation(device="browser", checkpoint="gguf"))
    assert none.best == ()
    assert not none.tie
    assert "Every engine is ruled out" in none.notes[0]


def test_fovea_s_gateway_stands_before_any_of_them() -> None:
    assert advise(Situation()).notes == ()
    note = advise(Situation(tenants=True)).notes[0]
    assert "Fovea's gateway" in note
    assert "vLLM" in note
    assert [one.points for one in advise(Situation(tenants=True)).ranked] == [
        one.points for one in advise(Situation()).ranked
    ]
    assert "Fovea's gateway" in advise(Situation(strangers=True)).notes[0]


@pytest.mark.parametrize("values", [{"device": "gpu"}, {"aim": "fast"}, {"checkpoint": "int4"}, {"lora": 1}])
def test_wrong_situations(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        Situation(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.engine}: {rule.reason[:40]}")
def test_every_rule_has_a_reason_and_a_source(rule) -> None:  # type: ignore[no-untyped-def]
    assert rule.reason[0].isupper() or rule.reason[0].isdigit()
    assert not rule.reason.endswith(".")
    assert rule.url.startswith("https://") or (ROOT / rule.url).is_file()
    assert abs(rule.points) <= HIGHEST


def test_every_condition_of_a_situation_is_weighed_and_no_rule_is_there_twice() -> None:
    used = {name for rule in RULES for name in rule.when}
    rest = set(Situation.__dataclass_fields__) - used
    assert rest == {"family", "licences", "tenants"}  # by code: lists, licences, a note
    keys = [(rule.engine, tuple(sorted(rule.when.items()))) for rule in RULES]
    assert [key for key in keys if keys.count(key) > 1] == [
        ("Fovea", (("device", ("x86-cpu",)),)),
        ("Fovea", (("device", ("x86-cpu",)),)),
    ]  # for and against


def test_measured_figures_of_the_rules_are_those_of_the_results() -> None:
    text = (ROOT / "benchmarks" / "results" / "peers.md").read_text()
    measured = [rule for rule in RULES if rule.url == "benchmarks/results/peers.md"]
    assert measured
    for figure in ("71", "164", "521", "190", "225"):
        used = [rule for rule in measured if re.search(rf"\b{figure}\b", rule.reason)]
        assert used, figure
        assert re.search(rf"\b{figure}\b", text), figure


def test_short_situations_differ() -> None:
    assert len({words for words, _ in SHORT}) == len({situation for _, situation in SHORT}) == len(SHORT)


def test_an_own_file(tmp_path: Path) -> None:
    engines, rules = read_advice(written(tmp_path, ENGINE + RULE))
    assert [engine.name for engine in engines] == ["one"]
    assert rules[0].fits(Situation(device="x86-cpu"))
    assert not rules[0].fits(Situation(device="apple"))
    assert advise(Situation(device="x86-cpu"), advice=(engines, rules)).ranked[0].points == 2
    assert advise(Situation(device="apple"), advice=(engines, rules)).best == ("one",)


def test_a_copy_of_the_built_in_file_is_the_same(tmp_path: Path) -> None:
    assert read_advice(written(tmp_path, FILE.read_text())) == (ENGINES, RULES)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("licence =", "license =", r"\[\[engine\]\] 'one': unknown key 'license'; did you mean 'licence'\?"),
        ("[[rule]]", "[[rules]]", r"unknown key 'rules'; did you mean 'rule'\?"),
        ("device =", "devices =", r"number 1: when: unknown key 'devices'; did you mean 'device'\?"),
        ('"x86-cpu"', '"x86"', r"when: device is 'x86'; accepted: nvidia-gpu, "),
        ('device = "x86-cpu"', 'lora = "yes"', r"when: lora is 'yes'; accepted: true, false"),
        ('device = "x86-cpu"', "lora = 1", r"when: lora is 1; accepted: true, false"),
        ('{ device = "x86-cpu" }', "3", r"when is 3; accepted: a table of conditions"),
        ("points = 2", "points = 4", r"points is 4; accepted: -3 to 3"),
        ("points = 2", "points = 1.5", r"points is 1.5; accepted: a whole number from -3 to 3"),
        ("points = 2", "", r"accepted: points, or rules_out = true, not both"),
        ("points = 2", "points = 2\nrules_out = true", r"accepted: points, or rules_out = true, not both"),
        ("points = 2", "rules_out = 1", r"rules_out is 1; accepted: true or false"),
        ('engine = "one"', 'engine = "two"', r"engine is 'two'; accepted: one"),
        ('reason = "It is fast"', "", r"reason is missing"),
        ("points = 2", "point = 2", r"unknown key 'point'; did you mean 'points'\?"),
    ],
)
def test_wrong_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = ENGINE + RULE
    assert old in text
    with pytest.raises(ConfigError, match=message) as caught:
        read_advice(written(tmp_path, text.replace(old, new)))
    assert "advice.toml" in str(caught.value)


def test_a_file_of_rules_without_dates_or_with_texts_as_dates(tmp_path: Path) -> None:
    path = written(tmp_path, ENGINE + RULE.replace("date = 2026-01-02", 'date = "2026-01-02"'))
    with pytest.raises(ConfigError, match=r"date is '2026-01-02'; accepted: a date"):
        read_advice(path)
