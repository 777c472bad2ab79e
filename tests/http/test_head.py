"""Requests that are too large, ambiguous or no HTTP at all: each gets one short answer."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.http.address import Proxies
from fovea.http.protocol import Peers, build_scope
from fovea.http.reader import ParsedHead
from fovea.server.routing import Route
from tests.http.support import CHAT, Host, get, hosting, post, size_of_body, soon
from tests.server.support import chat


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosting() as host:
        yield host


def padded(size: int) -> bytes:
    return get("/version", "X-Fill: " + "a" * (size - len(get("/version", "X-Fill: "))))


def test_headers_up_to_the_limit(host: Host) -> None:
    assert host.ask(padded(60_000)).status == 200


def test_one_endless_header(host: Host) -> None:
    """A stranger sent one header of 64 MiB, and no other client was served for four seconds.

    Now the server reads 64 KiB of it, answers 431 and closes.
    """
    wire = host.connect("GET /version HTTP/1.1\r\nHost: localhost\r\nX: ")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(256):
        wire.send(b"a" * 64 * 1024)
    assert host.connect(get()).answer().status == 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB; 16 MiB were sent
    soon(lambda: host.count("connections_refused", reason="headers_too_large") >= 1)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (padded(70_000), 431, "headers_too_large"),
        (get("/version", *(f"X-{n}: 1" for n in range(200))), 431, "too_many_headers"),
        (get("/" + "a" * 20_000), 414, "url_too_long"),
        (b"\r\n" * 40_000, 431, "headers_too_large"),
    ],
    ids=["size", "count", "url", "empty lines"],
)
def test_head_over_a_limit(host: Host, request_bytes: bytes, status: int, code: str) -> None:
    answer = host.ask(request_bytes)
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["connection"] == "close"


def test_head_in_pieces_counts_as_one(host: Host) -> None:
    """The parser tells about a header when it is complete, so only the raw bytes show that one grows."""
    wire = host.connect("GET /version HTTP/1.1\r\nHost: localhost\r\nX: ")
    for _ in range(80):
        wire.send(b"a" * 1000)
    assert wire.answer().status == 431


def test_refused_client_gets_its_answer_while_it_still_sends(host: Host) -> None:
    """A socket that is closed with unread bytes resets the connection, and the answer would be lost."""
    wire = host.connect(padded(70_000)[:-4])
    wire.send(b"b" * 500_000)
    assert wire.answer().status == 431


def test_rest_of_a_refused_request_is_not_read_at_full_speed(host: Host) -> None:
    """Reading and dropping 64 MiB headers, one after the other, kept the event loop busy for everybody."""
    wire = host.connect(padded(70_000)[:-4])
    assert wire.answer().status == 431
    wire.sock.settimeout(0.3)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < 256:
            wire.sock.sendall(b"b" * (1 << 20))
            sent += 1
    assert sent < 64  # the rest of 256 MiB fills the buffers of the two systems, and then nothing moves


P = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
G = "GET /version HTTP/1.1\r\n"
SMUGGLED = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "request_text",
    [
        P + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        P + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
        P + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        P + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        P + "Content-Length: 5, 5\r\n\r\nhello",
        P + "Content-Length: +5\r\n\r\nhello",
        P + "Content-Length: -5\r\n\r\nhello",
        P + "Content-Length: 0x5\r\n\r\nhello",
        P + "Content-Length: 99999999999999999999\r\n\r\nhello",
        P + "Content-Length : 5\r\n\r\nhello",
        P + "Transfer-Encoding: gzip, chunked\r\n\r\n" + SMUGGLED,
        P + "Transfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
        P + "Transfer-Encoding: identity\r\n\r\n" + SMUGGLED,
        P + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        P + "Transfer-Encoding:\x0bchunked\r\n\r\n" + SMUGGLED,
        "POST /v1/chat/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        P + "X: a\r\n b\r\n\r\n",
        P + "Transfer-Encoding:\r\n chunked\r\n\r\n" + SMUGGLED,
        G + "Host: localhost\r\nX: a\0b\r\n\r\n",
        G + "Host: localhost\r\nX\0: b\r\n\r\n",
        G + "Host: localhost\rX: b\r\n\r\n",
        G + " Host: localhost\r\n\r\n",
        "GET /version HTTP/1.1\nHost: localhost\n\n",
        G + "Host: localhost\nX: b\r\n\r\n",
        G + "\r\n",
        G + "Host: one\r\nHost: two\r\n\r\n",
        "GET http://other/version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET http://localhost@other/version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET ftp://localhost/version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /a\tb HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "get /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "GET /version HTTP/1.2\r\nHost: localhost\r\n\r\n",
        P + "Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        P + "Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n",
        P + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_ambiguous_or_malformed_request(host: Host, request_text: str) -> None:
    """Two programs may read such a request in two ways, which hides one request in another."""
    wire = host.connect(request_text.encode("latin-1"))
    answer = wire.answer()
    assert answer.status == 400
    assert answer.headers["connection"] == "close"
    assert wire.answer().status == 0  # nothing after it was read as a second request


@pytest.mark.parametrize("line", ["GET /version", "GET /version HTTP/0.9", "GET /version HTTP/2.0"])
def test_other_versions(host: Host, line: str) -> None:
    answer = host.ask(f"{line}\r\nHost: localhost\r\n\r\n")
    assert answer.status in (400, 505)
    assert answer.headers["connection"] == "close"


def test_connect_is_for_proxies(host: Host) -> None:
    assert host.ask("CONNECT inside:443 HTTP/1.1\r\nHost: inside:443\r\n\r\n").status == 405


@pytest.mark.parametrize(
    "line",
    [
        "GET http://localhost/version HTTP/1.1",
        "GET HTTP://LOCALHOST/version HTTP/1.1",
        "GET //version HTTP/1.1",
    ],
)
def test_whole_urls_that_name_the_host_itself(host: Host, line: str) -> None:
    """Clients behind a proxy write the whole URL; it has to name the same host as the Host header."""
    assert host.ask(f"{line}\r\nHost: localhost\r\n\r\n").status == (404 if "//v" in line else 200)


def test_http_1_0_is_answered_and_closed(host: Host) -> None:
    wire = host.connect("GET /version HTTP/1.0\r\n\r\n")
    assert wire.answer().status == 200
    assert wire.answer().status == 0


def test_malformed_requests_do_not_fill_the_log(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """Every malformed request was one line of the log, so a stranger could fill the disk."""
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            assert host.ask("nonsense\r\n\r\n").status == 400
    assert len([record for record in caplog.records if "HTTP" in record.getMessage()]) <= 2


def test_websockets_and_http_2_are_ignored(host: Host) -> None:
    wire = host.connect(
        get("/version", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA==")
    )
    assert wire.answer().status == 200
    wire.send(get("/version", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA"))
    assert wire.answer().status == 200
    wire.send(get())
    assert wire.answer().status == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 400])
def test_body_of_a_request_to_upgrade_is_its_body(host: Host, chunked: bool, pieces: int) -> None:
    """The parser skips the body of a request that asks for another protocol.

    Its bytes were then read as the next request, with which an attacker could hide one behind a proxy. Java's
    HTTP client sends such requests by default, and lost its body.
    """
    whole = post(chat(), "Connection: Upgrade", "Upgrade: h2c") + get("/smuggled")
    if chunked:
        head, _, body = post(chat(), "Connection: Upgrade", "Upgrade: h2c").partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        whole = head + b"\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n" + get("/smuggled")
    step = -(-len(whole) // pieces)
    wire = host.connect()
    for begin in range(0, len(whole), step):
        wire.send(whole[begin : begin + step])
    answer = wire.answer()
    assert answer.status == 200
    assert b" end" in answer.body
    assert wire.answer().status == 0


def test_trailers_are_no_headers(host: Host) -> None:
    """A field after a chunked body was added to the headers that the key was checked in."""
    wire = host.connect(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    wire.send("2\r\n{}\r\n0\r\nAuthorization: Bearer other\r\nX-Late: yes\r\n\r\n", get())
    assert wire.answer().status == 400  # an empty chat body
    assert wire.answer().status == 200


@pytest.mark.parametrize(
    "piece",
    [b"1;" + b"e" * 1000 + b"\r\na\r\n", b"1\r\na\r\n", b"0\r\n" + b"X-Trailer: a\r\n" * 1000],
    ids=["extensions", "single bytes", "trailers"],
)
def test_framing_larger_than_the_body(host: Host, piece: bytes) -> None:
    """A body of chunks with long extensions cost the parser a thousand bytes for each byte of the body."""
    wire = host.connect(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    for _ in range(400):
        wire.send(piece if piece.startswith(b"1;") else piece * 100 if len(piece) < 100 else piece)
        piece = piece.removeprefix(b"0\r\n")
    assert wire.answer().status == 400


def test_a_request_behind_a_long_body_in_the_same_bytes(host: Host) -> None:
    """The parser gets a body as a whole, and nothing of what follows it."""
    body = b'{"x": "' + b"a" * 300_000 + b'"}'
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    wire = host.connect(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body + get())
    assert [wire.answer().status, wire.answer().status] == [400, 200]


def test_bodies_one_after_the_other_on_a_connection() -> None:
    """The second one was refused, because its chunks were "smaller than what is written around them".

    It had no chunks: the body of the request before was counted as bytes around its own.
    """
    with hosting() as host:
        host.app.router.add(Route("POST", "/size", size_of_body))
        wire = host.connect()
        for length in (60_000, 100_000, 60_000, 100_000):
            whole = f"POST /size HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
            whole += b"a" * length
            wire.send(whole[:8000], whole[8000:])  # the head and a part of the body in one segment
            answer = wire.answer()
            assert (answer.status, answer.body) == (200, str(length).encode())


@pytest.mark.parametrize(
    ("path", "decoded"),
    [
        ("/%61dmin", "/%61dmin"), ("/admin/%6cive", "/admin/%6cive"), ("/admin%2Flive", "/admin%2Flive"),
        ("/%2fadmin", "/%2fadmin"), ("/v1%5Cmodels", "/v1%5Cmodels"),
        ("/v1/files/%2e%2e/x", "/v1/files/%2e%2e/x"),
        ("/v1/models/Qwen%2FQwen3", "/v1/models/Qwen/Qwen3"), ("/v1/models/a%20b", "/v1/models/a b"),
        ("/admin/backends/a%3A1/drain", "/admin/backends/a:1/drain"), ("/v1/%0A", "/v1/\n"),
    ],
)  # fmt: skip
def test_a_path_cannot_hide_a_route_from_rules(path: str, decoded: str) -> None:
    """A proxy that keeps /admin from strangers once passed on /%61dmin, which the server took for /admin."""
    head = ParsedHead("GET", "1.1", path.encode(), b"", [], False, True)
    scope = build_scope(head, Peers(None, None, "http"), Proxies(()))
    assert scope["path"] == decoded


@given(st.sampled_from(["/admin", "/admin/live", "/metrics", "/v1/models"]), st.data())
def test_no_encoded_path_is_a_route_of_another_spelling(path: str, data: st.DataObject) -> None:
    """Whatever characters of a route are encoded, in either case, the result is not a route."""
    at = data.draw(st.sets(st.integers(1, len(path) - 1), min_size=1))
    form = data.draw(st.sampled_from(["%{:02X}", "%{:02x}"]))
    hidden = "".join(form.format(ord(one)) if number in at else one for number, one in enumerate(path))
    head = ParsedHead("GET", "1.1", hidden.encode(), b"", [], False, True)
    assert build_scope(head, Peers(None, None, "http"), Proxies(()))["path"] != path
