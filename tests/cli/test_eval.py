"""fovea eval: counts that add up, over generated scenes and over a user's own questions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.cli.evaluate import markdown
from fovea.core.types import TokenPrompt
from fovea.evaluation.datasets import scene_cases
from fovea.evaluation.scenes import HELD_OUT_SEED, KINDS
from fovea.evaluation.score import Row, wilson
from tests.cli.support import Caller, write_lines

FEW = ("--max-tokens", "4")
COLUMNS = {
    "kind", "cases", "correct", "accuracy", "low", "high",
    "prompt_tokens", "image_tokens", "completion_tokens",
}  # fmt: skip


@pytest.fixture
def evaluate(fovea: Caller, tiny: Path) -> Any:
    return lambda *words: fovea("eval", tiny, *FEW, *words)


def answer(engine: Engine, question: str, *images: Path) -> str:
    return engine.generate(question, images=images, temperature=0, max_tokens=4).text


def assert_sound(rows: list[dict[str, Any]]) -> None:
    """Check that every row is consistent, and that the last row is the sum of the kinds."""
    assert rows[-1]["kind"] == "all"
    for row in rows:
        assert set(row) == COLUMNS
        assert 0 <= row["correct"] <= row["cases"]
        assert row["accuracy"] == row["correct"] / row["cases"]
        assert (row["low"], row["high"]) == wilson(row["correct"], row["cases"])
        assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
    kinds = [row for row in rows[:-1] if row["kind"] in KINDS]
    assert rows[-1]["cases"] == sum(row["cases"] for row in kinds)
    assert rows[-1]["correct"] == sum(row["correct"] for row in kinds)


def test_scenes_as_json(evaluate: Any) -> None:
    outcome = evaluate("--count", 2, "--kinds", "colour, counting", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert {name: outcome.json[name] for name in ("model", "seed", "failed")} == {
        "model": "tiny", "seed": HELD_OUT_SEED, "failed": 0,
    }  # fmt: skip
    rows = outcome.json["rows"]
    assert_sound(rows)
    cases = {row["kind"]: row["cases"] for row in rows}
    assert (cases["colour"], cases["counting"], cases["all"]) == (2, 2, 4)
    assert all(row["image_tokens"] > 0 and row["completion_tokens"] == 4 for row in rows)
    assert all(row["prompt_tokens"] > row["image_tokens"] for row in rows)


def test_every_kind_is_used_unless_some_are_named(evaluate: Any) -> None:
    rows = evaluate("--count", 1, "--json").json["rows"]
    assert_sound(rows)
    assert [row["kind"] for row in rows if row["kind"] in KINDS] == list(KINDS)


def test_frames_in_order_are_shown_as_a_video(evaluate: Any) -> None:
    """Two frames make one group of visual tokens, so about half remain. Other kinds do not change."""
    words = ("--count", 2, "--kinds", "motion,colour", "--json")
    images, video = (evaluate(*words, *more).json["rows"] for more in ((), ("--video",)))
    before, now = ({row["kind"]: row["image_tokens"] for row in rows} for rows in (images, video))
    assert now["colour"] == before["colour"]
    halves = [-(-len(case.images) // 2) / len(case.images) for case in scene_cases(2, ("motion",))]
    assert now["motion"] <= max(halves) * before["motion"]
    assert now["motion"] >= 0.5 * before["motion"]


def test_fewer_visual_tokens(evaluate: Any) -> None:
    """The counts show the kept tokens, and the result shows the wish."""
    words = ("--count", 3, "--kinds", "colour", "--json")
    full, half = evaluate(*words).json, evaluate(*words, "--method", "uniform", "--budget", 0.5).json
    assert full["visual_tokens"] is None
    assert half["visual_tokens"] == {"method": "uniform", "keep": 0.5, "budget": None}
    kept, of = half["rows"][-1]["image_tokens"], full["rows"][-1]["image_tokens"]
    assert of / 2 <= kept < of / 2 + 1
    few = evaluate(*words, "--method", "random", "--budget", 7).json
    assert few["visual_tokens"] == {"method": "random", "keep": None, "budget": 7}
    assert few["rows"][-1]["image_tokens"] == 7


def test_an_unknown_method(evaluate: Any) -> None:
    outcome = evaluate("--count", 1, "--method", "magic")
    assert outcome.code == 2
    assert "there is no method 'magic'; accepted: resize, uniform" in outcome.error_line


def test_the_same_seed_gives_the_same_questions(evaluate: Any) -> None:
    first = evaluate("--count", 3, "--kinds", "reading", "--json", "--seed", 7)
    assert evaluate("--count", 3, "--kinds", "reading", "--json", "--seed", 7, "--concurrency", 1) == first
    assert evaluate("--count", 3, "--kinds", "reading", "--json", "--seed", 8).out != first.out


def test_a_kind_named_twice_is_used_once(evaluate: Any) -> None:
    rows = evaluate("--count", 2, "--kinds", "colour,colour", "--json").json["rows"]
    assert [(row["kind"], row["cases"]) for row in rows] == [("colour", 2), ("all", 2)]


def test_questions_from_a_file(evaluate: Any, engine: Engine, folder: Path) -> None:
    """The expected answers are the model's own for two of three cases of one kind, and wrong otherwise."""
    one, two = folder / "a.png", folder / "b.png"
    data = write_lines(
        folder / "own.jsonl",
        {"image": "a.png", "question": "what?", "answer": answer(engine, "what?", one), "kind": "what"},
        {
            "images": ["a.png", "b.png"], "question": "both?",
            "answers": ["no", answer(engine, "both?", one, two)], "kind": "what",
        },
        {"question": "where?", "answer": "nowhere", "kind": "what"},
        b"",
        {"image": str(two), "question": "who?", "answer": 7, "kind": "who", "id": "x"},
    )  # fmt: skip
    outcome = evaluate("--data", data, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["seed"] is None
    rows = outcome.json["rows"]
    assert [(row["kind"], row["correct"], row["cases"]) for row in rows] == [
        ("what", 2, 3), ("who", 0, 1), ("all", 2, 4),
    ]  # fmt: skip
    assert [row["image_tokens"] for row in rows] == [6, 6, 6]


def test_without_kinds_there_is_one_row(evaluate: Any, folder: Path) -> None:
    data = write_lines(folder / "own.jsonl", {"question": "what?", "answer": "x"})
    rows = evaluate("--data", data, "--json").json["rows"]
    assert [row["kind"] for row in rows] == ["all"]


def test_wrong_answers_are_shown(evaluate: Any, engine: Engine, folder: Path) -> None:
    right = answer(engine, "where?")
    data = write_lines(
        folder / "own.jsonl",
        {"id": "door", "question": "what?", "answers": ["a door", "door"]},
        {"id": "wall", "question": "where?", "answer": right},
    )
    outcome = evaluate("--data", data, "--wrong", "--json")
    assert outcome.code == 0
    assert outcome.err == f"door: 'what?' -> {answer(engine, 'what?')!r}, not 'a door'\n"


def test_the_table_fits_a_terminal(evaluate: Any) -> None:
    outcome = evaluate("--count", 4, "--kinds", "reading,counting")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["kind", "right", "accuracy", "95%", "interval", "prompt", "visual", "answer"]
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[:3] == ["all", "0/8", "0.0%"]


def test_markdown(evaluate: Any) -> None:
    lines = evaluate("--count", 1, "--kinds", "colour", "--markdown").out.splitlines()
    assert lines[0] == "| kind | right | accuracy | 95% interval | visual tokens |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["colour", "all"]
    assert {line.count("|") for line in lines} == {6}
    row = Row("colour", 8, 6, *wilson(6, 8), 30.0, 12.4, 2.0)
    assert markdown([row]).splitlines()[-1] == "| colour | 6/8 | 75.0% | 40.9% - 92.9% | 12 |"


def test_a_case_that_cannot_be_asked_counts_as_wrong_and_is_reported(
    evaluate: Any, engine: Engine, folder: Path
) -> None:
    right = {"question": "what?", "answer": answer(engine, "what?")}
    data = write_lines(
        folder / "own.jsonl",
        right,
        {"id": "words", "image": "no.png", "question": "what?", "answer": "x"},
        {"question": "red circle " * 3000, "answer": "x"},
        right,
    )
    outcome = evaluate("--data", data, "--json", "--wrong")
    assert outcome.code == 1
    assert outcome.json["failed"] == 2
    assert [(row["correct"], row["cases"]) for row in outcome.json["rows"]] == [(2, 4)]
    first, second = sorted(outcome.err.splitlines(), reverse=True)
    assert first.startswith("fovea: case words could not be asked: the data is not an image")
    assert second.startswith("fovea: case 3 could not be asked: the prompt has ")


def test_many_failures_are_reported_in_few_lines(evaluate: Any, folder: Path) -> None:
    line = {"image": "no.png", "question": "what?", "answer": "x"}
    data = write_lines(folder / "own.jsonl", *[line] * 14)
    lines = evaluate("--data", data, "--json").err.splitlines()
    assert (len(lines), lines[-1]) == (11, "fovea: and 4 more")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: "),
        (b'{"question": "\xff", "answer": "x"}', "not JSON: 'utf-8' codec"),
        ([], "not a JSON object"),
        ({"question": "q"}, "question and answer (or answers) are required"),
        ({"answer": "x"}, "question and answer (or answers) are required"),
        ({"question": "q", "answers": []}, "question and answer (or answers) are required"),
        ({"question": "q", "answers": "x"}, "answers takes a list"),
        ({"question": "q", "answer": "x", "answers": ["y"]}, "either answer or answers, not both"),
        ({"question": "q", "answer": "x", "image": "none.png"}, "none.png does not exist"),
        ({"question": "q", "answer": "x", "images": "a.png"}, "images takes a list"),
        ({"question": "q", "answer": "x", "image": 5}, "an image is given by its path"),
        ({"question": "q", "answer": "x", "picture": "a.png"}, "unknown field 'picture'; known: id, kind, "),
        ({"question": "q", "answer": "x", "kind": "all"}, "kind 'all' is the report's last row"),
    ],
)
def test_the_error_for_a_wrong_line_names_file_and_line(
    line: Any, message: str, fovea: Caller, folder: Path
) -> None:
    """The error comes before the model is loaded; this one does not exist."""
    data = write_lines(folder / "own.jsonl", {"question": "q", "answer": "x"}, b"", line)
    outcome = fovea("eval", "./none", "--data", data)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error_line.startswith(f"fovea: {data}:3: ")
    assert message in outcome.error_line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "none.jsonl"), "none.jsonl cannot be read: No such file or directory"),
        (("--data", "empty.jsonl"), "empty.jsonl holds no cases"),
        (("--data", "."), ". cannot be read: Is a directory"),
        (("--data", "empty.jsonl", "--kinds", "colour"), "--kinds is for generated scenes"),
        (("--kinds", "colour,tint"), "unknown kind 'tint'; there are colour, shape, "),
        (("--kinds", "colour,"), "unknown kind ''; there are colour, shape, "),
        (("--data", "empty.jsonl", "--video"), "--video is for generated scenes"),
        (("--kinds", "colour", "--video"), "--video shows motion as a video; --kinds leaves it out"),
        (("--kinds", "colour", "--count", "1"), "'./none' is neither a folder"),
    ],
)
def test_a_wrong_call(
    words: tuple[str, ...], message: str, fovea: Caller, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty.jsonl").write_text("\n\n")
    outcome = fovea("eval", "./none", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error_line.startswith(f"fovea: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--count", "0"), "argument --count: 0 is below 1"),
        (("--concurrency", "-1"), "argument --concurrency: -1 is below 1"),
        (("--json", "--markdown"), "argument --markdown: not allowed with argument --json"),
        (("one", "two"), "unrecognized arguments: two"),
    ],
)
def test_wrong_flags(words: tuple[str, ...], message: str, fovea: Caller) -> None:
    outcome = fovea("eval", *words)
    assert outcome.code == 2
    assert message in outcome.err


