"""OUT of `fovea batch`: which lines are answered, and which failed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fovea.core.errors import InvalidRequest
from fovea.core.json_text import one_line, parse_object


class Progress(NamedTuple):
    """The state of OUT.

    done: number of whole lines that are written, answers and errors.
    failed: numbers of those that are errors, from 1 on.
    """

    done: int
    failed: tuple[int, ...]


def write_body(body: Mapping[str, Any]) -> bytes:
    """A line of OUT. A JSON string may contain a lone surrogate, which is written as its JSON escape."""
    return one_line(json.dumps(body, ensure_ascii=False)).encode("utf-8", "backslashreplace") + b"\n"


def replace_lines(output: Path, bodies: Mapping[int, Mapping[str, Any]]) -> None:
    """Replace lines of OUT by others, all at once. bodies: by number of the line, from 1 on."""
    lines = output.read_bytes().split(b"\n")[:-1]
    for number, body in bodies.items():
        lines[number - 1] = write_body(body)[:-1]
    output = output.resolve()  # a link stays one
    aside = output.with_name(f".{output.name}.new")
    aside.write_bytes(b"".join(line + b"\n" for line in lines))
    shutil.copymode(output, aside)
    os.replace(aside, output)


def check_output(source: Path, output: Path) -> None:
    """Check OUT before a model is loaded. Raises InvalidRequest."""
    if output.exists() and source.samefile(output):
        raise InvalidRequest("IN and OUT are the same file")
    try:
        output.open("ab").close()
    except OSError as error:
        raise InvalidRequest(f"{output} cannot be written: {error.strerror}") from error


def resume_at(output: Path, lines: Sequence[bytes]) -> Progress:
    """Return how many lines of IN have a line in OUT, and which of these are errors.

    A last line that a crash cut off is removed. Raises InvalidRequest if OUT does not answer these lines;
    then OUT stays as it is.
    """
    *whole, rest = output.read_bytes().split(b"\n")
    if len(whole) > len(lines):
        raise InvalidRequest(f"{output} has {len(whole)} lines, IN only {len(lines)}: not its output")
    bodies = [_check_answers(output, n, *pair) for n, pair in enumerate(zip(whole, lines, strict=False), 1)]
    if rest:
        begins = f'{{"line": {len(whole) + 1},'.encode()
        if len(whole) == len(lines) or not (rest.startswith(begins) or begins.startswith(rest)):
            raise InvalidRequest(f"{output}:{len(whole) + 1} is no answer to IN: not its output")
        with output.open("r+b") as file:
            file.truncate(output.stat().st_size - len(rest))
    return Progress(len(whole), tuple(n for n, body in enumerate(bodies, 1) if "error" in body))


def _check_answers(output: Path, number: int, answer: bytes, line: bytes) -> dict[str, Any]:
    """Return a line of OUT as an object. Raises InvalidRequest unless number and id match the line of IN."""
    try:
        name = parse_object(line).get("id", number)
    except InvalidRequest:
        name = number
    try:
        body = json.loads(answer.decode())
    except (ValueError, RecursionError):
        body = None
    same = isinstance(body, dict) and body.get("line") == number
    if not same or json.dumps(body.get("id")) != json.dumps(name):
        raise InvalidRequest(f"{output}:{number} does not answer line {number} of IN: not its output")
    return dict(body)
