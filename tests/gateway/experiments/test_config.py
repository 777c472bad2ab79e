"""The tables of experiments are read as documented, and errors name the table and what is accepted."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fovea.core.errors import ConfigError
from fovea.gateway.experiments import config
from fovea.gateway.experiments.config import ExperimentConfig, experiment_of, read_experiments
from tests.gateway.experiments.support import an_experiment

FULL = """
port = 8000
[experiments]
folder = "state"
flush_s = 0.5
[[experiment]]
name = "v2"
model = "vlm"
sticky_by = "header:x-session"
variants = [{ name = "old", model = "vlm-1", weight = 90 }, { name = "new", model = "vlm-2", weight = 10 }]
[experiment.guard]
error_rate = 0.1
[experiment.criteria]
required = ["p95", "errors"]
[experiment.shadow]
variant = "new"
share = 0.5
"""
SHORT = '[[experiment]]\nname = "v2"\nmodel = "vlm"\n'
TWO = 'variants = [{ name = "old", model = "vlm-1" }, { name = "new", model = "vlm-2" }]\n'


def read(text: str) -> ExperimentConfig:
    return read_experiments(tomllib.loads(text), Path("/etc/gateway"))


def test_every_field_is_read() -> None:
    found = read(FULL)
    (experiment,) = found.experiments
    assert found.path == Path("/etc/gateway/state/experiments.sqlite")
    assert found.settings.flush_s == 0.5
    assert [(each.name, each.model, each.weight) for each in experiment.variants] == [
        ("old", "vlm-1", 90), ("new", "vlm-2", 10),
    ]  # fmt: skip
    assert (experiment.baseline.name, experiment.sticky_by) == ("old", "header:x-session")
    assert (experiment.guard.error_rate, experiment.guard.p95_factor) == (0.1, 1.5)
    assert experiment.criteria.required == ("p95", "errors")
    assert (experiment.shadow.variant, experiment.shadow.share) == ("new", 0.5)


def test_the_defaults_are_the_decision_criteria() -> None:
    (experiment,) = read(SHORT + TWO).experiments
    criteria = experiment.criteria
    assert (criteria.p95_gain, criteria.rating_gain, criteria.cost_increase) == (0.10, 0.05, 0.20)
    assert (criteria.error_rate, criteria.alpha) == (0.005, 0.05)
    assert criteria.required == ("p95", "rating", "cost", "errors")
    assert (experiment.header, experiment.sticky_by) == ("x-experiment", "key")


def test_a_gateway_without_experiments() -> None:
    assert read("port = 8000").experiments == ()


def test_the_example_of_the_module_is_accepted() -> None:
    text = (config.__doc__ or "").split("\n\n", 1)[1]
    text = text.replace(
        '"vlm-2", weight = 10 },', '"vlm-2", weight = 10 }, { name = "next", model = "vlm-3" },'
    )
    assert read(text).experiments[0].shadow.variant == "next"


def test_the_text_of_an_experiment_gives_it_back() -> None:
    (experiment,) = read(FULL).experiments
    assert experiment_of(experiment.text()) == experiment


def test_identity_changes_with_what_is_compared_only() -> None:
    (experiment,) = read(FULL).experiments
    assert read(FULL.replace("weight = 10", "weight = 50")).experiments[0].identity == experiment.identity
    assert read(FULL.replace("0.1", "0.2")).experiments[0].identity == experiment.identity
    assert read(FULL.replace("vlm-2", "vlm-3")).experiments[0].identity != experiment.identity
    assert an_experiment(largest_cost=1.0).identity != an_experiment().identity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment = 3", "experiment is not a list of tables; accepted: a table [[experiment]] for each"),
        ("experiments = 3", "experiments is not a table; accepted: a table [experiments]"),
        ("[experiments]\nflush = 1", "[experiments]: unknown field 'flush'; did you mean 'flush_s'?"),
        ("[experiments]\nfolder = 1", "[experiments]: folder is 1; accepted: a path"),
        (SHORT, "experiment 'v2': variants has 0 entries; accepted: 2 to 16, the baseline first"),
        (SHORT + "variants = 1", "variants is not a list; accepted: a list of {name, model, weight}"),
        (SHORT + "variants = [1]", "experiment 'v2', variant 1 is 1; accepted: a table"),
        (
            SHORT + TWO.replace("vlm-1", ""),
            "experiment 'v2', variant 1: model is ''; accepted: the name of a model",
        ),
        (
            SHORT + TWO.replace('"new"', '"old"'),
            "variants has the name 'old' twice; accepted: every name once",
        ),
        (SHORT + TWO.replace('"vlm-1"', '"m", weight = 0'), "weight 0; accepted: a weight above 0"),
        (SHORT + TWO.replace('"vlm-1"', '"m", weight = -1'), "weight is -1; accepted: 0 to 1000000000"),
        (SHORT + TWO + "sticky_by = 'header'", "'header'; accepted: key, user, request, or header:NAME"),
        (
            SHORT + TWO + "header = 'a b'",
            "experiment 'v2': header is 'a b'; accepted: the name of an HTTP header",
        ),
        (SHORT + TWO + "colour = 1", "experiment 'v2': unknown field 'colour'; accepted: name, model"),
        (SHORT + TWO + "[experiment.guard]\nerror_rate = 2", "'v2', [experiment.guard]: error_rate is 2"),
        (
            SHORT + TWO + "[experiment.criteria]\nrequired = ['x']",
            "has 'x'; accepted: p95, rating, cost, errors",
        ),
        (
            SHORT + TWO + "[experiment.shadow]\nvariant = 'old'",
            "shadow.variant is 'old'; accepted: new, or empty",
        ),
        (SHORT.replace('"v2"', '""') + TWO, "[[experiment]] number 1: name is ''; accepted: 1 to 64 letters"),
        (SHORT + TWO + SHORT.replace("v2", "v3") + TWO, "two [[experiment]] have the model 'vlm'"),
    ],
)
def test_errors_in_plain_words(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in caught.value.message
