"""fovea caches beside servers that are not Fovea's: the key stays with the server that it is for."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fovea.cli.caches import COLUMNS, table
from fovea.cli.main import main

SEEN: list[tuple[str, str | None]] = []


class Redirecting(BaseHTTPRequestHandler):
    """Answers every request with a redirection."""

    def do_GET(self) -> None:
        SEEN.append((self.path, self.headers.get("Authorization")))
        self.send_response(307)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_redirections_are_not_followed(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            assert main(["caches", "--url", url, "--api-key", "k"]) == 2
        finally:
            server.shutdown()
            thread.join()
    assert SEEN == [("/admin/caches", "Bearer k")]
    assert f"no Fovea server answers at {url}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["host", "http://", "file:///etc/hostname", "http://127.0.0.1:x"])
def test_wrong_urls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caches", "--url", url]) == 2
    assert f"no server answers at {url}: " in capsys.readouterr().err


def test_a_table_of_full_caches_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    full = dict.fromkeys(COLUMNS, 123456789012.0)
    lines = table({"fetched": full, "kv": {"bytes": 1.0}}).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line][:3] == ["MiB", "fetched", "kv"]
    assert sum("123456789012" in line for line in lines) == 2, "two parts"