def test_conversations_continue_with_the_models_own_answers(evaluate: Any, tiny: Path) -> None:
    """Tokens are summed over a case's exchanges, and each exchange repeats the earlier ones."""
    case = next(scene_cases(1, ("chat",)))
    row = evaluate("--count", 1, "--kinds", "chat", "--json").json["rows"][0]
    assert len(case.exchanges) > 1
    assert row["completion_tokens"] == 4 * len(case.exchanges)
    assert row["image_tokens"] % len(case.exchanges) == 0


def test_perplexity_is_that_of_the_log_probabilities_of_pieces(
    fovea: Caller, tiny: Path, engine: Engine, tmp_path: Path
) -> None:
    text = "the blue square is left of the red circle. " * 4
    (tmp_path / "text.txt").write_text(text)
    found = fovea("eval", tiny, "--perplexity", tmp_path / "text.txt", "--window", 20, "--json").json
    ids = engine.tokenizer.encode_plain(text)
    nats = []
    for first in range(0, len(ids), 20):
        prompt = TokenPrompt(tuple(ids[first : first + 20]))
        scored = engine.generate(prompt, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        nats += [-entry.logprob for entry in scored if entry is not None and entry.logprob is not None]
    assert found["tokens"] == len(nats)
    assert found["perplexity"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / len(text), rel=1e-5)
    assert found["kv_dtype"] == "auto"


def test_perplexity_names_the_type_of_the_kv_cache(fovea: Caller, tiny: Path, tmp_path: Path) -> None:
    """The 8-bit cache changes the result a little, so the output says which one it was."""
    (tmp_path / "text.txt").write_text("the blue square is left of the red circle. " * 4)
    words = ("eval", tiny, "--perplexity", tmp_path / "text.txt", "--kv-dtype")
    plain, small = (fovea(*words, name, "--json").json for name in ("auto", "int8"))
    assert (plain["kv_dtype"], small["kv_dtype"]) == ("auto", "int8")
    assert plain["perplexity"] != small["perplexity"]
    assert small["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-2)
    assert "kv dtype        int8\n" in fovea(*words, "int8").out


def test_perplexity_has_no_deadline(
    fovea: Caller, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's timeout of requests is not for a text, which a slow machine may score for many minutes."""
    timeouts = []
    stream = Engine.stream

    def spy(engine: Engine, *args: Any, **options: Any) -> Any:
        timeouts.append(engine.request(*args, **options).timeout)
        return stream(engine, *args, **options)

    monkeypatch.setattr(Engine, "stream", spy)
    monkeypatch.setenv("FOVEA_REQUEST_TIMEOUT", "0.001")
    (tmp_path / "text.txt").write_text("the blue square is left of the red circle. " * 4)
    outcome = fovea("eval", tiny, "--perplexity", tmp_path / "text.txt", "--window", 20)
    assert outcome.code == 0, outcome.err
    assert set(timeouts) == {None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--window", 5), "--window is for --perplexity"),
        (("--perplexity", "missing.txt"), "missing.txt cannot be read: No such file or directory"),
        (("--perplexity", "one.txt", "--kinds", "colour"), "--kinds is for questions, not for --perplexity"),
        (("--perplexity", "one.txt", "--window", 1), "--window is 1; accepted: 2 to"),
        (("--perplexity", "one.txt"), "one.txt has 1 tokens, of which none can be predicted"),
    ],
)
def test_perplexity_of_what_cannot_be_scored(
    fovea: Caller, tiny: Path, words: tuple[Any, ...], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("a")
    outcome = fovea("eval", tiny, *words)
    assert outcome.code != 0
    assert message in outcome.err
