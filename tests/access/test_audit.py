"""The audit log has a line per request, and never content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fovea.access.audit import NO_NAME, Audit
from fovea.observe.logs import JsonFormatter

AT_S = 1_790_000_000.1234
PLAIN: dict[str, Any] = {
    "id": "req-7f3a",
    "tenant": "alice",
    "key": "9f86d081",
    "model_asked": "Qwen/Qwen3-VL-8B-Instruct",
    "route": "image, next",
    "status": 200,
    "estimated": False,
    "image_list": [(1024, 768, hashlib.sha256(b"image").hexdigest())],
    "cache": "miss",
    "seconds": 1.25,
}


def written(tmp_path: Path, *lines: dict[str, Any]) -> str:
    path = tmp_path / "audit.log"
    audit = Audit(target=str(path))
    assert audit.on
    for line in lines:
        audit.answered(AT_S, line)
    audit.close()
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text()


def test_a_line(tmp_path: Path) -> None:
    assert json.loads(written(tmp_path, PLAIN)) == {
        "time": "2026-09-21T14:13:20.123Z",
        **PLAIN,
        "image_list": [[1024, 768, "6105d6cc76af4003"]],
    }


SECRETS = (
    "Tell nobody about project BLUEBIRD",
    "https://bucket.example/scan.png?signature=SIGNATURE",
    "data:image/png;base64,iVBORw0KGgoPIXELS",
    "sk-KEY-of-a-client with spaces",
    "line\nbreak INJECTED",
    "x" * 5000,
)
WORDS = ("BLUEBIRD", "bucket.example", "SIGNATURE", "PIXELS", "KEY", "INJECTED", "xxxx", "Tell", "?", "://")


def test_secrets_in_every_field_are_not_written(tmp_path: Path) -> None:
    names = ("id", "tenant", "key", "model_asked", "cache")
    secret_lines = [
        {**PLAIN, **dict.fromkeys(names, secret), "image_list": [(8, 8, secret)]} for secret in SECRETS
    ]
    text = written(tmp_path, *secret_lines)
    assert [word for word in WORDS if word in text] == []
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == len(SECRETS)
    assert all(line["model_asked"] == NO_NAME and line["key"] == "-" for line in lines)
    assert all(line["image_list"] == [[8, 8, ""]] for line in lines)


def test_digests_are_cut_and_lists_are_bounded(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"image").hexdigest()
    text = written(tmp_path, {**PLAIN, "image_list": [(1, 1, digest)] * 1000})
    assert digest[:17] not in text
    assert len(json.loads(text)["image_list"]) == 64


def test_a_change_is_not_a_request_in_a_log_of_json(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(target="true")
    with caplog.at_level("INFO", "fovea.access"):
        audit.answered(AT_S, PLAIN)
        audit.changed(AT_S, {"event": "key_revoked", "name": "alice"})
        audit.close()
    lines = [
        json.loads(JsonFormatter().format(each)) for each in caplog.records if each.name == "fovea.access"
    ]
    assert [line["message"] for line in lines] == ["request", "key_revoked"]


def test_off_writes_nothing(tmp_path: Path) -> None:
    audit = Audit()
    audit.answered(AT_S, PLAIN)
    audit.close()
    assert not audit.on
