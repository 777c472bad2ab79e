"""The audit log has a line per request, and never content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fovea.gateway.generate.records import NO_NAME, AuditedImage, AuditLog, AuditRecord
from fovea.gateway.usage.prices import Consumption, Price

PLAIN = AuditRecord(
    at_s=1_790_000_000.1234,
    request_id="req-7f3a",
    tenant="alice",
    fingerprint="9f86d081",
    asked="Qwen/Qwen3-VL-8B-Instruct",
    used="qwen3-vl:8b",
    backend="gpu-1",
    route="least_cost",
    status=200,
    consumption=Consumption(1500, 1000, 300, 100, 1),
    price=Price(810, 70, 460),
    images=(AuditedImage(1024, 768, hashlib.sha256(b"image").hexdigest()),),
    cache="miss",
    fallbacks=1,
    seconds=1.25,
)


def written(tmp_path: Path, *records: AuditRecord) -> str:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path))
    assert log.on
    for record in records:
        log.write(record)
    log.close()
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text()


def test_a_line(tmp_path: Path) -> None:
    assert json.loads(written(tmp_path, PLAIN)) == {
        "time": "2026-09-21T14:13:20.123Z",
        "id": "req-7f3a",
        "tenant": "alice",
        "key": "9f86d081",
        "model_asked": "Qwen/Qwen3-VL-8B-Instruct",
        "model_used": "qwen3-vl:8b",
        "backend": "gpu-1",
        "route": "least_cost",
        "status": 200,
        "prompt_tokens": 1500,
        "visual_tokens": 1000,
        "cached_tokens": 300,
        "completion_tokens": 100,
        "estimated": False,
        "images": 1,
        "image_list": [[1024, 768, "6105d6cc76af4003"]],
        "cost": 810,
        "credit": 70,
        "cache": "miss",
        "fallbacks": 1,
        "seconds": 1.25,
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
    records = [
        PLAIN._replace(
            request_id=secret,
            tenant=secret,
            fingerprint=secret,
            asked=secret,
            used=secret,
            backend=secret,
            cache=secret,
            images=(AuditedImage(8, 8, secret),),
        )
        for secret in SECRETS
    ]
    text = written(tmp_path, *records)
    assert [word for word in WORDS if word in text] == []
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == len(SECRETS)
    assert all(line["model_asked"] == NO_NAME and line["key"] == "-" for line in lines)
    assert all(line["image_list"] == [[8, 8, ""]] for line in lines)


def test_digests_are_cut_and_lists_are_bounded(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"image").hexdigest()
    used = Consumption(images=1000)
    text = written(tmp_path, PLAIN._replace(images=(AuditedImage(1, 1, digest),) * 1000, consumption=used))
    assert digest[:17] not in text
    line = json.loads(text)
    assert (line["images"], len(line["image_list"])) == (1000, 64)


def test_off_writes_nothing(tmp_path: Path) -> None:
    log = AuditLog("false")
    log.write(PLAIN)
    log.close()
    assert not log.on
