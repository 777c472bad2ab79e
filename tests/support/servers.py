"""Real programs for tests: Redis, Prometheus, nginx, Envoy, simulated engines, each with a port and a folder.

Every function is a context manager that yields the program's URL once it accepts connections, and ends it
surely. A test that needs a missing program is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forks import Fork
from tests.support.programs import program

BACKEND = Path(__file__).parents[2] / "benchmarks" / "gateway" / "backend.py"
READY_S, STOP_S, POLL_S = 60.0, 10.0, 0.02


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(command: Sequence[str], ports: Sequence[int], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a process group of its own, and end all of the group at the end of the block.

    ports: loopback ports on which it has to accept connections before the block begins.
    log: file for its output. Raises RuntimeError with its end if the program does not accept connections.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        for port in ports:
            wait_until_listening(process, port, log)
        yield process
    finally:
        stop(process)


INTO_A_FILE = """
import os, sys
os.setsid()
log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT, 0o644)
os.dup2(log, 1)
os.dup2(log, 2)
from fovea.cli.main import main
sys.exit(main())
"""
"""Runs a command of fovea in a process group of its own. Its output goes to the file `sys.argv[1]`."""


@contextlib.contextmanager
def forked(words: Sequence[str], port: int, log: Path) -> Iterator[Fork]:
    """Run a command of fovea as `started` runs a program, in a fork that has already imported everything."""
    process = Fork(INTO_A_FILE, [str(log), *words], os.environ)
    try:
        wait_until_listening(process, port, log)
        yield process
    finally:
        stop(process)
        process.communicate()


def wait_until_listening(process: subprocess.Popen[bytes] | Fork, port: int, log: Path) -> None:
    """Wait until a connection to a port succeeds.

    Raises RuntimeError if the process ends, or it takes too long.
    """
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(POLL_S)
    end = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"{process.args} does not listen on port {port}: {end or 'no output'}")


def wait_until_ready(url: str) -> None:
    """Wait until a URL is answered with 200. Raises RuntimeError if it takes too long."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1.0):
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"{url} is not answered with 200")


def stop(process: subprocess.Popen[bytes] | Fork) -> None:
    """Ask a process group to end, wait, and kill the rest."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)


@contextlib.contextmanager
def folder(name: str) -> Iterator[Path]:
    """A temporary folder that programs of other users can enter: nginx's workers do not run as root."""
    with tempfile.TemporaryDirectory(prefix=f"fovea-{name}-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[str]:
    """An empty Redis that writes nothing to disk. options: further arguments, such as --maxmemory 1mb.

    Yields redis://127.0.0.1:PORT/0.
    """
    path, port = program("redis-server"), free_port()
    with folder("redis") as home:
        command = [path, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", "",
                   "--appendonly", "no", *options]  # fmt: skip
        with started(command, [port], home / "log"):
            yield f"redis://127.0.0.1:{port}/0"


class RedisServer:
    """A redis-server that keeps nothing on disk. It does not run before `start`.

    url: the URL of its database 0.
    """

    def __init__(self, folder: Path) -> None:
        self._program, self._folder, self.port = program("redis-server"), folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [self._program, *words, "--dir", str(self._folder), "--logfile", str(self._folder / "redis.log")]
        )
        end = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self._folder / "redis.log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it from running: it accepts connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextlib.contextmanager
