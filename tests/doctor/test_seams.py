"""The seams to the world, against the world: hosts of images, HTTP, files of this machine, own processes."""

from __future__ import annotations

import io
import os
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from fovea.core.errors import EngineError
from fovea.doctor.launch import ProcessLauncher
from fovea.doctor.load import DoctorSettings, LoadTest
from fovea.doctor.machine import ThisMachine, is_loopback
from fovea.doctor.pictures import FAULTS, ImageHosts, bomb, png
from fovea.doctor.server import Answer, HttpWeb, NoAnswer, Server
from tests.doctor.fakes import FakeWeb, figures

SERVER = textwrap.dedent(
    """
    import argparse, http.server, os, pathlib, signal, sys, time
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    flags, rest = parser.parse_known_args()
    if "broken" in os.environ.get("MODE", ""):
        sys.exit("no such model: eyes")
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = " ".join(rest).encode()
            self.send_response(503 if "loading" in os.environ.get("MODE", "") else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
    def drain(*_):
        time.sleep(0.3 if "draining" in os.environ.get("MODE", "") else 0)
        os._exit(7)
    signal.signal(signal.SIGTERM, drain)
    http.server.HTTPServer(("127.0.0.1", flags.port), Handler).serve_forever()
    """
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[ImageHosts]:
    with ImageHosts() as server:
        yield server


def outcome(url: str) -> str:
    """How a download ends for a client with little patience: its status, its length, or the kind of error."""
    try:
        with httpx.Client(trust_env=False, timeout=0.5) as client, client.stream("GET", url) as answer:
            body = b"".join(answer.iter_raw()) if not url.endswith("/drip") else next(answer.iter_raw())
            return f"{answer.status_code} {len(body)}"
    except httpx.HTTPError as error:
        return type(error).__name__


def test_hosts_of_images_misbehave_as_they_say(hosts: ImageHosts) -> None:
    found = {fault: outcome(f"{hosts.url}/{fault}") for fault in (*FAULTS, "good")}
    assert found == {
        "drip": "200 1",
        "hang": "ReadTimeout",
        "reset": "ReadError",
        "404": "404 2",
        "500": "500 2",
        "short": "RemoteProtocolError",
        "long": "200 1",
        "text": "200 15",
        "bomb": f"200 {len(bomb())}",
        "good": f"200 {len(png(64, 64))}",
    }
    assert all(hosts.hits[fault] == 1 for fault in FAULTS)


def test_pictures_are_pictures() -> None:
    image = Image.open(io.BytesIO(png(5, 7, (1, 2, 3))))
    assert image.size == (5, 7)
    assert image.getpixel((4, 6)) == (1, 2, 3)
    assert b"IHDR" + (50_000).to_bytes(4) * 2 in bomb()
    assert len(bomb()) < 20_000


def test_answers_and_their_ends_over_http(hosts: ImageHosts) -> None:
    pieces: list[None] = []
    answer = HttpWeb().request("GET", f"{hosts.url}/good", on_data=lambda: pieces.append(None))
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, "image/png", png(64, 64))
    assert len(pieces) >= 2
    with pytest.raises(NoAnswer) as late:
        HttpWeb().request("GET", f"{hosts.url}/hang", timeout=0.2)
    assert late.value.timed_out
    with pytest.raises(NoAnswer) as cut:
        HttpWeb().request("GET", f"{hosts.url}/short")
    assert not cut.value.timed_out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too large"}}', "too large"),
        (b'{"detail": "no key"}', "no key"),
        (b"<h1>Bad\n gateway</h1>", "<h1>Bad gateway</h1>"),
        (b"[" * 100_000, "[" * 200),
    ],
)
def test_messages_of_any_server(body: bytes, message: str) -> None:
    assert Answer(500, body).message == message


def test_this_machine(tmp_path: Path) -> None:
    machine = ThisMachine()
    (tmp_path / "file").write_text("words")
    (tmp_path / "file").chmod(0o640)
    assert (machine.text(str(tmp_path / "file")), machine.mode(str(tmp_path / "file"))) == ("words", 0o640)
    assert machine.text(str(tmp_path / "none")) is machine.mode(str(tmp_path / "none")) is None
    disk = machine.disk(str(tmp_path / "not" / "there"))
    assert disk.writable
    assert disk.free > 0
    assert machine.output([sys.executable, "-c", "print(6 * 7)"]) == "42\n"
    assert machine.output(["no-such-program"]) is None
    assert machine.cores() >= 1
    assert machine.free_memory() > 0
    assert all(not is_loopback(address) for address in machine.addresses())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_hosts(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "127.example.com", "1270.0.0.1"])
