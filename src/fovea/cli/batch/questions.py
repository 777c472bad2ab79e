"""IN of `fovea batch`: the lines of a file, or one line per image of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fovea.api.answer_format import FormatFields, answer_format
from fovea.api.explain import explained, fields_of
from fovea.api.unknown import ignored_fields
from fovea.core.errors import InvalidRequest
from fovea.core.json_text import is_blank

FIELDS = ("id", "image", "images", "question", "messages", "params")
TYPES: tuple[tuple[str, type, str], ...] = (
    ("image", str, "a path"),
    ("images", list, "a list of paths"),
    ("question", str, "text"),
    ("messages", list, "a list of messages"),
    ("params", dict, "an object of sampling parameters"),
)
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"""Endings of the names of images in a folder."""


def read_questions(path: Path) -> list[bytes]:
    """Return the lines of IN, a file or a folder. Raises InvalidRequest if it cannot be read."""
    return _folder_lines(path) if path.is_dir() else _file_lines(path)


def _folder_lines(folder: Path) -> list[bytes]:
    """Return a line for each image in a folder and the folders in it, in the order of their names.

    Hidden files are left out. Raises InvalidRequest if there is no image.
    """
    names = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGES and path.is_file() and not _is_hidden(path.relative_to(folder))
    )
    if not names:
        raise InvalidRequest(f"{folder} has no image; accepted are files that end in {', '.join(IMAGES)}")
    return [json.dumps({"id": name.as_posix(), "image": name.as_posix()}).encode() for name in names]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_lines(path: Path) -> list[bytes]:
    """Return the lines of IN as bytes, so that a line that is not text does not stop the others.

    Only a line feed ends a line, because JSON strings may contain U+2028 and similar characters. Blank lines
    are left out and not counted: editors and shells add them, above all at the end.
    Raises InvalidRequest if IN cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    return [line for line in lines if not is_blank(line)]


def check_question(value: dict[str, Any]) -> None:
    """Raise InvalidRequest unless the fields are known, compatible and of the right types."""
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}", param=unknown[0])
    for one, other in (
        ("question", "messages"),
        ("image", "images"),
        ("image", "messages"),
        ("images", "messages"),
    ):
        if one in value and other in value:
            raise InvalidRequest(f"either {one} or {other}, not both", param=one)
    if "question" not in value and not value.get("messages"):
        raise InvalidRequest("question or messages is required")
    for name, kind, words in TYPES:
        if name in value and not isinstance(value[name], kind):
            raise InvalidRequest(f"{name} takes {words}", param=name)


def sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    """Convert sampling parameters from JSON to the types of SamplingParams. Raises InvalidRequest.

    The form of the answer has the names that it has over HTTP, such as response_format.
    """
    values = dict(params)
    fields = {name: values.pop(name) for name in FormatFields.model_fields if name in values}
    with explained():
        body = FormatFields.model_validate(fields, extra="allow")
        ignored_fields(body, fields_of(FormatFields), strict=True)
        form = answer_format(body)
    if fields:  # also if they ask for plain text, against the flags
        values["format"] = form
    for name, kind in (
        ("stop", str), ("bad_words", str), ("stop_token_ids", int), ("allowed_token_ids", int),
    ):  # fmt: skip
        if name in values:
            entries = [values[name]] if isinstance(values[name], kind) else values[name]
            if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
                raise InvalidRequest(f"{name} takes a list of {kind.__name__}", param=name)
            values[name] = tuple(entries)
    if "logit_bias" in values:
        try:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        except (AttributeError, ValueError) as error:
            raise InvalidRequest("logit_bias takes an object of token ids", param="logit_bias") from error
    return values