def prometheus(files: Mapping[str, str], *options: str) -> Iterator[str]:
    """Prometheus with a database of its own. files: text by name; one of them is prometheus.yml.

    options: further arguments. Yields HOST:PORT.
    """
    path, port = program("prometheus"), free_port()
    with folder("prometheus") as home:
        for name, text in files.items():
            (home / name).write_text(text)
        command = [path, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data",
                   f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", *options]  # fmt: skip
        with started(command, [port], home / "log"):
            wait_until_ready(f"http://127.0.0.1:{port}/-/ready")
            yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def alertmanager(config: str) -> Iterator[str]:
    """Alertmanager without a cluster. config: the text of alertmanager.yml."""
    path, port = program("prometheus-alertmanager"), free_port()
    with folder("alertmanager") as home:
        (home / "alertmanager.yml").write_text(config)
        command = [path, f"--config.file={home}/alertmanager.yml", f"--storage.path={home}/data",
                   f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
                   "--log.level=warn"]  # fmt: skip
        with started(command, [port], home / "log"):
            wait_until_ready(f"http://127.0.0.1:{port}/-/ready")
            yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def nginx(servers: Callable[[int], str]) -> Iterator[str]:
    """nginx with one worker. servers: returns the content of its http block, for a port."""
    path, port = program("nginx"), free_port()
    with folder("nginx") as home:
        temporary = "\n".join(
            f"{kind}_temp_path {home}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (home / "nginx.conf").write_text(
            f"daemon off; worker_processes 1; pid {home}/pid; error_log stderr warn;\n"
            "events { worker_connections 1024; }\n"
            f"http {{ access_log off; {temporary}\n{servers(port)} }}\n"
        )
        command = [path, "-p", str(home), "-c", str(home / "nginx.conf")]
        with started(command, [port], home / "log"):
            yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def envoy(resources: Callable[[int], Mapping[str, Any]]) -> Iterator[str]:
    """Envoy with one worker. resources: returns its `static_resources`, for a port."""
    path, port = program("envoy"), free_port()
    with folder("envoy") as home:
        (home / "envoy.json").write_text(json.dumps({"static_resources": resources(port)}))
        command = [path, "--config-path", str(home / "envoy.json"), "--concurrency", "1",
                   "--use-dynamic-base-id", "--log-level", "warning"]  # fmt: skip
        with started(command, [port], home / "log"):
            yield f"http://127.0.0.1:{port}"


def nginx_proxy(urls: Sequence[str], *, buffering: bool = False) -> contextlib.AbstractContextManager[str]:
    """nginx in front of servers. buffering: whether it collects requests and answers, its default."""
    switch = "on" if buffering else "off"
    upstream = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    return nginx(
        lambda port: (
            f"""
        client_max_body_size 64m;
        upstream servers {{ {upstream} keepalive 16; }}
        server {{ listen 127.0.0.1:{port}; location / {{
          proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection "";
          proxy_set_header Host $http_host;
          proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
          proxy_buffering {switch}; proxy_request_buffering {switch}; proxy_next_upstream off;
        }} }}"""
        )
    )


def envoy_proxy(urls: Sequence[str]) -> contextlib.AbstractContextManager[str]:
    """Envoy in front of servers, in turn, without time limits for streams. It appends to X-Forwarded-For."""
    endpoints = [
        {"endpoint": {"address": envoy_address(*url.removeprefix("http://").split(":"))}} for url in urls
    ]

    def resources(port: int) -> Mapping[str, Any]:
        types, filters = "type.googleapis.com/envoy.extensions.filters", "envoy.filters"
        route = {"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "0s"}}
        router = {"name": f"{filters}.http.router",
                  "typed_config": {"@type": f"{types}.http.router.v3.Router"}}  # fmt: skip
        manager = {
            "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "http", "stream_idle_timeout": "0s", "use_remote_address": True,
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
            "http_filters": [router],
        }  # fmt: skip
        chain = {"filters": [{"name": f"{filters}.network.http_connection_manager", "typed_config": manager}]}
        assignment = {"cluster_name": "servers", "endpoints": [{"lb_endpoints": endpoints}]}
        cluster = {"name": "servers", "type": "STATIC", "load_assignment": assignment}
        listener = {"name": "in", "address": envoy_address("127.0.0.1", port), "filter_chains": [chain]}
        return {"listeners": [listener], "clusters": [cluster]}

    return envoy(resources)


def envoy_address(host: str, port: int | str) -> dict[str, Any]:
    """An address as Envoy's configuration spells it."""
    return {"socket_address": {"address": host, "port_value": int(port)}}


@contextlib.contextmanager
def fovea_gateway(urls: Sequence[str], *options: str) -> Iterator[str]:
    """Fovea's gateway in front of engines; it ends without a lame-duck time.

    options: further arguments of `fovea gateway`.
    """
    port = free_port()
    backends = [part for url in urls for part in ("--backend", url)]
    command = ["gateway", *backends, "--port", str(port), "--lame-duck-s", "0", "--drain-seconds", "1"]
    with folder("gateway") as home, forked([*command, *options], port, home / "log"):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def simulated_backends(count: int = 2, *options: str) -> Iterator[list[str]]:
    """Simulated engines (benchmarks/gateway/backend.py) in one process. options: its further arguments."""
    ports = [free_port() for _ in range(count)]
    flags = [part for port in ports for part in ("--port", str(port))]
    with (
        folder("backends") as home,
        started([sys.executable, str(BACKEND), *flags, *options], ports, home / "log"),
    ):
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextlib.contextmanager
def prometheus_server(target: str, *options: str, interval: str = "1s") -> Iterator[str]:
    """Prometheus that scrapes /metrics of one server. It begins to do so five seconds after its start.

    target: host and port of the server. options: further arguments.
    """
    scrape = {"job_name": "fovea", "static_configs": [{"targets": [target]}]}
    times = {"scrape_interval": interval, "scrape_timeout": interval}
    config = json.dumps({"global": times, "scrape_configs": [scrape]})
    with prometheus({"prometheus.yml": config}, *options) as address:
        yield f"http://{address}"