def test_hosts_that_other_machines_reach(host: str) -> None:
    assert not is_loopback(host)


def test_connections_to_ports_that_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert ThisMachine().connects("127.0.0.1", port)
    assert not ThisMachine().connects("127.0.0.1", port)


def launcher(mode: str = "", timeout: float = 30.0, drain_s: float = 0.0) -> ProcessLauncher:
    env = {**os.environ, "MODE": mode}
    command = [sys.executable, "-c", SERVER, "serve"]
    return ProcessLauncher(command, env, HttpWeb(), keys={}, timeout=timeout, drain_s=drain_s)


def test_own_servers_start_end_and_start_again() -> None:
    with launcher() as own:
        plain = own.plain()
        assert own.plain() is plain
        assert plain.get("/x").body == b"serve --host 127.0.0.1"
        disturbed = own.disturbed()
        assert b"--allow-private-hosts true" in disturbed.get("/x").body
        assert str(own.cache_folder).encode() in disturbed.get("/x").body
        with pytest.raises(NoAnswer):
            plain.get("/x")
        own.kill()
        with pytest.raises(NoAnswer):
            disturbed.get("/x")
        again = own.disturbed()
        own.terminate()
        assert own.wait() == 7
        assert own.ready_seconds > 0
        last = own.plain()
    for server in (again, last):
        with pytest.raises(NoAnswer):
            server.get("/x")
    assert not own.cache_folder.parent.exists()


def test_a_server_that_does_not_start_says_why_and_is_tried_once() -> None:
    with launcher("broken") as own:
        with pytest.raises(EngineError, match="status 1: no such model: eyes") as first:
            own.plain()
        with pytest.raises(EngineError) as second:
            own.plain()
        assert second.value is first.value
    with launcher("loading", timeout=0.5) as own, pytest.raises(EngineError, match="not ready after 0.5 s"):
        own.plain()


@pytest.mark.parametrize(("drain_s", "status"), [(0.0, None), (30.0, 7)])
def test_a_server_has_the_time_of_its_settings_to_end(
    monkeypatch: pytest.MonkeyPatch, drain_s: float, status: int | None
) -> None:
    monkeypatch.setattr("fovea.doctor.launch.STOP_S", 0.02)
    with launcher("draining", drain_s=drain_s) as own:
        own.plain()
        own.terminate()
        assert own.wait() == status


def test_no_process_is_left_if_the_block_fails() -> None:
    servers = []

    def fails() -> None:
        with launcher() as own:
            servers.append(own.plain())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with pytest.raises(NoAnswer):
        servers[0].get("/x")


def test_the_search_for_the_saturation() -> None:
    """Clients double until they give no more answers; the knee is the first at 90% of the best."""
    asked: list[tuple[int, int]] = []

    def closed(server: Server, clients: int, requests: int) -> object:
        asked.append((clients, requests))
        return figures(per_second=min(19.0, 10.0 * clients**0.5))

    load = LoadTest(closed, lambda server, rate, requests: figures(per_second=rate), DoctorSettings())  # type: ignore[arg-type]
    server = Server("http://x", FakeWeb())
    found = load.saturation(server)
    assert [clients for clients, _ in found.steps] == [1, 2, 4, 8]
    assert (found.steps[found.knee][0], found.best, found.found) == (4, 19.0, True)
    assert load.saturation(server) is found
    assert [requests for _, requests in asked] == [3, 40, 56, 76]
    assert [round(each.per_second, 2) for _, each in load.levels(server)] == [1.9, 9.5, 19.0]


def test_servers_that_answer_nonsense() -> None:
    web = FakeWeb(routes={"/v1/models": Answer(200, b"[]"), "/metrics": Answer(200, b"{not metrics")})
    server = Server("http://x/v1/", web)
    assert server.url == "http://x"
    with pytest.raises(EngineError, match="lists no model"):
        server.card()
    with pytest.raises(EngineError, match="Prometheus' format"):
        server.metrics()
    assert Server("http://x", FakeWeb(routes={"/admin/caches": Answer(200, b"[]")})).caches() is None
