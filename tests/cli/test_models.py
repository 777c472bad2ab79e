"""fovea models: one list in three forms."""

from __future__ import annotations

from pathlib import Path

from fovea.cli.models import markdown
from fovea.engine.models.registry import ARCHITECTURES
from tests.cli.support import Caller, start
from tests.support.checkpoints import ARCHITECTURES as TESTED

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_list_fits_a_terminal_of_80_columns(fovea: Caller) -> None:
    outcome = fovea("models")
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    for entry in ARCHITECTURES:
        for text in (entry.name, entry.model_type, entry.example, entry.vision, entry.text):
            assert text in outcome.out
    assert "fovea-tiny" in outcome.out


def test_json(fovea: Caller) -> None:
    rows = fovea("models", "--json").json
    assert [row["model_type"] for row in rows] == [entry.model_type for entry in ARCHITECTURES]
    assert {frozenset(row) for row in rows} == {
        frozenset({"model_type", "name", "vision", "text", "example"})
    }
    assert all(isinstance(value, str) and value for row in rows for value in row.values())


def test_listed_architectures_are_those_compared_with_transformers() -> None:
    assert {entry.tower or entry.model_type for entry in ARCHITECTURES} == set(TESTED)


def test_the_table_is_that_of_the_page(fovea: Caller) -> None:
    table = fovea("models", "--markdown").out
    assert table == markdown() + "\n"
    assert table in DOCS.read_text(encoding="utf-8")
    assert {line.count("|") for line in table.splitlines()} == {6}


def test_one_form_at_a_time(fovea: Caller) -> None:
    outcome = fovea("models", "--json", "--markdown")
    assert outcome.code == 2
    assert "not allowed with argument --json" in outcome.err


def test_a_closed_pipe() -> None:
    """`fovea models | true`: buffered output is dropped without a message."""
    process = start("models", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1
