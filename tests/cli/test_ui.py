"""fovea ui: the page of a running server, or of one that the command starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
import uvloop

from fovea.cli import ui
from fovea.core.errors import ConfigError
from fovea.server.app import create_app
from fovea.server.run import serving
from fovea.server.settings import ServerSettings
from tests.cli.support import Caller, finish, interrupt, start
from tests.server.scripted import talker
from tests.support.servers import free_port


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a running server with keys. The files of the pages are open all the same."""
    app = create_app(talker("hello"), ServerSettings(api_keys=("user",), admin_keys=("admin",)))
    with serving(app, uvloop.new_event_loop) as url:
        yield url


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the browser was told to open."""
    addresses: list[str] = []

    def open_page(address: str) -> bool:
        addresses.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", open_page)
    return addresses


@pytest.mark.parametrize(("flags", "path"), [((), "/"), (("--admin",), "/admin")])
def test_a_running_server(
    flags: tuple[str, ...], path: str, url: str, fovea: Caller, opened: list[str]
) -> None:
    outcome = fovea("ui", "--url", f"{url}/", *flags)
    assert (outcome.code, outcome.out, opened) == (0, f"{url}{path}\n", [f"{url}{path}"])


def test_the_address_is_printed_only(url: str, fovea: Caller, opened: list[str]) -> None:
    outcome = fovea("ui", "--url", url, "--no-browser")
    assert (outcome.code, outcome.out, opened) == (0, f"{url}/\n", [])


def test_a_machine_without_a_browser(url: str, fovea: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    outcome = fovea("ui", "--url", url)
    assert outcome.code == 0
    assert outcome.out == f"{url}/\nno browser was found; open this address in one\n"


def test_a_server_that_does_not_answer(fovea: Caller, opened: list[str]) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    outcome = fovea("ui", "--url", address)
    assert (outcome.code, opened) == (2, [])
    assert outcome.error_line == f"fovea: no server answers at {address}: [Errno 111] Connection refused"


@pytest.mark.parametrize("wrong", ["localhost:8000", "ftp://host", "http://", "/path"])
def test_a_wrong_url(wrong: str) -> None:
    with pytest.raises(ConfigError, match="accepted: http://HOST:PORT or https://HOST:PORT"):
        ui.page_of(wrong, "/")


@pytest.mark.parametrize("wrong", ["http://[", "http://127.0.0.1:x"])
def test_a_url_without_a_host_or_port(wrong: str) -> None:
    with pytest.raises(ConfigError, match="no server answers at"):
        ui.page_of(wrong, "/")


def test_a_server_whose_pages_are_off() -> None:
    app = create_app(talker("hello"), ServerSettings.of(page="off"))
    with (
        serving(app, uvloop.new_event_loop) as url,
        pytest.raises(ConfigError, match=rf"the server at {url} has no page at / \(status 404\)"),
    ):
        ui.page_of(url, "/")


def test_another_program_is_not_opened() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match=r"has no page at / \(status 200\)"):
            ui.page_of(f"http://127.0.0.1:{other.server_port}", "/")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--model", "fovea-tiny"), "--model"),
        (("--port", "8000"), "--port"),
        (("--device", "cpu"), "--device"),
    ],
)
def test_flags_of_a_started_server_beside_a_url(flags: tuple[str, ...], named: str, fovea: Caller) -> None:
    outcome = fovea("ui", "--url", "http://127.0.0.1:1", *flags)
    assert outcome.code == 2
    assert outcome.error_line.startswith(f"fovea: {named} is for a server that this command starts")


@pytest.mark.parametrize(
    ("words", "simulate"),
    [pytest.param((), "1", marks=pytest.mark.slow), (("--model", "TINY", "--admin"), "")],
)
def test_a_started_server_is_ready_when_its_page_is_shown(
    words: tuple[str, ...], simulate: str, tiny: Path
) -> None:
    """It listens on loopback at a free port, also if settings for `fovea serve` say otherwise."""
    words = tuple(str(tiny) if word == "TINY" else word for word in words)
    variables = {"FOVEA_HOST": "0.0.0.0", "FOVEA_PORT": "1", "FOVEA_SIMULATE": simulate}
    process = start("ui", "--no-browser", *words, **variables)
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert address.endswith("/admin" if "--admin" in words else "/")
        page = httpx.get(address)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert httpx.get(httpx.URL(address).join("/ready")).status_code == 200
        ended = interrupt(process)
    finally:
        process.kill()
    assert (ended.code, ended.out) == (0, "")
    assert "Traceback" not in ended.err


def test_it_has_few_flags_of_its_own(fovea: Caller) -> None:
    """It once took the 145 flags of `fovea serve`; they are settings of the file and variables, too."""
    shown = re.findall(r"^  (?:-h, )?--([a-z-]+)", fovea("ui", "--help").out, re.MULTILINE)
    assert sorted(shown) == [
        "admin", "config", "device", "help", "log-level", "model", "no-browser", "port", "quantization",
        "threads", "url", "visual-tokens",
    ]  # fmt: skip
    refused = fovea("ui", "--max-queue", "4")
    assert refused.code == 2
    assert "error: unrecognized arguments: --max-queue 4" in refused.err


def test_a_model_that_does_not_load_opens_nothing(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "bert"}')
    ended = finish(start("ui", "--model", folder, "--no-browser"))
    assert (ended.code, ended.out) == (2, "")
    assert "model_type 'bert' is not supported" in ended.err


def test_a_browser_that_blocks_does_not_block_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser in a terminal runs until its user ends it."""
    shown, returned = Event(), Event()
    outcomes: list[bool] = []

    def open_page(address: str) -> bool:
        outcomes.append(returned.wait(60))
        shown.set()
        return True

    monkeypatch.setattr("webbrowser.open", open_page)
    ui.show_later("http://127.0.0.1:1/", browser=True)
    returned.set()
    assert shown.wait(60)
    assert outcomes == [True]
