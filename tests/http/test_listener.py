"""Many connections at once, and too few descriptors: others are still served, and nothing dies."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path

import pytest

from fovea.core.errors import ConfigError
from fovea.http.listener import RESERVE, allowed_connections, bind
from fovea.http.table import Phase
from fovea.server.routing import Route
from fovea.server.settings import ServerSettings
from tests.http.support import Torrent, Wire, get, hosting, in_phase, post, soon, who
from tests.server.support import chat
from tests.support.forks import Fork

ENDLESS = "GET /health HTTP/1.1\r\nX: "
BODY = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "


def test_slow_clients_do_not_keep_others_out() -> None:
    """255 connections that sent half a header kept everybody else out, and the log was silent."""
    with hosting(max_connections=10) as host:
        slow = [host.connect(ENDLESS) for _ in range(30)]
        for _ in range(5):
            assert host.ask(get()).status == 200
        assert host.open_connections() <= 10
        soon(lambda: sum(wire.is_closed() for wire in slow) >= 20)
        assert host.count("connections_refused", reason="evicted_head") >= 20


def test_idle_connections_leave_first() -> None:
    with hosting(max_connections=4) as host:
        idle = host.connect(get())
        assert idle.answer().status == 200
        half = [host.connect(ENDLESS) for _ in range(3)]
        soon(lambda: host.open_connections() == 4)
        assert host.ask(get()).status == 200
        soon(idle.is_closed)
        assert not any(wire.is_closed() for wire in half)


def test_those_who_find_no_room_wait_and_are_served_later() -> None:
    with hosting(Torrent(), max_connections=2, write_timeout_s=600) as host:
        busy = [host.connect(post(chat(stream=True)), receive_buffer=4096) for _ in "12"]
        soon(lambda: in_phase(host, Phase.ANSWER) == 2)
        waiting = host.connect(get())
        soon(lambda: host.count("connections_refused", reason="full") >= 1)
        assert not waiting.is_closed()
        busy[0].close()
        assert waiting.answer().status == 200


def test_clients_that_left_before_they_were_accepted_cost_nothing() -> None:
    """Clients sent requests of a megabyte and left at once, hundreds per second. Each was accepted, read and
    parsed, and others waited for seconds in the kernel's queue behind them.
    """
    with hosting(Torrent(), max_connections=1, write_timeout_s=600) as host:
        busy = host.connect(post(chat(stream=True)), receive_buffer=4096)
        soon(lambda: in_phase(host, Phase.ANSWER) == 1)
        for _ in range(20):
            host.connect(post(chat())).close()
        waiting = host.connect(get())
        busy.close()
        assert waiting.answer().status == 200
        assert host.count("connections_refused", reason="left") == 20
        assert host.count("connections_accepted") == 2


def test_bodies_that_nobody_waits_for_make_room() -> None:
    """A stranger announced bodies of 60,000 bytes and sent none of them.

    Each connection got its 401 at once, and then stayed for the 30 seconds of a body. With 100 of them an
    honest client waited for 32 seconds. Now they make room at once, and end after two seconds anyway.
    """
    with hosting(max_connections=8, body_timeout_s=600, api_keys=("secret-key-of-the-test",)) as host:
        silent = [host.connect(f"{BODY}60000\r\n\r\n") for _ in range(8)]
        assert [wire.answer().status for wire in silent] == [401] * 8
        soon(lambda: in_phase(host, Phase.ANSWERED) == 8)
        assert host.ask(get()).status == 200
        assert host.count("connections_refused", reason="evicted_answered") == 1
        soon(lambda: in_phase(host, Phase.ANSWERED) == 0)
        assert host.count("connection_timeouts", kind="body") == 7


def test_silent_bodies_make_room_as_the_last() -> None:
    """Without keys, every body is waited for: a stranger's silent ones kept others out for 30 seconds.

    The connection that has been silent for longest leaves, and not one that is still sending.
    """
    with hosting(max_connections=4, body_timeout_s=600) as host:
        sending = host.connect(f"{BODY}400\r\n\r\n")
        soon(lambda: in_phase(host, Phase.BODY) == 1)
        silent = [host.connect(f"{BODY}400\r\n\r\n") for _ in range(3)]
        soon(lambda: in_phase(host, Phase.BODY) == 4)
        oldest = next(iter(host.app.connections))
        sending.send("{")
        soon(lambda: next(reversed(host.app.connections.queues[Phase.BODY])) is oldest)
        assert host.ask(get()).status == 200
        soon(lambda: silent[0].is_closed())
        assert not any(wire.is_closed() for wire in (sending, *silent[1:]))


def test_one_address_gets_its_share_only() -> None:
    with hosting(max_connections_per_address=3, header_timeout_s=600) as host:
        held = [host.connect(ENDLESS) for _ in range(3)]
        soon(lambda: host.open_connections() == 3)
        answer = host.ask(get())
        assert (answer.status, answer.code) == (429, "too_many_connections")
        assert answer.headers["retry-after"]
        held[0].close()
        soon(lambda: host.open_connections() == 2)
        assert host.ask(get()).status == 200


@pytest.mark.parametrize(("proxy", "named"), [("127.0.0.0/8", "192.0.2.7"), ("10.0.0.0/8", "127.0.0.1")])
def test_only_a_trusted_proxy_names_the_client(proxy: str, named: str) -> None:
    """X-Forwarded-For of everybody on the same machine was believed."""
    with hosting(max_connections_per_address=1, trusted_proxies=(proxy,)) as host:
        host.app.router.add(Route("GET", "/who", who))
        one = host.connect(get("/who", "X-Forwarded-For: 6.6.6.6, 192.0.2.7"))
        assert one.answer().body.decode() == f'"{named}"'
        assert host.ask(get()).status == (200 if named == "192.0.2.7" else 429)


def test_metrics_tell_about_connections() -> None:
    with hosting() as host:
        wire = host.connect("nonsense\r\n\r\n")
        assert wire.answer().status == 400
        wire.close()
        soon(lambda: host.open_connections() == 0)
        text = host.ask(get("/metrics")).body.decode()
        assert "fovea:connections_open 1.0" in text
        assert 'fovea:connections_refused_total{reason="malformed_http"} 1.0' in text


CHILD = """
import json, resource, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.http.support import hosting
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
import fovea.server.run
if sys.argv[3] == "blind":  # a server that does not know its limit, as if others used up the descriptors
    fovea.server.run.allowed_connections = lambda wanted: wanted
