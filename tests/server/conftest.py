"""Fixtures of the server tests: a small engine, a server over it, and a web server with a picture."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.media.limits import MediaLimits
from fovea.server.settings import BodySettings, ServerSettings
from tests.server.support import Server, picture, running
from tests.support.checkpoints import write
from tests.support.decoders import kept_decoders
from tests.support.http_clients import one_tls_context

MAX_BODY_MIB = 2
MAX_IMAGE_BYTES = 1024 * 1024
MAX_IMAGES = 4
LARGEST = 256
"""Visual tokens of the largest image: four times as many as detail "low" allows."""


@pytest.fixture(autouse=True, scope="session")
def _no_regular_collections() -> Iterator[None]:
    """Servers would collect garbage every two seconds because tests/conftest.py freezes objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fovea.server.run.EVERY_S", 3600.0)
        yield


@pytest.fixture(autouse=True, scope="package")
def _cheap_clients_and_decoders() -> Iterator[None]:
    with one_tls_context(), kept_decoders():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write("qwen3_vl", tmp_path_factory.mktemp("server") / "tiny")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_pixels": LARGEST * 32**2}))
    return folder


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(str(checkpoint), dtype="float32", threads=1, kv_cache_mib=32) as engine:
        yield engine


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that file:// URLs may read. Next to it is a picture that they may not read."""
    folder = tmp_path_factory.mktemp("files")
    inside = folder / "allowed"
    inside.mkdir()
    (inside / "picture.png").write_bytes(picture(seed=7))
    (folder / "secret.png").write_bytes(picture(seed=8))
    (inside / "link.png").symlink_to(folder / "secret.png")
    return inside


@pytest.fixture(scope="session")
def server(engine: Engine, files: Path) -> Iterator[Server]:
    media = MediaLimits(file_root=files, max_bytes=MAX_IMAGE_BYTES, max_images=MAX_IMAGES)
    with running(
        engine, ServerSettings(bodies=BodySettings(max_body_mib=MAX_BODY_MIB), media=media), files
    ) as server:
        yield server


REMOTE = picture(seed=41)


@dataclass
class Web:
    """A web server on loopback that sends the same picture for every path.

    headers: headers of its answers.
    count: number of requests so far.
    requested: set by the first request.
    released: paths below /slow are answered only once this is set.
    """

    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    count: int = 0
    requested: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture(scope="session")
def bundled() -> Iterator[Engine]:
    """The bundled model, which has learnt to call tools."""
    with Engine.from_pretrained("fovea-tiny", device="cpu", threads=1, kv_cache_mib=64) as engine:
        yield engine


@pytest.fixture(scope="session")
def bundled_server(bundled: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(bundled, ServerSettings(), tmp_path_factory.mktemp("files")) as server:
        yield server


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()

    class Pictures(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            web.count += 1
            web.requested.set()
            if self.path.startswith("/slow"):
                web.released.wait()
            with contextlib.suppress(OSError):  # the client may have disconnected
                self.send_response(200)
                self.send_header("Content-Length", str(len(REMOTE)))
                for name, value in web.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(REMOTE)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    host = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    web.url = f"http://127.0.0.1:{host.server_address[1]}"
    yield web
    web.released.set()
    host.shutdown()
    host.server_close()
    thread.join()
