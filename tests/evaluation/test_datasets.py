"""Evaluation cases from scenes and from a user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import InvalidRequest
from fovea.evaluation.datasets import Case, Exchange, read_jsonl, scene_cases
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS, generate


def test_scene_cases_are_the_samples() -> None:
    cases = list(scene_cases(2, ("colour", "chat")))
    samples = list(generate(HELD_OUT_SEED, 4, ("colour", "chat")))
    assert [case.kind for case in cases] == ["colour", "chat", "colour", "chat"]
    for case, sample in zip(cases, samples, strict=True):
        assert (case.id, case.kind, dict(case.facts)) == (sample.id, sample.kind, dict(sample.facts))
        assert [image.tobytes() for image in case.images] == [image.tobytes() for image in sample.images]
        assert case.exchanges == tuple(Exchange(turn.question, turn.accepted) for turn in sample.turns)


def test_every_kind_has_its_share() -> None:
    kinds = [case.kind for case in scene_cases(1)]
    assert kinds == list(KINDS)
    assert len({case.id for case in scene_cases(3, ("reading", "json"))}) == 6


def test_kinds_of_large_images_are_available_by_name() -> None:
    assert [case.kind for case in scene_cases(1, (*DETAIL_KINDS, "colour"))] == [*DETAIL_KINDS, "colour"]


def test_the_seed_decides() -> None:
    first, again, other = (
        [case.exchanges for case in scene_cases(3, ("counting",), seed)] for seed in (5, 5, 6)
    )
    assert first == again != other


def test_the_error_about_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="unknown kind 'hue'; there are colour, shape, ") as caught:
        list(scene_cases(1, ("colour", "hue")))
    assert caught.value.param == "kinds"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """The function read(line, ...), which reads a file of these lines, in a folder with a.png and b/c.png."""
    (tmp_path / "b").mkdir()
    for name in ("a.png", "b/c.png"):
        (tmp_path / name).write_bytes(b"?")

    def read(*lines: Any) -> list[Case]:
        data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (tmp_path / "data.jsonl").write_bytes(b"\n".join(data))
        return read_jsonl(tmp_path / "data.jsonl")

    return read


def test_a_line_is_a_case(read: Any, tmp_path: Path) -> None:
    assert read(
        {"image": "a.png", "question": "What?", "answer": "red"},
        {"images": ["b/c.png", str(tmp_path / "a.png")], "question": "Where?",
         "answers": ["left", "on the left"], "kind": "place", "id": "p1"},
        {"question": "2+2?", "answer": 4, "id": 17},
    ) == [
        Case("1", "other", (tmp_path / "a.png",), (Exchange("What?", ("red",)),)),
        Case("p1", "place", (tmp_path / "b/c.png", tmp_path / "a.png"),
             (Exchange("Where?", ("left", "on the left")),)),
        Case("17", "other", (), (Exchange("2+2?", ("4",)),)),
    ]  # fmt: skip


def test_answers_of_any_json_type(read: Any) -> None:
    answers = ["text", 3, 2.5, True, None, {"a": [1, "x"]}, ["b"]]
    (case,) = read({"question": "q", "answers": answers})
    assert case.exchanges[0].accepted == ("text", "3", "2.5", "true", "null", '{"a": [1, "x"]}', '["b"]')


def test_empty_lines_count_as_lines_only(read: Any) -> None:
    cases = read(b"", {"question": "q", "answer": "x"}, b"  \r", b"", {"question": "r", "answer": "y"}, b"")
    assert [case.id for case in cases] == ["2", "5"]


def test_unicode_and_its_line_separators(read: Any) -> None:
    text = "één\u2028två\x85три"
    line = json.dumps({"question": text, "answer": text}, ensure_ascii=False).encode()
    (case,) = read(b"\xef\xbb\xbf" + line + b"\r")
    assert case.exchanges == (Exchange(text, (text,)),)


@pytest.mark.parametrize("line", [b"{", b"[" * 100_000, b"\xff", b"7", {"question": ["q"], "answer": "x"}])
def test_errors_name_file_and_line(line: Any, read: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"question": "q", "answer": "x"}, line)
    assert caught.value.message.startswith(f"{tmp_path / 'data.jsonl'}:2: ")
    assert caught.value.param == "data"
