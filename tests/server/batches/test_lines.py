"""Lines of batches: what is accepted as a request, and what is written for an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import InvalidRequest
from fovea.server import batch_runner
from fovea.server.batch_runner import answered_ids, check_lines, parse_line, result_line

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def write(path: Path, *texts: bytes) -> Path:
    path.write_bytes(b"\n".join(texts))
    return path


def test_request_is_read() -> None:
    read = parse_line(b"\xef\xbb\xbf" + line(), CHAT)  # Windows' editors put a mark before UTF-8
    assert (read.id, json.loads(read.body)) == ("a", GOOD["body"])


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (line(custom_id=None), "custom_id"),
        (line(custom_id=""), "custom_id"),
        (line(custom_id=7), "custom_id"),
        (line(custom_id="a" * 513), "custom_id"),
        (line(method="GET"), "method"),
        (line(url="/v1/completions"), "url"),
        (line(url="http://elsewhere/v1/chat/completions"), "url"),
        (line(body=None), "body"),
        (line(body=[]), "body"),
        (line(body={"stream": True}), "body.stream"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_lines(text: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_line(text, CHAT)
    assert caught.value.param == param


def test_wrong_lines_of_a_file_are_numbered(tmp_path: Path) -> None:
    texts = [line(), b"", line(custom_id="b", method="GET"), line(), b"{", b"  "]
    count, errors = check_lines(write(tmp_path / "in", *texts), CHAT)
    assert count == 4
    assert [(error["line"], error["code"]) for error in errors] == [
        (3, "invalid_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_line"),
    ]
    assert errors[0]["param"] == "method"


def test_good_file(tmp_path: Path) -> None:
    texts = [line(custom_id=str(number)) for number in range(3)]
    assert check_lines(write(tmp_path / "in", *texts), CHAT) == (3, [])


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_blank_lines_are_no_requests(tmp_path: Path, end: bytes) -> None:
    """Editors leave a blank last line, and some put a mark before UTF-8."""
    path = tmp_path / "in"
    for start in (b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf" + end):
        path.write_bytes(start + end.join((line(), b"", b"  ", line(custom_id="b"), b"", b"")))
        assert check_lines(path, CHAT) == (2, [])


def test_file_without_requests(tmp_path: Path) -> None:
    for texts in ((), (b"", b" ")):
        count, [error] = check_lines(write(tmp_path / "in", *texts), CHAT)
        assert (count, error["code"]) == (0, "empty_file")


def test_only_some_errors_are_named(tmp_path: Path) -> None:
    _, errors = check_lines(write(tmp_path / "in", *[b"{"] * 1000), CHAT)
    assert len(errors) == batch_runner.MOST_ERRORS


def test_too_many_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "MAX_LINES", 2)
    texts = [line(custom_id=str(number)) for number in range(4)]
    _, [error] = check_lines(write(tmp_path / "in", *texts), CHAT)
    assert (error["line"], error["code"]) == (3, "too_many_lines")


def test_answer_is_written_as_it_was_sent(tmp_path: Path) -> None:
    text = result_line('quote " \N{SNOWMAN}', 200, "request-1", b'{"choices": []}')
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    value = json.loads(text)
    assert value["custom_id"] == 'quote " \N{SNOWMAN}'
    assert value["response"] == {"status_code": 200, "request_id": "request-1", "body": {"choices": []}}
    assert value["error"] is None
    assert value["id"].startswith("batch_req_")
    path = tmp_path / "out"
    path.write_bytes(text + result_line("b", 400, "", b"{}"))
    assert answered_ids(path) == {'quote " \N{SNOWMAN}', "b"}
    assert answered_ids(tmp_path / "none") == set()
