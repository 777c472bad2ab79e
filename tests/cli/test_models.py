"""fovea models: one list in three forms, and visual tokens of known models."""

from __future__ import annotations

import os
from pathlib import Path

from fovea.cli.models import markdown
from fovea.engine.models.registry import ARCHITECTURES
from fovea.engine.vision.token_rules import known_models
from tests.cli.support import FORKED, Caller
from tests.support.checkpoints import ARCHITECTURES as TESTED
from tests.support.checkpoints.text import TEXT_MODELS
from tests.support.forks import Fork

WAIT_FOR_FILE = """import os, time
while not os.path.exists(os.environ["CLOSED"]):
    time.sleep(0.01)"""
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
    tested = {*TESTED, *TEXT_MODELS}
    assert {entry.tower or entry.model_type for entry in ARCHITECTURES} == tested


def test_the_table_is_that_of_the_page(fovea: Caller) -> None:
    table = fovea("models", "--markdown").out
    assert table == markdown() + "\n"
    assert table in DOCS.read_text(encoding="utf-8")
    assert {line.count("|") for line in table.splitlines()} == {6}


def test_one_form_at_a_time(fovea: Caller) -> None:
    outcome = fovea("models", "--json", "--markdown")
    assert outcome.code == 2
    assert "not allowed with argument --json" in outcome.err


def test_a_closed_pipe(tmp_path: Path) -> None:
    """`fovea models | true`: buffered output is dropped without a message."""
    closed = tmp_path / "closed"
    process = Fork(f"{WAIT_FOR_FILE}\n{FORKED}", ["models", "--json"], {**os.environ, "CLOSED": str(closed)})
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    closed.touch()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


def test_visual_tokens_of_known_models(fovea: Caller) -> None:
    outcome = fovea("models", "--tokens", "1024x768")
    assert (outcome.code, outcome.err) == (0, "")
    title, *lines = outcome.out.splitlines()
    assert title.split() == ["1024x768", "model"]
    counts = {line.split()[1]: int(line.split()[0]) for line in lines}
    assert list(counts) == list(known_models())
    assert counts["Qwen/Qwen2.5-VL-7B-Instruct"] == 999
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_visual_tokens_of_models_by_name_and_folder(fovea: Caller, tiny: Path) -> None:
    names = ["unsloth/Qwen3-VL-8B-Instruct-GGUF", str(tiny), "openai-tiles"]
    rows = fovea("models", "--tokens", "1024x768,64x64", "--json", *names).json
    assert [(row["model"], row["width"], row["tokens"]) for row in rows] == [
        (names[0], 1024, 768),
        (names[0], 64, 64),
        (names[1], 1024, rows[2]["tokens"]),
        (names[1], 64, rows[3]["tokens"]),
        (names[2], 1024, 765),
        (names[2], 64, 255),
    ]
    assert rows[0]["rule"] == "Qwen/Qwen3-VL-8B-Instruct"
    assert all(row["problem"] is None for row in rows)


def test_models_that_are_not_known_or_refuse_a_size(fovea: Caller) -> None:
    outcome = fovea("models", "--tokens", "1000x2,8x8", "gpt-9", "Qwen/Qwen2-VL-7B-Instruct")
    assert (outcome.code, outcome.err) == (1, "")
    assert "-  gpt-9  (no known model has this name)" in outcome.out
    assert "        -          4  Qwen/Qwen2-VL-7B-Instruct  (it is 1000x2 pixels; one edge" in outcome.out


def test_mistakes_about_tokens(fovea: Caller) -> None:
    assert "accepted: WIDTHxHEIGHT" in fovea("models", "--tokens", "1024").error_line
    assert "accepted: WIDTHxHEIGHT" in fovea("models", "--tokens", "0x5").error_line
    assert "needs --tokens" in fovea("models", "Qwen/Qwen2-VL-7B-Instruct").error_line
    assert "different tables" in fovea("models", "--tokens", "1x1", "--check", "fovea-tiny").error_line
    assert "--markdown without MODEL" in fovea("models", "--tokens", "1x1", "--markdown", "x").error_line
    assert "--revision is for --check" in fovea("models", "--tokens", "1x1", "--revision", "x").error_line


def test_the_table_of_visual_tokens_has_all_known_models(fovea: Caller) -> None:
    table = fovea("models", "--tokens", "512x512,3000x4000", "--markdown").out
    assert "| 512 x 512 | 3000 x 4000 |" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert all(model in table for model in known_models())
