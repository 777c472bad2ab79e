"""The lines of a batch: what a request in a file looks like, and what is written for its answer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.api.cutter import Cut, Cutter
from fovea.api.wire import check_count
from fovea.core.errors import InvalidRequest
from fovea.core.json_lines import is_blank, parse_object
from fovea.server.batches.store import read_lines

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_LINES = 50_000
MOST_ERRORS = 50
"""Most wrong lines that a batch names."""
LONGEST_ID = 256
LONGEST_LINE = 16 * 1024 * 1024
SLICE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch.

    id: the client's name of it, unique in the batch.
    body: of the request, as JSON.
    """

    id: str
    body: bytes


def parse_line(text: bytes, endpoint: str) -> Line:
    """Read a line. Raises InvalidRequest, which says what is wrong with it.

    Long strings are cut out before it is parsed, as in bodies of requests, and put back unchanged.
    """
    if len(text) > LONGEST_LINE:
        raise InvalidRequest(f"the line has more than {LONGEST_LINE} bytes")
    cutter = Cutter()
    for at in range(0, len(text), SLICE):
        cutter.feed(text[at : at + SLICE])
    cut = cutter.finish()
    value = parse_object(bytes(cut.skeleton))
    check_count(value)
    name = value.get("custom_id")
    if not isinstance(name, str) or name in cut.strings or not 0 < len(name) <= LONGEST_ID:
        raise InvalidRequest(
            f"custom_id is required, a text of up to {LONGEST_ID} characters", param="custom_id"
        )
    if value.get("method") != "POST":
        raise InvalidRequest(f"method is {value.get('method')!r:.40}; accepted: 'POST'", param="method")
    if value.get("url") != endpoint:
        raise InvalidRequest(
            f"url is {value.get('url')!r:.80}; accepted: {endpoint!r}, the endpoint of the batch", param="url"
        )
    body = value.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body is required, an object", param="body")
    if body.get("stream"):
        raise InvalidRequest("body.stream: answers of a batch are not streamed", param="body.stream")
    return Line(name, _with_strings(json.dumps(body).encode(), cut))


def _with_strings(text: bytes, cut: Cut) -> bytes:
    """Put the strings that were cut out back into a JSON text."""
    if not cut.strings:
        return text
    names = cut.strings
    return re.sub(rb'"([0-9a-f]{32}:\d+)"', lambda match: _quoted(match, names), text)


def _quoted(match: re.Match[bytes], strings: Mapping[str, bytearray]) -> bytes:
    string = strings.get(match[1].decode())
    return match[0] if string is None else b'"' + bytes(string) + b'"'


def check_lines(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """Check all lines of a file. Returns their number, and what is wrong with the wrong ones."""
    count, names = 0, set()
    errors: list[dict[str, Any]] = []

    def note(number: int, code: str, message: str, param: str | None = None) -> None:
        errors.append({"code": code, "line": number, "message": message, "param": param})

    for number, text in enumerate(read_lines(path, LONGEST_LINE + 2), 1):
        if is_blank(text):
            continue
        count += 1
        if count > MAX_LINES:
            note(number, "too_many_lines", f"the file has more than {MAX_LINES} requests")
        else:
            try:
                line = parse_line(text, endpoint)
                if line.id in names:
                    note(
                        number, "duplicate_custom_id", f"custom_id {line.id[:64]!r} occurs twice", "custom_id"
                    )
                names.add(line.id)
            except InvalidRequest as error:
                note(number, "invalid_line", error.message, error.param)
        if len(errors) >= MOST_ERRORS or count > MAX_LINES:
            break
    if not count:
        note(1, "empty_file", "the file has no requests")
    return count, errors


def result_line(line_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer."""
    head = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line_id}
    response = f'{{"status_code":{status},"request_id":{json.dumps(request_id)},"body":'.encode()
    return json.dumps(head)[:-1].encode() + b',"response":' + response + body + b'},"error":null}\n'


def answered_ids(path: Path) -> set[str]:
    """The names of the requests that a file of results has."""
    return {json.loads(text)["custom_id"] for text in read_lines(path) if text}
