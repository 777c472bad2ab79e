"""Experiments as the gateway's TOML file declares them.

[experiments]
folder = "state"                    # holds experiments.sqlite

[[experiment]]
name = "v2"
model = "vlm"                       # the name that clients ask for
sticky_by = "user"
variants = [
    { name = "old", model = "vlm-1", weight = 90 },     # the first is the baseline
    { name = "new", model = "vlm-2", weight = 10 },
]

[experiment.guard]                  # when a variant is rolled back without a person
error_rate = 0.05

[experiment.criteria]               # when a variant is worth promoting
p95_gain = 0.10

[experiment.shadow]                 # a variant that gets copies of requests; nobody sees its answers
variant = "next"
share = 0.05
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fovea.core.config_files import check_keys, errors_in
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings, joined
from fovea.core.settings import build_settings, check_settings, setting, settings_of, value_errors

T = TypeVar("T")
FILE = "experiments.sqlite"
CRITERIA = ("p95", "rating", "cost", "errors")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_NAME_WORDS = "1 to 64 letters, digits, dots, hyphens and underscores"
_STICKY_WORDS = "key, user, request, or header:NAME"
_MOST_VARIANTS = 16


def _sticky(value: str) -> str:
    kind, colon, header = value.partition(":")
    named = kind == "header" and colon and _HEADER.fullmatch(header)
    return "" if named or value in ("key", "user", "request") else _STICKY_WORDS


def _name(value: str) -> str:
    return "" if _NAME.fullmatch(value) else _NAME_WORDS


def _header(value: str) -> str:
    return "" if _HEADER.fullmatch(value) else "the name of an HTTP header"


def _model(value: str) -> str:
    return "" if value else "the name of a model"


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the models that an experiment compares.

    The baseline is the first variant of its experiment.
    """

    name: str = setting("", "Name in headers, tables and commands.", check=_name)
    model: str = setting("", "Name of the served model.", check=_model)
    weight: float = setting(
        1.0, "Share of the requests, as a proportion of all weights.", low=0, high=1_000_000_000
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Guard:
    """Guard rails: a variant that certainly violates one is rolled back at once."""

    error_rate: float = setting(0.05, "Highest share of failed requests.", low=0, high=1)
    p95_factor: float = setting(
        1.5, "Highest p95 latency, as a multiple of the baseline's.", low=1, high=1000
    )
    min_requests: int = setting(
        50, "Requests that a variant needs before a guard rail may roll it back.", low=1, high=1_000_000_000
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Criteria:
    """Conditions under which a variant is worth promoting. All that are required have to be certain."""

    p95_gain: float = setting(0.10, "Least improvement of the p95 latency, as a share.", low=0, high=0.99)
    rating_gain: float = setting(0.05, "Least improvement of the mean rating, as a share.", low=0, high=4)
    cost_increase: float = setting(
        0.20, "Most that a request may cost above the baseline's, as a share. A lower cost is accepted.",
        low=0, high=1000,
    )  # fmt: skip
    error_rate: float = setting(0.005, "Highest share of failed requests.", low=0, high=1)
    alpha: float = setting(
        0.05, "Probability with which any statement about the experiment may ever be wrong.",
        low=1e-9, high=0.5,
    )  # fmt: skip
    required: tuple[str, ...] = setting(
        CRITERIA, "Criteria that have to be met.", choices=CRITERIA, nonempty=True
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Shadow:
    """A variant that gets copies of requests and no requests of its own."""

    variant: str = setting("", "Name of the variant; its weight does not count. Empty: no copies.")
    share: float = setting(0.01, "Share of the experiment's requests that are copied.", low=0, high=1)
    in_flight: int = setting(
        4, "Most copies that a worker process has in flight. Others are not sent.", low=1, high=10_000
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment."""

    name: str = setting("", "Name in tables and commands.", check=_name)
    model: str = setting("", "Name of the model that clients ask for.", check=_model)
    header: str = setting("x-experiment", "Header whose value names a variant.", check=_header)
    sticky_by: str = setting(
        "key",
        "Requests of one API key, of one `user` field, or of one value of a header get one variant; with "
        "request, a variant is drawn for each request.",
        check=_sticky,
    )
    largest_cost: float = setting(
        0.1, "Largest cost of a request in the comparison, in the currency of the price table. A dearer one "
        "counts as this. Ten to a hundred times a usual request's cost is a good choice.",
        low=1e-5, high=1_000_000,
    )  # fmt: skip
    guard: Guard = field(default_factory=Guard)
    criteria: Criteria = field(default_factory=Criteria)
    shadow: Shadow = field(default_factory=Shadow)
    variants: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        _check_variants(self)

    @property
    def baseline(self) -> Variant:
        return self.variants[0]

    @property
    def identity(self) -> str:
        """Digest of everything that makes numbers comparable. If it changes, old numbers do not count."""
        parts = [self.name, self.model, self.largest_cost, self.shadow.variant]
        parts += [[variant.name, variant.model] for variant in self.variants]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def variant(self, name: str) -> Variant | None:
        """Return the variant of this name, or None."""
        return next((variant for variant in self.variants if variant.name == name), None)

    def text(self) -> str:
        """Return the experiment as JSON, for the state file."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class ExperimentSettings:
    """Settings of all experiments together."""

    folder: Path = setting(
        Path("experiments"), "Folder of the state file. Relative to the folder of the configuration file."
    )
    flush_s: float = setting(
        1.0, "Seconds between two writes to the state file. A killed process loses at most this.",
        low=0.05, high=60,
    )  # fmt: skip
    check_s: float = setting(5.0, "Seconds between two checks of the guard rails.", low=0.05, high=3600)
    recent_requests: int = setting(
        100_000, "Answered requests whose rating is still accepted.", low=1, high=100_000_000
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """The experiments of a gateway. Every model has at most one."""

    settings: ExperimentSettings = field(default_factory=ExperimentSettings)
    experiments: tuple[Experiment, ...] = ()

    @property
    def path(self) -> Path:
        """The state file."""
        return self.settings.folder / FILE


def read_experiments(values: Mapping[str, Any], folder: Path) -> ExperimentConfig:
    """Read the tables [experiments] and [[experiment]] of a parsed TOML file; others are left alone.

    folder: folder of the file.
    Raises ConfigError with all errors; each names the table and what is accepted.
    """
    table, entries = values.get("experiments", {}), values.get("experiment", [])
    if not isinstance(table, dict):
        raise ConfigError("experiments is not a table; accepted: a table [experiments]", param="experiments")
    if not isinstance(entries, list):
        raise ConfigError(
            "experiment is not a list of tables; accepted: a table [[experiment]] for each",
            param="experiment",
        )
    given = dict(table)
    place = given.get("folder", "experiments")
    if isinstance(place, str):
        given["folder"] = folder / Path(place).expanduser()
    findings, experiments = Findings(), []
    with findings.part("experiments"):
        settings = _settings(ExperimentSettings, given, "[experiments]")
    for number, entry in enumerate(entries, 1):
        with findings.part("experiment", number):
            experiments.append(_experiment(entry, f"[[experiment]] number {number}"))
    findings.check()
    for noun in ("name", "model"):
        names = [getattr(experiment, noun) for experiment in experiments]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(
                f"two [[experiment]] have the {noun} {double!r}; accepted: a {noun} in one of them",
                param="experiment",
            )
    return ExperimentConfig(settings, tuple(experiments))


def experiment_of(text: str) -> Experiment:
    """Return the experiment of `Experiment.text`. Raises ConfigError."""
    return _experiment(json.loads(text), "the stored experiment")


def _experiment(entry: Any, where: str) -> Experiment:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a table; accepted: a table [[experiment]] for each")
    name = entry.get("name")
    where = f"experiment {name!r}" if isinstance(name, str) and name else where
    given, findings = dict(entry), Findings()
    parts: tuple[tuple[str, type], ...] = (("guard", Guard), ("criteria", Criteria), ("shadow", Shadow))
    for part, cls in parts:
        with findings.part(part):
            given[part] = _settings(cls, given.get(part, {}), f"{where}, [experiment.{part}]")
    variants = given.get("variants", [])
    if not isinstance(variants, list):
        raise ConfigError(
            f"{where}: variants is not a list; accepted: a list of {{name, model, weight}}", param="variants"
        )
    read = []
    for number, variant in enumerate(variants, 1):
        with findings.part("variants", number):
            read.append(_settings(Variant, variant, f"{where}, variant {number}"))
    given["variants"] = tuple(read)
    known = [entry.name for entry in dataclasses.fields(Experiment)]
    with findings.part():
        check_keys(where, given, known, "field")
    own = [entry for entry in settings_of(Experiment, nested=False) if entry.name in given]
    with findings.part(), errors_in(where):
        if errors := value_errors((entry, given[entry.name]) for entry in own):
            raise joined(errors)
    findings.check()
    with errors_in(where):
        return Experiment(**given)


def _settings(cls: type[T], values: Any, where: str) -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {values!r}; accepted: a table")
    known = [entry.name for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]
    findings = Findings()
    with findings.part():
        check_keys(where, values, known, "field")
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in known
    }
    with findings.part(), errors_in(where):
        made = build_settings(cls, given)
    findings.check()
    return made


def _check_variants(experiment: Experiment) -> None:
    """Raise ConfigError unless the variants can be compared."""
    names = [variant.name for variant in experiment.variants]
    shadow = experiment.shadow.variant
    if not 2 <= len(names) <= _MOST_VARIANTS:
        raise ConfigError(
            f"variants has {len(names)} entries; accepted: 2 to {_MOST_VARIANTS}, the baseline first",
            param="variants",
        )
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(
            f"variants has the name {double!r} twice; accepted: every name once", param="variants"
        )
    if shadow and shadow not in names[1:]:
        raise ConfigError(
            f"shadow.variant is {shadow!r}; accepted: {', '.join(names[1:])}, or empty for no copies",
            param="shadow",
        )
    if not experiment.baseline.weight > 0:
        raise ConfigError(
            "the baseline, which is the first variant, has the weight 0; accepted: a weight above 0",
            param="variants",
        )
