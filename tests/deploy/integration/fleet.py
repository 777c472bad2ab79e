"""Two engines behind a rendered proxy, and the clients that ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.deploy.front import Front
from fovea.deploy.machine import Server
from fovea.deploy.target import CERTIFICATES
from fovea.deploy.targets import envoy, haproxy, nginx
from tests.support.forks import Fork
from tests.support.programs import program
from tests.support.servers import folder, forked, free_port, started

PATIENCE_S = 120.0
CHAT = "/v1/chat/completions"
LAME_DUCK_S, TOKEN_S = 1.0, 0.02
SIMULATED = ("--simulate", "--served-model-name", "fovea-tiny")


@dataclass
class Engine:
    """One `fovea serve` process."""

    port: int
    process: Fork

    def running(self) -> int:
        """Return the number of answers that it is writing."""
        _, text = ask(self.port, "/metrics", method="GET")
        line = next(line for line in text.splitlines() if line.startswith(b"fovea:requests_running"))
        return int(float(line.rpartition(b" ")[2]))


@dataclass
class Fleet:
    """A proxy and the engines behind it."""

    port: int
    engines: Sequence[Engine]


@contextlib.contextmanager
def engine(home: Path, name: str, options: Sequence[str]) -> Iterator[Engine]:
    """Start an engine."""
    port = free_port()
    words = ["serve", "--port", str(port), "--lame-duck-s", str(LAME_DUCK_S), "--trusted-proxies",
             "127.0.0.1", *options]  # fmt: skip
    with forked(words, port, home / f"{name}.log") as process:
        yield Engine(port, process)


@contextlib.contextmanager
def two_engines(options: Sequence[str] = SIMULATED) -> Iterator[list[Engine]]:
    """Start two engines. A simulated one takes `TOKEN_S` seconds for each token."""
    with folder("engines") as home, contextlib.ExitStack() as stack:
        if "--simulate" in options:
            (home / "cost.json").write_text(json.dumps({"step_s": TOKEN_S}))
            options = [*options, "--cost", str(home / "cost.json")]
        yield [stack.enter_context(engine(home, f"engine-{number}", options)) for number in range(2)]


def front(engines: Sequence[Engine], **changes: Any) -> Front:
    """Return a proxy on the loopback interface in front of engines."""
    servers = tuple(Server(f"engine-{n}", "127.0.0.1", each.port) for n, each in enumerate(engines))
    values: dict[str, Any] = {
        "servers": servers, "address": "127.0.0.1", "port": free_port(), "public_port": 443, "redirect": 0,
        "ipv6": True, "host": "localhost", "body_mib": 16, "answer_s": 60, "per_address": 512,
        "own_proxies": (), "tls": False,
    }  # fmt: skip
    return Front(**{**values, **changes})


def _nginx(place: Front, home: Path) -> list[str]:
    path = home / "nginx.conf"
    path.write_text(nginx.configuration(place, temporary=str(home / "temporary")))
    return [program("nginx"), "-p", str(home), "-c", str(path), "-g", f"daemon off; pid {home}/pid;"]


def _haproxy(place: Front, home: Path) -> list[str]:
    path = home / "haproxy.cfg"
    path.write_text(haproxy.configuration(place, socket=str(home / "socket")))
    return [program("haproxy"), "-db", "-f", str(path)]


def _envoy(place: Front, home: Path) -> list[str]:
    path = home / "envoy.yaml"
    path.write_text(envoy.configuration(place, admin_port=free_port()))
    return [program("envoy"), "--config-path", str(path), "--concurrency", "2", "--use-dynamic-base-id",
            "--log-level", "warning"]  # fmt: skip


PROXIES: dict[str, Callable[[Front, Path], list[str]]] = {
    "nginx": _nginx,
    "haproxy": _haproxy,
    "envoy": _envoy,
}


@contextlib.contextmanager
def proxy(name: str, engines: Sequence[Engine], **changes: Any) -> Iterator[Fleet]:
    """Start a rendered proxy, and wait until an engine answers through it."""
    with folder(name) as home:
        place = front(engines, **changes)
        with started(PROXIES[name](place, home), [place.port], home / "log"):
            soon(lambda: ask(place.port, "/ready", method="GET")[0] == 200)
            yield Fleet(place.port, engines)


@contextlib.contextmanager
def tls_proxy(name: str, engines: Sequence[Engine], certificates: Path, **changes: Any) -> Iterator[None]:
    """Start a rendered proxy that ends TLS. certificates: folder of tls.crt and tls.key."""
    with folder(name) as home:
        place = front(engines, **changes)
        command = PROXIES[name](place, home)
        for path in home.glob(f"{name}.*"):
            path.write_text(path.read_text().replace(CERTIFICATES, str(certificates)))
        with started(command, [place.port, place.redirect], home / "log"):
            yield


def soon(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. Fail if it never does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.02)


def question(text: str = "What is it?", **extra: Any) -> bytes:
    """Return the body of a chat request."""
    return json.dumps(
        {"model": "fovea-tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 3, **extra}
    ).encode()


@contextlib.contextmanager
def asking(
    port: int, path: str = CHAT, body: bytes = b"", method: str = "POST", **headers: str
) -> Iterator[http.client.HTTPResponse]:
    """Send a request on a connection of its own, and give the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        yield connection.getresponse()
    finally:
        connection.close()


def ask(port: int, path: str = CHAT, body: bytes = b"", method: str = "POST") -> tuple[int, bytes]:
    """Send a request, and return status and body of the answer."""
    with asking(port, path, body, method) as answer:
        return answer.status, answer.read()


@dataclass
class Load:
    """Clients that ask without a pause until `stop` is set.

    failures: what went wrong, one text for each failed request.
    """

    port: int
    clients: int = 6
    stop: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def more(self, count: int) -> None:
        """Wait until so many more requests were answered or failed."""
        goal = self.done + count
        soon(lambda: self.done >= goal)

    @property
    def done(self) -> int:
        """The requests that have ended."""
        return self.answered + len(self.failures)

    def _ask(self, number: int) -> None:
        stream = bool(number % 2)
        while not self.stop.is_set():
            try:
                status, body = ask(self.port, body=question(f"What is {number}?", stream=stream))
                failure = "" if status == 200 else f"{status} {body[:200]!r}"
                if stream and status == 200 and b"[DONE]" not in body:
                    failure = "the stream has no end"
            except (OSError, http.client.HTTPException) as error:
                failure = repr(error)
            with self.lock:
                if failure:
                    self.failures.append(failure)
                else:
                    self.answered += 1
