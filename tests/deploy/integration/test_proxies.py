"""The rendered NGINX, HAProxy and Envoy in front of two engines."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from fovea.deploy.front import EXACT, FOLDERS
from tests.deploy.integration.fleet import (
    CHAT,
    PATIENCE_S,
    PROXIES,
    Fleet,
    Load,
    ask,
    asking,
    proxy,
    question,
    soon,
    tls_proxy,
    two_engines,
)
from tests.support.programs import program
from tests.support.servers import free_port

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def place() -> Iterator[dict[str, Fleet]]:
    """All three proxies in front of the same two engines, for tests that harm none of them."""
    for name in PROXIES:
        program(name)
    with two_engines() as engines, contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(proxy(name, engines)) for name in PROXIES}


def error_of(body: bytes) -> dict[str, object]:
    """Return the error in OpenAI's form."""
    error: dict[str, object] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("name", PROXIES)
def test_the_first_event_arrives_while_the_answer_is_written(place: dict[str, Fleet], name: str) -> None:
    fleet = place[name]
    with asking(fleet.port, body=question(stream=True, max_tokens=60)) as answer:
        assert answer.status == 200
        lines = [answer.readline()]
        assert lines[0].startswith(b"data: ")
        assert sum(each.running() for each in fleet.engines) == 1
        lines += answer.readlines()
    events = [line for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]\n"
    assert sum(b'"content":"' in event for event in events) >= 60


def noise(seed: int) -> str:
    """Return a picture that cannot be compressed, as a data URL of about 2.85 MiB."""
    file = io.BytesIO()
    pixels = random.Random(seed).randbytes(840 * 840 * 3)
    Image.frombytes("RGB", (840, 840), pixels).save(file, "png", compress_level=0)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("name", PROXIES)
def test_a_request_with_three_pictures_of_8_mib_is_answered(place: dict[str, Fleet], name: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": noise(seed)}} for seed in range(3)]
    body = question(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}])
    assert 8 * MIB < len(body) < 9 * MIB
    status, answer = ask(place[name].port, body=body)
    assert status == 200, answer
    assert json.loads(answer)["usage"]["prompt_tokens_details"]["image_tokens"] > 0


@pytest.mark.parametrize("name", PROXIES)
def test_only_public_paths_are_open(place: dict[str, Fleet], name: str) -> None:
    port = place[name].port
    for path in ("/health", "/ready", "/version", "/v1/models"):
        assert ask(port, path, method="GET")[0] == 200
    closed = ("/metrics", "/admin/caches", "/admin", "//metrics", "/v1/../metrics", "/%61dmin/caches", "/v1")
    for path in closed:
        status, body = ask(port, path, method="GET")
        assert status in (400, 404), path
        if body.startswith(b"{"):
            assert error_of(body)["code"] in ("unknown_url", "not_found", "malformed_http")
    assert not any(path.startswith(("/admin", "/metrics")) for path in (*EXACT, *FOLDERS))


