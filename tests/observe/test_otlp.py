"""A collector that answers with too much, too slowly, or with a redirect."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from fovea.observe import otlp
from fovea.observe.otlp import OtlpExporter
from fovea.observe.spans import Span

SPAN = Span("x", "1" * 32, "2" * 16, "", 1.0, 2.0)
HEAD = b"HTTP/1.1 %s\r\ncontent-type: application/x-protobuf\r\n"


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server whose connections are answered by a function, after the head of the request."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(("status", "taken"), [(b"200 OK", True), (b"500 No", False)], ids=["ok", "error"])
def test_an_answer_without_end_is_cut(status: bytes, taken: bool) -> None:
    sent = 0

    def flood(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(HEAD % status + b"\r\n")
        for _ in range(256):  # the client closes the connection long before
            connection.sendall(bytes(1 << 20))
            sent += 1 << 20

    with answering(flood) as url:
        exporter = OtlpExporter(url, "fovea", "1")
        assert exporter.export([SPAN]) is taken
        exporter.close()
    assert sent < 64 << 20


def test_an_answer_that_drips_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MOST_S", 0.05)
    left = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(HEAD % b"200 OK" + b"content-length: 1000000\r\n\r\n")
        with contextlib.suppress(OSError):
            while not left.wait(0.01):
                connection.sendall(b"x")

    with answering(drip) as url:
        assert OtlpExporter(url, "fovea", "1").export([SPAN])
        left.set()


def test_spans_that_a_redirect_swallowed_are_not_counted_as_exported() -> None:
    with answering(
        lambda connection: connection.sendall(
            HEAD % b"307 Elsewhere" + b"location: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n"
        )
    ) as url:
        assert not OtlpExporter(url, "fovea", "1").export([SPAN])
