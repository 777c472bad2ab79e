"""The engine advisor: which engine suits a situation, with reasons and sources.

Rules are data (`advice.toml`). Every rule that fits the situation adds its points to its engine, or rules the
engine out. The engines are ranked by their sums. Fovea's own engine is one of them, and where another is the
better choice, the rules say so. Fovea's gateway can stand in front of any of them.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.core.config_files import Table, check_keys, read_toml, tables
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting

DEVICES = (
    "nvidia-gpu", "amd-gpu", "intel-gpu", "intel-npu", "apple", "x86-cpu", "arm-cpu", "browser", "mobile",
)  # fmt: skip
"""Kinds of devices that rules tell apart."""
AIMS = ("balanced", "throughput", "latency")
"""Aims: throughput or latency, where both cannot be had."""
CHECKPOINTS = ("plain", "awq", "gptq", "gguf", "fp8")
"""Formats of weights. plain: 16 or 32 bits, as models are published first."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The situation in which an engine is needed. Wrong values raise ConfigError."""

    device: str = setting("nvidia-gpu", "Kind of device that the model runs on.", choices=DEVICES)
    family: str = setting("", "Model family by its model_type, such as qwen3_vl; empty: any.")
    several_devices: bool = setting(False, "Whether the model is too large or too slow for one device.")
    images: str = setting("many", "Whether few or many of the requests have images.", choices=("few", "many"))
    follow_ups: bool = setting(False, "Whether several requests are about the same image or prefix.")
    aim: str = setting("balanced", "Aim that matters most.", choices=AIMS)
    steady_streams: bool = setting(False, "Whether answers must not stop while images of others arrive.")
    json_answers: bool = setting(False, "Whether answers have to follow a schema or grammar.")
    visual_budgets: bool = setting(False, "Whether requests choose how many visual tokens they spend.")
    strangers: bool = setting(False, "Whether strangers send images or URLs of images.")
    tenants: bool = setting(False, "Whether several clients need keys, limits and budgets of their own.")
    lora: bool = setting(False, "Whether adapters are loaded beside the model.")
    proven: bool = setting(False, "Whether only engines with years of use in production come into question.")
    checkpoint: str = setting("plain", "Format of the weights.", choices=CHECKPOINTS)
    licences: tuple[str, ...] = setting(
        (), "Accepted licences of the engine, separated by commas; empty: any."
    )

    def __post_init__(self) -> None:
        check_settings(self)


FILE = Path(__file__).with_name("advice.toml")
"""The built-in rules."""
HIGHEST = 3
"""Most points of one rule, for or against."""
_TEXTS = {"device": DEVICES, "images": ("few", "many"), "aim": AIMS, "checkpoint": CHECKPOINTS}
_CONDITIONS = tuple(entry.name for entry in fields(Situation) if entry.name not in ("family", "licences"))
_ENGINE = ("name", "licence", "openai_api", "families", "all_families", "url", "date", "note")
_RULE = ("engine", "when", "points", "rules_out", "reason", "url", "date")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can be recommended.

    name, licence, note: for readers.
    openai_api: it has an OpenAI-compatible API, so Fovea's gateway can route to it.
    families: model families that its page names. all_families: the page names all of them.
    url, date: that page, and when it was read.
    """

    name: str
    licence: str
    openai_api: bool
    families: tuple[str, ...]
    all_families: bool
    url: str
    date: datetime.date
    note: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason for or against an engine.

    when: accepted values by field of `Situation`; all must fit. points: -3 to 3. rules_out: the engine cannot
    do it. reason: one sentence. url, date: its source, and the day on which it was read.
    """

    engine: str
    when: Mapping[str, tuple[str | bool, ...]]
    points: int
    rules_out: bool
    reason: str
    url: str
    date: datetime.date

    def fits(self, situation: Situation) -> bool:
        """Tell whether the rule counts in a situation."""
        return all(getattr(situation, name) in accepted for name, accepted in self.when.items())