with hosting(header_timeout_s=600) as host:
    print(json.dumps([host.address[1], host.app.connections.capacity]), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("mode", ["knows", "blind"])
def test_descriptors_run_out(mode: str) -> None:
    """At 256 descriptors, 255 connections of a stranger ended the service, and nothing was logged.

    A server that knows its limit stays below it. One whose descriptors are used up anyway waits and goes on;
    the connections that wait are served as soon as others end.
    """
    root = str(Path(__file__).resolve().parents[3])
    child = Fork(CHILD, [root, "200", mode], os.environ | {"PYTHONPATH": root})
    try:
        port, capacity = json.loads(child.stdout.readline())
        address = ("127.0.0.1", port)
        wires = [Wire(address) for _ in range(230)]
        for wire in wires:
            wire.send(ENDLESS)
        late = Wire(address)
        late.send(get())
        if mode == "knows":
            assert capacity < 200 - RESERVE
        else:
            for wire in wires[:100]:
                wire.close()
        assert late.answer().status == 200
        for wire in wires:
            wire.close()
        late.close()
    finally:
        child.kill()
        child.communicate()


def test_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 8192)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert allowed_connections(2000) == 2000
    assert limits[-1] == (8192, 8192)
    assert allowed_connections(100_000) < 8192 - RESERVE


def test_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_every_address_of_a_host_gets_the_same_port() -> None:
    sockets = bind("localhost", 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tls_cert": Path("cert.pem")}, "tls_key is not"),
        ({"tls_key": Path("key.pem")}, "tls_cert is not"),
        ({"trusted_proxies": ("proxy.example",)}, "10.0.0.0/8"),
        ({"max_connections": 0}, "accepted"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerSettings.of(**settings)
