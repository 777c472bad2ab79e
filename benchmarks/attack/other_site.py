"""A web page in the browser of someone who reaches a server and a gateway without keys."""

from __future__ import annotations

import contextlib
import http.client
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

from serving import START_S, STOP_S, Server, Setup, free_port

CROSS_SITE = {"Origin": "https://attacker.example", "Content-Type": "text/plain"}
"""What a browser sends for fetch(url, {method: "POST", mode: "no-cors", body: "..."})."""
REBOUND = {"Host": "rebound.attacker.example"}
"""What it sends to a name of the attacker that has got the server's address meanwhile."""
SERVER = (
    "GET /admin/live", "GET /admin/caches", "DELETE /admin/caches/kv", "POST /v1/chat/completions",
    "GET /v1/models", "POST /v1/images", "GET /metrics",
)  # fmt: skip
GATEWAY = (
    "POST /admin/backends/one/drain", "POST /admin/reload", "GET /admin/backends",
    "POST /v1/chat/completions", "GET /v1/models",
)  # fmt: skip


def check() -> tuple[Counter[str], list[str]]:
    """Ask for everything that such a page could want. Returns what it saw, and the problems."""
    seen: Counter[str] = Counter()
    problems = []
    server = Server(Setup(keys=False))
    try:
        server.wait_ready()
        with _gateway(server.port) as port:
            for at, routes in ((server.port, SERVER), (port, GATEWAY)):
                for route in routes:
                    for kind, headers in (("cross-site", CROSS_SITE), ("rebound", REBOUND)):
                        status = _status(at, route, headers)
                        seen[f"{kind}: {status}"] += 1
                        if status != 403:
                            problems.append(f"{kind} {route} got {status}")
                for headers in (REBOUND, {}):
                    if (status := _status(at, "GET /health", headers)) != 200:
                        problems.append(f"a probe got {status}")
    finally:
        server.stop()
    return seen, problems


def _status(port: int, route: str, headers: dict[str, str]) -> int:
    method, path = route.split()
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(line):
        line.request(method, path, b"{}" if method == "POST" else None, headers)
        return line.getresponse().status


@contextlib.contextmanager
def _gateway(backend: int) -> Iterator[int]:
    """Run a gateway in front of the server, without keys. Yields its port."""
    port = free_port()
    command = [
        sys.executable, "-m", "fovea.cli.main", "gateway", "--port", str(port),
        "--backend", f"http://127.0.0.1:{backend}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if _status(port, "GET /ready", {}) == 200:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(STOP_S)
