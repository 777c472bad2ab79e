"""fovea eval --documents: questions about held-out pages, with rows for their parts, and as a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fovea.core import bundled
from fovea.core.errors import CheckpointError
from fovea.evaluation.documents import held_out
from fovea.evaluation.documents.questions import KINDS
from tests.cli.support import Caller
from tests.evaluation.documents.shipped import fill


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("pages"))


@pytest.fixture
def evaluate(fovea: Caller, tiny: Path, pages: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(held_out, "pages_folder", lambda: pages)
    return lambda *words: fovea("eval", tiny, "--documents", *words)


def test_rows_of_kinds_and_parts(evaluate: Any) -> None:
    outcome = evaluate("--count", 1, "--max-tokens", 4, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    rows = {row["kind"]: row["cases"] for row in outcome.json["rows"]}
    assert [rows[kind] for kind in KINDS] == [1] * len(KINDS)
    assert rows["all"] == len(KINDS) == rows["look: clean"] + rows["look: scanned"]
    assert {"page: invoice", "renderer: matplotlib", "text: at least 16 px"} <= set(rows)


def test_kinds_can_be_chosen(evaluate: Any) -> None:
    outcome = evaluate("--count", 2, "--max-tokens", 4, "--kinds", "json,bar", "--json")
    rows = {row["kind"]: row["cases"] for row in outcome.json["rows"]}
    assert (rows["json"], rows["bar"], rows["all"]) == (2, 2, 4)


def test_answers_may_be_longer_than_those_about_scenes(evaluate: Any) -> None:
    """Greedy answers of this checkpoint do not end, so they are as long as they may be."""
    [*_, every] = evaluate("--count", 1, "--kinds", "field", "--json").json["rows"]
    assert every["completion_tokens"] == 384


def test_a_sweep_over_pages(evaluate: Any) -> None:
    words = ("--sweep", "--count", 1, "--kinds", "field,bar", "--timed", 1, "--max-tokens", 4)
    outcome = evaluate(*words, "--methods", "resize", "--shares", "0.25", "--max-pixels", 60_000)
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    assert [setting["name"] for setting in result["settings"]] == ["full", "resize 0.25"]
    assert result["settings"][0]["scores"][-1]["cases"] == 2
    assert result["timed_on"] == "pages of 1344x1344"


@pytest.mark.parametrize("sweep", [(), ("--sweep",)], ids=["eval", "sweep"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kinds", "colour"), "unknown kind 'colour'; there are field, cell, row, line, title, "),
        (("--video",), "--video is for generated scenes; --documents has pages"),
        (("--count", 19, "--kinds", "field"), "have 18 questions of the kind 'field'; 19 were asked for"),
        (("--data", "own.jsonl"), "--documents has questions of its own; give it or --data"),
    ],
    ids=["kind", "video", "count", "data"],
)
def test_a_wrong_call(evaluate: Any, words: tuple[object, ...], message: str, sweep: tuple[str, ...]) -> None:
    outcome = evaluate(*sweep, *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.error_line


def test_without_the_package_the_error_names_the_command_that_installs_it(
    fovea: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_PACKAGE", "no_such_package")
    outcome = fovea("eval", "--documents")
    assert outcome.code == 2
    assert outcome.error_line == (
        "fovea: fovea-page is not installed; install it with: pip install 'fovea[page]'"
    )


@pytest.mark.parametrize(
    ("words", "name"), [((), "fovea-tiny"), (("--documents",), "fovea-page")], ids=["scenes", "documents"]
)
def test_the_model_unless_another_is_named(
    words: tuple[str, ...], name: str, fovea: Caller, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised where the model would be loaded, and holds its name."""

    def load(model: str, *_: object, **__: object) -> None:
        raise CheckpointError(f"loads {model}")

    monkeypatch.setattr(held_out, "pages_folder", lambda: pages)
    monkeypatch.setattr("fovea.engine.engine.load_model", load)
    assert fovea("eval", *words, "--count", 1).error_line == f"fovea: loads {name}"