@dataclass(frozen=True, slots=True)
class Advice:
    """An engine with all that speaks for and against it.

    points: sum of the points of its rules. ruled_out: rules that make it impossible; empty if it is possible.
    reasons_for, reasons_against: the other rules that count, heaviest first. Rules of 0 points are among the
    reasons for it.
    """

    engine: Engine
    points: int
    reasons_for: tuple[Rule, ...]
    reasons_against: tuple[Rule, ...]
    ruled_out: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The engines in order, the best first; those that are ruled out come last.

    best: names of the engines with most points; more than one is a tie, none means that all are ruled out.
    notes: what holds for all of them.
    """

    ranked: tuple[Advice, ...]
    best: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def tie(self) -> bool:
        """Tell whether several engines have most points. Then the rules do not decide between them."""
        return len(self.best) > 1


@functools.cache
def known_advice() -> tuple[tuple[Engine, ...], tuple[Rule, ...]]:
    """Return the built-in engines and rules."""
    return read_advice(FILE)


def advise(
    situation: Situation,
    runs: Mapping[str, bool] = MappingProxyType({}),
    advice: tuple[tuple[Engine, ...], tuple[Rule, ...]] | None = None,
) -> Recommendation:
    """Return the engines for a situation, ranked, with reasons.

    runs: whether an engine runs the model, by the engine's name, where it is known. It replaces the lists of
    models.
    advice: engines and rules, as `read_advice` returns them; None: the built-in ones.
    Raises ConfigError for an unknown engine in `runs`.
    """
    engines, rules = advice or known_advice()
    check_keys("runs", runs, [engine.name for engine in engines])
    found = [_advice(engine, situation, rules, runs.get(engine.name)) for engine in engines]
    ranked = sorted(found, key=lambda one: (bool(one.ruled_out), -one.points, one.engine.name.lower()))
    possible = [one for one in ranked if not one.ruled_out]
    best = tuple(one.engine.name for one in possible if one.points == possible[0].points)
    return Recommendation(tuple(ranked), best, _notes(situation, possible))


def _advice(engine: Engine, situation: Situation, rules: tuple[Rule, ...], runs: bool | None) -> Advice:
    counted = [rule for rule in rules if rule.engine == engine.name and rule.fits(situation)]
    counted += _model_rules(engine, situation.family, runs)
    if situation.licences and engine.licence not in situation.licences:
        counted.append(_own(engine, 0, f"Its licence is {engine.licence}", rules_out=True))
    weighed = [rule for rule in counted if not rule.rules_out]
    return Advice(
        engine=engine,
        points=sum(rule.points for rule in weighed),
        reasons_for=tuple(sorted((r for r in weighed if r.points >= 0), key=lambda rule: -rule.points)),
        reasons_against=tuple(sorted((r for r in weighed if r.points < 0), key=lambda rule: rule.points)),
        ruled_out=tuple(rule for rule in counted if rule.rules_out),
    )


def _model_rules(engine: Engine, family: str, runs: bool | None) -> list[Rule]:
    """Return what the engine's list of models says about a family."""
    if runs is not None:
        return [] if runs else [_own(engine, 0, "You say that it does not run the model", rules_out=True)]
    if not family:
        return []
    if family in engine.families:
        return [_own(engine, 1, f"Its list of models has {family}")]
    reason = f"We did not find {family} in its list of models"
    return [_own(engine, 0 if engine.all_families else -2, reason, rules_out=engine.all_families)]


def _own(engine: Engine, points: int, reason: str, *, rules_out: bool = False) -> Rule:
    return Rule(engine.name, MappingProxyType({}), points, rules_out, reason, engine.url, engine.date)


def _notes(situation: Situation, possible: list[Advice]) -> tuple[str, ...]:
    notes = []
    if not possible:
        notes.append("Every engine is ruled out: change the checkpoint, the device or a need.")
    others = [one.engine.name for one in possible if one.engine.openai_api and one.engine.name != "Fovea"]
    if situation.tenants and others:
        notes.append(
            "Keys, limits and budgets per tenant are those of Fovea's gateway, which can stand in front of "
            f"Fovea as well as {', '.join(others)}: they speak for no engine."
        )
    elif situation.strangers and others:
        notes.append("Fovea's gateway can check images and URLs in front of any of these engines.")
    return tuple(notes)


def read_advice(path: Path) -> tuple[tuple[Engine, ...], tuple[Rule, ...]]:
    """Return the engines and rules of a file.

    Raises ConfigError, which names the file, the table, the field and the accepted values.
    """
    where = f"advice file {path}"
    content = read_toml(path, "advice file")
    check_keys(where, content, ("engine", "rule"))
    engines = tuple(_engine(where, values) for values in tables(where, content, "engine"))
    names = tuple(engine.name for engine in engines)
    found = enumerate(tables(where, content, "rule"), 1)
    rules = tuple(_rule(f"{where}, [[rule]] number {number}", values, names) for number, values in found)
    return engines, rules


def _engine(where: str, values: Mapping[str, Any]) -> Engine:
    where = f"{where}, [[engine]] {values.get('name', '')!r}"
    check_keys(where, values, _ENGINE)
    table = Table(where, values)
    return Engine(
        name=table.text("name"),
        licence=table.text("licence"),
        openai_api=table.flag("openai_api", False),
        families=table.texts("families"),
        all_families=table.flag("all_families", False),
        url=table.text("url"),
        date=table.day("date"),
        note=table.text("note"),
    )


def _rule(where: str, values: Mapping[str, Any], engines: tuple[str, ...]) -> Rule:
    check_keys(where, values, _RULE)
    table = Table(where, values)
    rules_out = table.flag("rules_out", False)
    if rules_out == ("points" in values):
        raise ConfigError(
            f"{where}: it has both points and rules_out, or neither; "
            "accepted: points, or rules_out = true, not both",
            param="points",
        )
    return Rule(
        engine=table.text("engine", choices=engines),
        when=_when(where, values.get("when", {})),
        points=table.whole("points", -HIGHEST, HIGHEST, 0),
        rules_out=rules_out,
        reason=table.text("reason"),
        url=table.text("url"),
        date=table.day("date"),
    )


def _when(where: str, values: Any) -> Mapping[str, tuple[str | bool, ...]]:
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where}: when is {values!r}; accepted: a table of conditions, such as {{ device = 'x86-cpu' }}",
            param="when",
        )
    check_keys(f"{where}: when", values, _CONDITIONS)
    found = {}
    for name, value in values.items():
        accepted = value if isinstance(value, list) else [value]
        choices = _TEXTS.get(name, (True, False))
        for item in accepted:
            if item not in choices or isinstance(item, bool) != (name not in _TEXTS):
                shown = ", ".join(str(choice).lower() for choice in choices)
                raise ConfigError(f"{where}: when: {name} is {item!r}; accepted: {shown}", param=name)
        found[name] = tuple(accepted)
    return MappingProxyType(found)