@pytest.mark.parametrize("name", PROXIES)
def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(place: dict[str, Fleet], name: str) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {16 * MIB + 1}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", place[name].port), PATIENCE_S) as connection:
        connection.sendall(head.encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413
        assert error_of(answer.read())["code"] == "payload_too_large"


@pytest.mark.parametrize("name", PROXIES)
def test_too_large_headers_are_refused(place: dict[str, Fleet], name: str) -> None:
    large = {f"x-large-{number}": "x" * 8000 for number in range(12)}
    with asking(place[name].port, "/v1/models", method="GET", **large) as answer:
        assert answer.status in (400, 431)
        body = answer.read()
    if name != "haproxy":  # it has a page of its own for heads that it cannot read
        error_of(body)


@pytest.mark.parametrize("name", PROXIES)
@pytest.mark.parametrize("line", [b"PRI * HTTP/2.0", b"GET / HTTP/1.1 x", b"no request"])
def test_a_line_that_is_no_request_is_no_error_of_the_server(
    place: dict[str, Fleet], name: str, line: bytes
) -> None:
    """Strangers could otherwise raise the number of answers with 500."""
    with socket.create_connection(("127.0.0.1", place[name].port), timeout=30) as connection:
        connection.sendall(line + b"\r\nhost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    if name == "nginx":
        assert b'"code": "malformed_http"' in answer


@pytest.mark.parametrize("name", PROXIES)
def test_an_upgrade_reaches_the_server_with_its_headers(place: dict[str, Fleet], name: str) -> None:
    """No server of Fovea upgrades yet, so the answer is an ordinary one; the proxy must not refuse."""
    with asking(place[name].port, "/v1/models", method="GET", connection="upgrade", upgrade="x") as answer:
        assert answer.status in (200, 403)


@pytest.mark.parametrize("name", PROXIES)
def test_tls_brings_http_2_ipv6_and_a_redirect(place: dict[str, Fleet], name: str, tmp_path: Path) -> None:
    """The old address without https leads to the new one, and nothing else is open."""
    curl, certificate = program("curl"), tmp_path / "tls.crt"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    paths = [
        "-keyout",
        str(tmp_path / "tls.key"),
        "-out",
        str(certificate),
        "-addext",
        "subjectAltName=DNS:localhost",
    ]
    subprocess.run([program("openssl"), *words.split(), *paths], check=True, capture_output=True)
    port, plain = free_port(), free_port()
    names = [f"localhost:{each}:127.0.0.1" for each in (port, plain)]

    def ask_with_curl(url: str, *options: str) -> list[str]:
        form = "%{http_code} %{http_version} %{redirect_url}"
        command = [curl, "-sS", "--noproxy", "*", "--cacert", str(certificate), "-o", os.devnull, "-w", form]
        resolve = [word for each in names for word in ("--resolve", each)]
        done = subprocess.run([*command, *resolve, *options, url], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(" ")

    changes = {"address": "", "port": port, "public_port": port, "redirect": plain, "tls": True}
    with tls_proxy(name, place[name].engines, tmp_path, **changes):
        https = f"https://localhost:{port}"
        assert ask_with_curl(f"{https}/health", "--http2")[:2] == ["200", "2"]
        assert ask_with_curl(f"{https}/health", "--http1.1")[:2] == ["200", "1.1"]
        assert ask_with_curl(f"{https}/admin", "--http2")[0] == "404"
        assert ask_with_curl(f"{https}/metrics", "--http2")[0] == "404"
        body = ["-H", "content-type: application/json", "--data-binary", question().decode()]
        assert ask_with_curl(f"{https}{CHAT}", "--http2", *body)[:2] == ["200", "2"]
        for path in ("/v1/models?x=1", "/admin"):
            code, _, target = ask_with_curl(f"http://localhost:{plain}{path}")
            assert (code, target) == ("308", f"{https}{path}")
        names[:] = [f"localhost:{each}:[::1]" for each in (port, plain)]
        assert ask_with_curl(f"{https}/health", "--http2")[:2] == ["200", "2"]
        assert ask_with_curl(f"http://localhost:{plain}/")[0] == "308"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROXIES)
def test_an_engine_that_stops_under_load_fails_no_request(name: str) -> None:
    with two_engines() as engines, proxy(name, engines) as fleet, Load(fleet.port) as load:
        load.more(30)
        engines[0].process.send_signal(signal.SIGTERM)
        engines[0].process.wait(PATIENCE_S)
        load.more(60)
    assert load.failures == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROXIES)
def test_a_killed_engine_fails_only_the_requests_that_it_had(name: str) -> None:
    with two_engines() as engines, proxy(name, engines) as fleet:
        with asking(fleet.port, body=question(stream=True, max_tokens=400)) as answer:
            answer.readline()
            victim = next(each for each in engines if each.running())
            victim.process.kill()
            victim.process.wait(PATIENCE_S)
            # Requests that are sent from now on were not at the engine: each of them is answered.
            for number in range(20):
                assert ask(fleet.port, body=question(f"What is {number}?"))[0] == 200
            with pytest.raises((http.client.HTTPException, OSError)):
                answer.read()
        other = next(each for each in engines if each is not victim)
        other.process.kill()
        other.process.wait(PATIENCE_S)
        status, body = ask(fleet.port, body=question())
        assert status in (502, 503)
        assert error_of(body)["type"] == "api_error"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROXIES)
def test_a_request_at_a_killed_engine_ends_with_an_error_and_is_not_repeated(name: str) -> None:
    with two_engines() as engines, proxy(name, engines) as fleet, Load(fleet.port, clients=1) as load:
        load.stop.set()
        soon(lambda: not any(each.running() for each in engines))
        with socket.create_connection(("127.0.0.1", fleet.port), PATIENCE_S) as connection:
            body = question(max_tokens=400)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            soon(lambda: any(each.running() for each in engines))
            victim = next(each for each in engines if each.running())
            other = next(each for each in engines if each is not victim)
            victim.process.kill()
            victim.process.wait(PATIENCE_S)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 502
            assert error_of(answer.read())["code"] == "bad_gateway"
        assert not other.running()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROXIES)
def test_the_bundled_model_answers_the_same_through_a_proxy(name: str) -> None:
    body = question(max_tokens=24, temperature=0)
    with two_engines(()) as engines, proxy(name, engines) as fleet:
        for each in engines:
            soon(lambda port=each.port: ask(port, "/ready", method="GET")[0] == 200)  # type: ignore[misc]
        answers = {
            json.loads(ask(port, body=body)[1])["choices"][0]["message"]["content"]
            for port in (fleet.port, *(each.port for each in engines))
        }
    assert len(answers) == 1
    assert answers != {""}
