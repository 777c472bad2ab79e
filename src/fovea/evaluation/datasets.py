"""Evaluation cases, from the scene generator or from a JSONL file of the user's own.

A line of JSONL is `{"image": "a.png", "question": "...", "answers": ["...", "..."]}`. `images` takes a list
of images, `answer` a single accepted answer; `kind` groups the report, `id` names the case. `schema` is a
JSON Schema that the answer has to follow. `tools` are tools in OpenAI's form that the model may call; its
answer is then the call as the model writes it. Image paths are relative to the file. An answer may be any
JSON value: a number must be answered as it is written, an object or a list with any spacing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.core.errors import InvalidRequest
from fovea.core.json_text import is_blank, parse_object
from fovea.evaluation.scenes import ALL_KINDS, HELD_OUT_SEED, KINDS, Sample, generate

MOTION = "motion"
"""The kind whose images are the frames of a video, in order."""
OTHER = "other"
"""The kind of a case that has no field `kind`."""
FIELDS = ("id", "kind", "image", "images", "question", "answer", "answers", "schema", "tools")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question, and all answers that count as right.

    role: who says the question: user, or tool for the result of a call.
    schema: JSON Schema that the answer has to follow; None: any text.
    """

    question: str
    accepted: tuple[str, ...]
    role: str = "user"
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation about some images, whose answers are scored.

    id: name of the case.
    kind: the group of the report that the case belongs to.
    images: PIL images or paths; they precede the first question.
    exchanges: the questions in order, with their accepted answers.
    facts: numbers that reports select cases by, such as the length of the text to read.
    video: whether the images are sent as the frames of one video.
    tools: definitions of the tools that the model is offered, in OpenAI's form.
    """

    id: str
    kind: str
    images: tuple[Any, ...]
    exchanges: tuple[Exchange, ...]
    facts: Mapping[str, int] = field(default_factory=dict)
    video: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()


def scene_cases(
    per_kind: int,
    kinds: Sequence[str] = KINDS,
    seed: int = HELD_OUT_SEED,
    video: bool = False,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> Iterator[Case]:
    """Cases from generated scenes, `per_kind` of each kind, the kinds in turn.

    Each case is drawn when it is needed. Raises InvalidRequest for unknown kinds.

    seed: by default that of scenes that no training has used.
    video: whether the frames of the kind `motion` are sent as a video instead of separate images.
    sizes: choices of (width, height); see `scenes.generate`.
    """
    unknown = sorted(set(kinds) - set(ALL_KINDS))
    if unknown:
        raise InvalidRequest(f"unknown kind {unknown[0]!r}; there are {', '.join(ALL_KINDS)}", param="kinds")
    samples = generate(seed, per_kind * len(kinds), tuple(kinds), sizes)
    return (_scene_case(sample, video and sample.kind == MOTION) for sample in samples)


def _scene_case(sample: Sample, video: bool) -> Case:
    exchanges = tuple(Exchange(turn.question, turn.accepted, turn.role, turn.schema) for turn in sample.turns)
    facts = dict(sample.facts)
    return Case(sample.id, sample.kind, tuple(sample.images), exchanges, facts, video, sample.tools)


def read_jsonl(path: Path) -> list[Case]:
    """Read all cases of a JSONL file. Raises InvalidRequest, which names the line and its fault."""
    try:
        # Not splitlines(): a JSON string may contain U+2028 and other line separators.
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param="data") from error
    cases = [_case(path, number, line) for number, line in enumerate(lines, 1) if not is_blank(line)]
    if not cases:
        raise InvalidRequest(f"{path} holds no cases", param="data")
    return cases


def _case(path: Path, number: int, line: bytes) -> Case:
    try:
        return _read_case(path.parent, number, line)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}:{number}: {error.message}", param="data") from error


def _read_case(folder: Path, number: int, line: bytes) -> Case:
    value = parse_object(line)
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}")
    question = value.get("question")
    answers = _one_or_many(value, "answer", "answers")
    if not isinstance(question, str) or not answers:
        raise InvalidRequest("question and answer (or answers) are required")
    names = _one_or_many(value, "image", "images")
    if not all(isinstance(name, str) for name in names):
        raise InvalidRequest("an image is given by its path")
    images = tuple(folder / name for name in names)
    missing = [image for image in images if not image.is_file()]
    if missing:
        raise InvalidRequest(f"{missing[0]} does not exist")
    kind = str(value.get("kind", OTHER))
    if kind == "all":
        raise InvalidRequest("kind 'all' is the report's last row, over every kind; choose another word")
    accepted = tuple(answer if isinstance(answer, str) else json.dumps(answer) for answer in answers)
    schema, tools = value.get("schema"), value.get("tools", [])
    if schema is not None and not isinstance(schema, dict):
        raise InvalidRequest("schema takes a JSON Schema, an object")
    if not isinstance(tools, list) or not all(map(_has_name, tools)):
        raise InvalidRequest("tools takes a list of functions in OpenAI's form")
    exchange = Exchange(question, accepted, schema=schema)
    return Case(str(value.get("id", number)), kind, images, (exchange,), tools=tuple(tools))


def _has_name(tool: Any) -> bool:
    """Whether a value has the form of a tool."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _one_or_many(value: Mapping[str, Any], one: str, many: str) -> list[Any]:
    if one in value and many in value:
        raise InvalidRequest(f"either {one} or {many}, not both")
    values = [value[one]] if one in value else value.get(many, [])
    if not isinstance(values, list):
        raise InvalidRequest(f"{many} takes a list")
    return values
