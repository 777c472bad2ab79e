"""Mistakes of clients, each with the error that the server sends. Afterwards the server still works."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.bad_images import CHAT, GOOD, IMAGES, Case
from tests.server.bad_requests import CROWDS, MALFORMED, PARAMETERS, SIZES
from tests.server.conftest import MAX_BODY_MIB
from tests.server.support import Server, chat, image, until, user
from tests.support.thorough import is_thorough

CASES = IMAGES + MALFORMED + PARAMETERS + SIZES + CROWDS


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def expect_error(answer: httpx.Response, status: int, pattern: str, param: str | None, code: str) -> None:
    """Check that the answer is exactly OpenAI's error envelope with these values."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(pattern, error["message"], re.DOTALL), error
    assert error["type"].endswith("_error")
    assert (error["param"], error["code"]) == (param, code), error
    assert len(error["message"]) < 600


def send(client: httpx.Client, case: Case, server: Server) -> httpx.Response:
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    content = content.replace(b"{files}", str(server.files).encode())
    return client.post(case.path, content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:40])
def test_refused_requests(client: httpx.Client, server: Server, case: Case) -> None:
    expect_error(send(client, case, server), case.status, case.pattern, case.param, case.code)


def test_cases_have_unique_names() -> None:
    assert len(CASES) >= 50
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_nesting_of_any_depth_is_refused(client: httpx.Client, kind: str) -> None:
    """The parser refuses bodies from some depth on.

    Below it, validation and the error's text must not fail either.
    """
    close = {"[": "]", '{"a":': "}"}[kind]
    for depth in (*range(100, 1100, 50), 10_000):
        for field in ("messages", "metadata", "nonsense"):
            body = f'{{"{field}":{kind * depth}1{close * depth}}}'
            answer = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (depth, field)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/audio/speech", 404, "unknown_url"),
        ("POST", "/v1/chat", 404, "unknown_url"),
        ("GET", "/" + "x" * 5000, 404, "unknown_url"),
        ("GET", "/%ff%fe", 404, "unknown_url"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ],
)
def test_unknown_urls_and_methods(
    client: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = client.request(method, path)
    expect_error(answer, status, "is not accepted at|there is no|is not served", None, code)
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_content_type_must_be_json(client: httpx.Client, kind: str) -> None:
    answer = client.post(CHAT, content=json.dumps(chat()), headers={"Content-Type": kind})
    expect_error(answer, 400, "Content-Type: application/json", None, "invalid_json")


def send_raw(server: Server, *parts: bytes) -> bytes:
    """Send raw bytes and return the server's answer up to the end of its first body."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as wire:
        for part in parts:
            wire.sendall(part)
        answer = b""
        while b'"payload_too_large"}}' not in answer and (more := wire.recv(65536)):
            answer += more
    return answer


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_announced_body_over_the_limit_is_refused_before_it_arrives(server: Server) -> None:
    answer = send_raw(server, HEAD + b"Content-Length: 999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body has 999999999 bytes; accepted: at most 2097152 bytes (2 MiB)" in answer


def test_unannounced_body_over_the_limit_is_refused_while_it_arrives(server: Server) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = send_raw(
        server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * (MAX_BODY_MIB * 16 + 1)
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body has more than 2097152 bytes (2 MiB)" in answer


def test_server_works_after_all_refused_requests(client: httpx.Client, server: Server) -> None:
    """Many cases again, eight requests at a time, and then a valid request."""
    cases = CASES if is_thorough() else CASES[::4]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda case: send(client, case, server).status_code, cases))
    assert statuses == [case.status for case in cases]
    answer = client.post(CHAT, json=chat(user(image(GOOD), "what is it?")))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    until(lambda: server.metrics()["fovea:kv_blocks_used"] == 0)
    assert server.metrics()["fovea:integrity_errors_total"] == 0
    server.engine.check_integrity()
