"""Vertex AI's contract against the rendered entry point, with a model from a bucket on loopback."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from fovea.deploy.targets import vertex
from fovea.deploy.targets.vertex.fetch_model import fetch
from fovea.deploy.write import write
from fovea.engine.load import resolve
from tests.deploy.contracts.replay import (
    ANSWER,
    CIRCLES,
    PAIR,
    SPEC,
    Record,
    forked,
    question,
    replay,
    started,
)
from tests.support import servers

PREFIX = "models/7/"


class Bucket(BaseHTTPRequestHandler):
    """Cloud Storage and the metadata server, as far as the download uses them. Two names fit on a page."""

    folder: Path

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path.endswith("/token"):
            allowed = self.headers["Metadata-Flavor"] == "Google"
            self._send(b'{"access_token": "t"}' if allowed else b"{}")
        elif self.headers["Authorization"] != "Bearer t":
            self.send_error(401)
        elif query.get("alt") == "media":
            self._send((self.folder / unquote(parts.path).rpartition(PREFIX)[2]).read_bytes())
        else:
            assert query["prefix"] == PREFIX
            names = sorted(path.name for path in self.folder.iterdir() if path.is_file())
            at = int(query.get("pageToken", "0"))
            page = {"items": [{"name": PREFIX + name} for name in names[at : at + 2]]}
            self._send(
                json.dumps(page | ({"nextPageToken": str(at + 2)} if at + 2 < len(names) else {})).encode()
            )

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


class CutBucket(Bucket):
    """Cloud Storage whose connections end in the middle of a file."""

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if "alt=media" in self.path else body)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    handler = type("ModelBucket", (Bucket,), {"folder": Path(resolve("fovea-tiny", ""))})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vertex")
    write(vertex.render(SPEC), folder)
    return folder / "vertex"


@pytest.fixture(scope="module", params=[forked, pytest.param(started, marks=pytest.mark.slow)])
def record(request: pytest.FixtureRequest, container: Path, bucket: str) -> Record:
    port = servers.free_port()
    variables = {
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": "/ready",
        "AIP_PREDICT_ROUTE": "/v1/predict",
        "AIP_STORAGE_URI": f"gs://bucket/{PREFIX}",
        "STORAGE_EMULATOR_HOST": f"http://{bucket}",
        "GCE_METADATA_HOST": bucket,
        "MODEL_FOLDER": str(container / "model"),
    }
    calls = {
        "two": {"instances": [CIRCLES, PAIR], "parameters": {"max_tokens": 12}},
        "raw": CIRCLES,
        "stream": {**CIRCLES, "stream": True},
        "streamed instance": {"instances": [{**CIRCLES, "stream": True}]},
        "no instances": {"instances": []},
        "no JSON": b"{",
        "bad image": {"instances": [CIRCLES, question("?", "shapes", temperature=9)]},
        "oversize": b" " * (SPEC.max_body_mib * 1024 * 1024 + 1),
    }
    with request.param([str(container / "entrypoint.sh")], variables, container / "log") as process:
        return replay(process, port, "/ready", "/v1/predict", calls)


def test_the_container_is_unhealthy_until_the_model_is_loaded(record: Record) -> None:
    assert set(record.health[:-1]) == {503}
    assert record.health[-1] == 200


def test_predictions_about_one_and_two_images(record: Record) -> None:
    one, two = record.replies["two"].json()["predictions"]
    assert one["choices"][0]["message"]["content"] == ANSWER
    assert len(two["fovea"]["images"]) == 2
    assert two["usage"]["completion_tokens"] <= 8


def test_a_raw_prediction_may_be_streamed(record: Record) -> None:
    assert record.replies["raw"].json()["choices"][0]["message"]["content"] == ANSWER
    assert record.replies["stream"].headers["content-type"].startswith("text/event-stream")
    assert record.replies["stream"].text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("name", "status", "param"),
    [
        ("streamed instance", 400, "instances[0].stream"),
        ("no instances", 400, "instances"),
        ("no JSON", 400, None),
        ("bad image", 400, "instances[1].temperature"),
        ("oversize", 413, None),
    ],
)
def test_wrong_bodies_are_refused(record: Record, name: str, status: int, param: str | None) -> None:
    reply = record.replies[name]
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == param


def test_sigterm_lets_a_stream_end(record: Record) -> None:
    assert record.refused[-1] == 503
    assert record.drained[-1] == "data: [DONE]"
    assert "error" not in record.drained[-2]
    assert record.exit_status == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"AIP_PREDICT_ROUTE": "/v1/endpoints/1/deployedModels/2:predict"}, "accepted: /v1/predict"),
        ({"AIP_HEALTH_ROUTE": "/health"}, "accepted: /ready"),
        ({"AIP_STORAGE_URI": "s3://bucket/x"}, "accepted: gs://BUCKET/PREFIX"),
    ],
)
def test_a_wrong_deployment_does_not_start(
    container: Path, bucket: str, variables: dict[str, str], words: str
) -> None:
    ended = subprocess.run(
        [str(container / "entrypoint.sh")],
        env={"PATH": "/usr/bin:/bin", "GCE_METADATA_HOST": bucket, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert words in ended.stderr


def test_a_download_that_is_cut_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights without their end must not be loaded."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "config.json").write_text("{}" * 100)
    handler = type("ModelBucket", (CutBucket,), {"folder": tmp_path / "bucket"})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        with pytest.raises(OSError, match=r"config.json is not complete: the connection ended 100 bytes"):
            fetch(f"gs://bucket/{PREFIX}", tmp_path / "model")
        server.shutdown()
