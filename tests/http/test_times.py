"""Clients that are slow on purpose: every wait has an end, and the places of the slow are given to others."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from fovea.http.refusals import ClientGone
from fovea.server.request import Request
from fovea.server.routing import Route
from tests.http.support import CHAT, LAST, Host, Torrent, get, hosting, large, post, soon
from tests.server.scripted import Script
from tests.server.support import chat

QUICK = {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "write_timeout_s": 0.5, "keep_alive_s": 0.5}
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosting(**QUICK) as host:
        yield host


def test_headers_that_never_end(host: Host) -> None:
    """A stranger opened connections, sent a byte now and then, and kept them forever ("slow loris")."""
    wire = host.connect("GET /version HTTP/1.1\r\nHost: loc")
    answer = wire.answer()
    assert (answer.status, answer.code) == (408, "header_timeout")
    assert wire.answer().status == 0


def test_bytes_now_and_then_do_not_extend_the_time_for_headers(host: Host) -> None:
    wire = host.connect("GET /version HTTP/1.1\r\nX: ")
    wire.sock.settimeout(0.05)
    for _ in range(1000):
        wire.send("a")
        try:
            if wire.sock.recv(1, socket.MSG_PEEK):
                break
        except TimeoutError:
            continue
    assert wire.answer().status == 408


def test_connection_that_sends_nothing(host: Host) -> None:
    wire = host.connect()
    assert wire.answer().status == 0


def test_idle_connection_is_closed(host: Host) -> None:
    wire = host.connect(get())
    assert wire.answer().status == 200
    assert wire.answer().status == 0


def test_second_request_that_arrives_in_half_is_answered() -> None:
    """The first byte of a request ends the idle time, so the rest has the time of a head."""
    with hosting(keep_alive_s=0.2, header_timeout_s=60) as host:
        wire = host.connect(get(), get()[:20])
        assert wire.answer().status == 200
        wire.sock.settimeout(0.6)
        with pytest.raises(TimeoutError):
            wire.sock.recv(1)
        wire.sock.settimeout(60)
        wire.send(get()[20:])
        assert wire.answer().status == 200


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_body_that_never_ends(host: Host, framing: str) -> None:
    wire = host.connect(f"{HEAD}{framing}\r\n\r\n3e8\r\n{{")
    answer = wire.answer()
    assert (answer.status, answer.code) == (408, "body_timeout")
    soon(lambda: host.count("connection_timeouts", kind="body") >= 1)


def test_body_below_the_least_rate() -> None:
    """A byte now and then is not enough: only bytes that arrive at the least rate extend the time."""
    with hosting(**QUICK, least_rate_kib=1) as host:
        wire = host.connect(f"{HEAD}Content-Length: 1000000\r\n\r\n")
        wire.sock.settimeout(0.02)
        while True:
            wire.send("a")
            try:
                if wire.sock.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
        assert wire.answer().status == 408


def test_body_above_the_least_rate_may_take_longer() -> None:
    with hosting(body_timeout_s=1.0, least_rate_kib=1) as host:
        body = b" " * 1000 * 14
        wire = host.connect(f"{HEAD}Content-Length: {len(body) + 2}\r\n\r\n")
        wire.sock.settimeout(0.1)
        for begin in range(0, len(body), 1000):
            wire.send(body[begin : begin + 1000])
            with pytest.raises(TimeoutError):
                wire.sock.recv(1)
        wire.send("{}")
        wire.sock.settimeout(60)
        assert wire.answer().status == 400


def test_time_in_which_the_server_does_not_read_is_not_the_clients() -> None:
    """The route waits before it reads; meanwhile the client cannot send."""
    with hosting(**QUICK) as host:
        read = 0

        async def slow(request: Request) -> int:
            nonlocal read
            await asyncio.sleep(1.2)
            more = True
            while more:
                message = await request.receive()
                read, more = read + len(message["body"]), message["more_body"]
            return read

        host.app.router.add(Route("POST", "/slow", slow))
        size = 20_000_000
        wire = host.connect(f"POST /slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n")
        wire.send(b"a" * size)
        assert wire.answer().body == b"%d" % size


def test_timed_out_body_is_a_disconnect_for_its_route() -> None:
    with hosting(**QUICK) as host:
        seen: list[str] = []

        async def watch(request: Request) -> None:
            try:
                while True:
                    await request.receive()
            except ClientGone:
                seen.append("gone")
                raise

        host.app.router.add(Route("POST", "/watch", watch))
        wire = host.connect("POST /watch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\na")
        assert wire.answer().status == 408
        soon(lambda: seen == ["gone"])


def test_expected_sign_does_not_count_as_slowness(host: Host) -> None:
    """With `Expect: 100-continue` a client waits for the server before it sends the body."""
    body = b"{}"
    wire = host.connect(f"{HEAD}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n")
    assert wire.answer(head_only=True).status == 100
    wire.send(body)
    assert wire.answer().status == 400


def test_refused_request_never_asks_for_its_body() -> None:
    with hosting(**QUICK, api_keys=("secret-key-of-the-test",)) as host:
        wire = host.connect(f"{HEAD}Expect: 100-continue\r\nContent-Length: 50000000\r\n\r\n")
        answer = wire.answer()
        assert answer.status == 401
        assert answer.headers["connection"] == "close"
        assert wire.answer().status == 0


def test_refused_request_with_a_large_body_ends_its_connection() -> None:
    """After 401 the server went on to read and parse gigabytes of the refused body."""
    with hosting(**QUICK, api_keys=("secret-key-of-the-test",)) as host:
        wire = host.connect(f"{HEAD}Content-Length: 5000000000\r\n\r\n", b"a" * 1_000_000)
        answer = wire.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        sent = 0
        while sent < 200 and not wire.is_closed():
            wire.send(b"a" * 1_000_000)
            sent += 1
        wire.close()
        soon(lambda: host.open_connections() == 0)


def test_refused_request_with_a_small_body_keeps_its_connection() -> None:
    with hosting(**QUICK, api_keys=("secret-key-of-the-test",)) as host:
        whole = post(chat())
        wire = host.connect(whole[:150])
        assert wire.answer().status == 401
        wire.send(whole[150:], get())
        assert wire.answer().status == 200


def test_client_that_does_not_read_its_stream() -> None:
    """A client asked for a stream and read nothing: its request stayed in the engine forever."""
    torrent = Torrent()
    with hosting(torrent, **QUICK) as host:
        wire = host.connect(post(chat(stream=True)), receive_buffer=4096)
        soon(lambda: torrent.closed_streams == 1)
        assert host.count("connection_timeouts", kind="write") == 1
        soon(lambda: host.open_connections() == 0)
        deltas = torrent.deltas
        assert len(wire.read_all()) < deltas * len(torrent.text)
        assert torrent.deltas == deltas


def test_client_that_reads_a_byte_now_and_then() -> None:
    torrent = Torrent()
    with hosting(torrent, **QUICK, least_rate_kib=1 << 20) as host:
        wire = host.connect(post(chat(stream=True)), receive_buffer=4096)
        wire.sock.settimeout(0.02)
        while torrent.closed_streams == 0:
            try:
                if not wire.sock.recv(1000):
                    break
                time.sleep(0.01)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        soon(lambda: torrent.closed_streams == 1)


def test_client_that_reads_at_a_good_rate_is_left_alone() -> None:
    torrent = Torrent()
    with hosting(torrent, **QUICK) as host:
        wire = host.connect(post(chat(stream=True)))
        for _ in range(300):
            assert wire.sock.recv(1 << 16)
        assert torrent.closed_streams == 0
    assert torrent.closed_streams == 1


def test_client_that_does_not_read_a_complete_answer() -> None:
    """The answer is complete, but stays in the write buffer: closing the connection must not wait for it."""
    with hosting(Script(LAST), **QUICK) as host:
        host.app.router.add(large(15_000_000))
        for header in ("Connection: close", "X: y"):
            host.connect(get("/large", header), receive_buffer=4096)
            soon(lambda: host.open_connections() == 1)
            soon(lambda: host.open_connections() == 0)


def test_disconnect_behind_a_pipelined_request_is_noticed() -> None:
    """While a second request waits, the socket is not read, so nobody saw that the client had left."""
    torrent = Torrent("x")
    with hosting(torrent) as host:

        async def wait(request: Request) -> None:
            request.watch()
            try:
                await asyncio.Event().wait()
            finally:
                torrent.closed_streams += 1

        host.app.router.add(Route("GET", "/wait", wait))
        wire = host.connect(get("/wait"), get(), get())
        soon(lambda: host.open_connections() == 1)
        wire.close()
        soon(lambda: torrent.closed_streams == 1)
        soon(lambda: host.open_connections() == 0)


def test_pipelined_requests_are_answered_in_order(host: Host) -> None:
    wire = host.connect(get("/version"), get("/none"), get("/health"))
    assert [wire.answer().status for _ in range(3)] == [200, 404, 200]


def test_pipeline_without_end() -> None:
    """One write of 256 KiB held 14,000 requests. Each became a task's state at once."""
    with hosting(**QUICK) as host:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wire = host.connect(b"GET /version HTTP/1.1\r\nHost:[::1]\r\n\r\n" * 50_000)
        statuses = []
        while (answer := wire.answer()).status:
            statuses.append(answer.status)
        assert set(statuses) == {200}
        assert len(statuses) <= 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def test_malformed_request_behind_a_running_one_does_not_break_its_answer(host: Host) -> None:
    """The 400 was written at once, into the middle of the answer to the earlier request."""
    wire = host.connect(get("/version"), "nonsense\r\n\r\n")
    assert wire.answer().status == 200
    assert wire.answer().status in (0, 400)
