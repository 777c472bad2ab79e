"""Cases to ask: from the scene generator, or from a user's own JSONL.

A line of JSONL is `{"image": "a.png", "question": "...", "answers": ["...", "..."]}`; `images` takes several,
`answer` a single accepted answer, `kind` groups the report, `id` names the case. Image paths are relative to the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.core.errors import InvalidRequest
from fovea.evaluation.scenes import HELD_OUT_SEED, KINDS, generate

FIELDS = ("id", "kind", "image", "images", "question", "answer", "answers")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and every answer that counts as right."""

    question: str
    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """images: PIL images or paths, put before the first question. facts: numbers that reports group by."""

    id: str
    kind: str
    images: tuple[Any, ...]
    exchanges: tuple[Exchange, ...]
    facts: Mapping[str, int] = field(default_factory=dict)


def scene_cases(per_kind: int, kinds: Sequence[str] = KINDS, seed: int = HELD_OUT_SEED) -> Iterator[Case]:
    """Held-out scenes, `per_kind` of each kind, interleaved. Raises InvalidRequest for unknown kinds."""
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise InvalidRequest(f"unknown kind {unknown[0]!r}; there are {', '.join(KINDS)}", param="kinds")
    for sample in generate(seed, per_kind * len(kinds), tuple(kinds)):
        exchanges = tuple(Exchange(turn.question, turn.accepted) for turn in sample.turns)
        yield Case(sample.id, sample.kind, tuple(sample.images), exchanges, dict(sample.facts))


def read_jsonl(path: Path) -> list[Case]:
    """Raises InvalidRequest naming the line and what is wrong with it."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} can not be read: {error}", param="data") from error
    cases = [_case(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise InvalidRequest(f"{path} holds no cases", param="data")
    return cases


def _case(path: Path, number: int, line: str) -> Case:
    where = f"{path}:{number}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}", param="data") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: not a JSON object", param="data")
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise InvalidRequest(
            f"{where}: unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}", param="data"
        )
    question = value.get("question")
    answers = value.get("answers", [value["answer"]] if "answer" in value else [])
    if not isinstance(question, str) or not isinstance(answers, list) or not answers:
        raise InvalidRequest(f"{where}: question and answer (or answers) are required", param="data")
    names = value.get("images", [value["image"]] if "image" in value else [])
    images = tuple(path.parent / str(name) for name in names)
    missing = [image for image in images if not image.is_file()]
    if missing:
        raise InvalidRequest(f"{where}: {missing[0]} does not exist", param="data")
    exchange = Exchange(question, tuple(str(answer) for answer in answers))
    return Case(str(value.get("id", number)), str(value.get("kind", "all")), images, (exchange,))
