"""Traces received by MLflow's server, which is written by others (`make test-otel` installs and names it)."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import folder, free_port, started, stop

MLFLOW = os.environ.get("FOVEA_TEST_MLFLOW", "")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MLFLOW, reason="FOVEA_TEST_MLFLOW names no mlflow; `make test-otel` installs it"),
]


def rows(database: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_mlflow_stores_a_trace_of_fovea() -> None:
    port, engine_port = free_port(), free_port()
    with folder("mlflow") as home:
        database = home / "mlflow.db"
        command = [MLFLOW, "server", "--port", str(port), "--backend-store-uri", f"sqlite:///{database}",
                   "--default-artifact-root", str(home / "artifacts"), "--workers", "1"]  # fmt: skip
        with started(command, [], home / "log"):
            ends = time.monotonic() + 120
            while True:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                assert time.monotonic() < ends, (home / "log").read_text()[-2000:]
                time.sleep(0.2)
            environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                           "OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0"}  # fmt: skip
            server = subprocess.Popen(
                [sys.executable, "-m", "fovea.cli.main", "serve", "--simulate", "--port", str(engine_port),
                 "--lame-duck-s", "0"],
                env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                url = f"http://127.0.0.1:{engine_port}"
                while not is_ready(url):
                    time.sleep(0.1)
                answer = httpx.post(
                    f"{url}/v1/chat/completions",
                    json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
                    headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
                )
                assert answer.status_code == 200
                while not (found := rows(database, "select name, type, status from spans")):
                    assert time.monotonic() < ends, (home / "log").read_text()[-2000:]
                    time.sleep(0.2)
            finally:
                stop(server)
    names = {name for name, _, _ in found}
    assert {"chat fovea-simulated", "receive", "prefill", "decode"} <= names


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False
