"""TLS on the server's own port: real handshakes with certificates made for the test."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import time
import warnings
from pathlib import Path

import httpx
import pytest

from fovea.core.errors import ConfigError
from fovea.http import patience
from fovea.http.table import Phase
from fovea.http.tls import Certificate
from tests.http.support import Host, Torrent, Wire, get, hosting, in_phase, large, post, soon
from tests.server.support import chat
from tests.support.programs import needs

pytestmark = needs("openssl")


def make(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-days", "30", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", cert, "-keyout", key, *(options or ("-nodes",))],
        check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
    return cert, key


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("tls"), "one")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("tls"), "two")


def trust(cert: Path, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cert)
    context.maximum_version = version
    return context


def secure(host: Host, context: ssl.SSLContext, receive_buffer: int = 0) -> Wire:
    """A TLS connection to a server."""
    wire = host.connect(receive_buffer=receive_buffer)
    wire.sock = context.wrap_socket(wire.sock, server_hostname="127.0.0.1")
    return wire


def test_requests_over_tls(pair: tuple[Path, Path]) -> None:
    with hosting(tls_cert=pair[0], tls_key=pair[1]) as host:
        assert host.url.startswith("https://")
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            with httpx.Client(verify=trust(pair[0], version), base_url=host.url, trust_env=False) as client:
                for _ in range(3):
                    assert client.get("/health").status_code == 200
                assert client.post("/v1/chat/completions", json=chat()).status_code == 200
        wire = secure(host, trust(pair[0]))
        wire.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000)
        assert wire.answer().status == 431


def test_old_versions_and_plain_http_are_refused(pair: tuple[Path, Path]) -> None:
    with hosting(tls_cert=pair[0], tls_key=pair[1]) as host:
        old = trust(pair[0], ssl.TLSVersion.TLSv1_2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            secure(host, old)
        assert host.ask(get()).status == 0
        # A client that gives up at once may have left before it was accepted.
        soon(lambda: sum(host.count("connections_refused", reason=why) for why in ("tls", "left")) == 2)
        soon(lambda: host.open_connections() == 0)
        assert secure(host, trust(pair[0])) is not None


def test_handshake_that_never_ends(pair: tuple[Path, Path]) -> None:
    """A handshake counts as time for the headers, and as a connection."""
    with hosting(tls_cert=pair[0], tls_key=pair[1], header_timeout_s=0.3) as host:
        silent = host.connect()
        soon(lambda: host.open_connections() == 1)
        soon(lambda: host.open_connections() == 0)
        soon(silent.is_closed)
        assert host.count("connection_timeouts", kind="handshake") == 1


def test_unfinished_handshakes_make_room(pair: tuple[Path, Path]) -> None:
    with hosting(tls_cert=pair[0], tls_key=pair[1], max_connections=3) as host:
        silent = [host.connect() for _ in range(10)]
        wire = secure(host, trust(pair[0]))
        wire.send(get())
        assert wire.answer().status == 200
        soon(lambda: sum(each.is_closed() for each in silent) >= 8)


def test_client_that_does_not_read_over_tls(pair: tuple[Path, Path]) -> None:
    torrent = Torrent()
    with hosting(torrent, tls_cert=pair[0], tls_key=pair[1], write_timeout_s=0.3) as host:
        wire = secure(host, trust(pair[0]), receive_buffer=4096)
        wire.send(post(chat(stream=True)))
        soon(lambda: torrent.closed_streams == 1)
        soon(lambda: host.open_connections() == 0)
        assert host.count("connection_timeouts", kind="write") == 1


def test_idle_connections_make_room_although_their_clients_keep_them(pair: tuple[Path, Path]) -> None:
    """An evicted TLS connection stayed open until its client confirmed the end of TLS, for up to 30 seconds.

    It was in no table meanwhile, so 500 connections had 518 descriptors with a limit of 100.
    """
    with hosting(tls_cert=pair[0], tls_key=pair[1], max_connections=5, write_timeout_s=600) as host:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            wire = secure(host, trust(pair[0]))
            wire.send(get())
            assert wire.answer().status == 200
        assert host.open_connections() <= 5
        of_clients = len(host.wires)
        assert len(os.listdir("/proc/self/fd")) - before <= of_clients + 5 + 1  # one is being accepted
        assert host.count("connections_refused", reason="evicted_idle") == 25


def test_clients_that_do_not_confirm_the_end_of_tls_make_room(pair: tuple[Path, Path]) -> None:
    """100 connections that had their answer, but did not confirm its end, kept others out for 29 seconds."""
    with hosting(tls_cert=pair[0], tls_key=pair[1], max_connections=4, write_timeout_s=600) as host:
        for _ in range(12):
            wire = secure(host, trust(pair[0]))
            wire.send(get("/health", "Connection: close"))
            assert wire.answer().status == 200
        assert host.count("connections_refused", reason="evicted_closing") == 8
        soon(lambda: host.open_connections() == 0)  # the last four end without an eviction, after two seconds


def test_last_answer_over_tls_may_take_its_time(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short time for the end of TLS begins when the client has read its answer."""
    monkeypatch.setattr(patience, "LINGER_S", 0.05)
    with hosting(tls_cert=pair[0], tls_key=pair[1], write_timeout_s=600) as host:
        host.app.router.add(large(10_000_000))
        wire = secure(host, trust(pair[0]), receive_buffer=4096)
        wire.send(get("/large", "Connection: close"))
        soon(lambda: in_phase(host, Phase.CLOSING) == 1)
        time.sleep(0.5)  # several times as long as the end of TLS may take
        assert len(wire.answer().body) == 10_000_002


def test_unread_answer_over_tls_makes_room_in_the_end(pair: tuple[Path, Path]) -> None:
    with hosting(tls_cert=pair[0], tls_key=pair[1], max_connections=1, write_timeout_s=600) as host:
        host.app.router.add(large(10_000_000))
        unread = secure(host, trust(pair[0]), receive_buffer=4096)
        unread.send(get("/large", "Connection: close"))
        soon(lambda: in_phase(host, Phase.CLOSING) == 1)
        wire = secure(host, trust(pair[0]))
        wire.send(get())
        assert wire.answer().status == 200


def name_of(host: Host, context: ssl.SSLContext) -> str:
    """The name in the certificate that the server shows."""
    with socket.create_connection(host.address) as sock:
        try:
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped:
                subject = dict(pair[0] for pair in wrapped.getpeercert()["subject"])
                return str(subject["commonName"])
        except ssl.SSLError:
            return ""


def test_new_certificate_is_used_without_a_restart(
    tmp_path: Path, pair: tuple[Path, Path], other: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates live for 90 days or less; servers run longer. A broken pair must not end the service."""
    monkeypatch.setattr(Certificate.watch, "__defaults__", (0.02,))
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(pair[0], cert)
    shutil.copy(pair[1], key)
    with hosting(tls_cert=cert, tls_key=key) as host:
        open_one = secure(host, trust(pair[0]))
        assert name_of(host, trust(pair[0])) == "one"
        shutil.copy(other[0], cert)  # the key does not fit yet
        assert name_of(host, trust(pair[0])) == "one"
        shutil.copy(other[1], key)
        soon(lambda: name_of(host, trust(other[0])) == "two")
        cert.write_text("nonsense")
        assert name_of(host, trust(other[0])) == "two"
        open_one.send(get())
        assert open_one.answer().status == 200


async def test_broken_certificate_is_logged_and_the_old_one_stays(
    tmp_path: Path, pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    cert = tmp_path / "cert.pem"
    shutil.copy(pair[0], cert)
    certificate = Certificate(cert, pair[1])
    installed: list[ssl.SSLContext] = []
    watch = asyncio.create_task(certificate.watch(installed.append, 0.01))
    cert.write_text("nonsense")
    while not caplog.records:
        await asyncio.sleep(0.01)
    assert "not a PEM file" in caplog.records[0].getMessage()
    shutil.copy(pair[0], cert)
    while not installed:
        await asyncio.sleep(0.01)
    watch.cancel()


def test_files_that_cannot_be_used(tmp_path: Path, pair: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    cert, key = pair
    locked = make(tmp_path, "locked", "-passout", "pass:secret")
    for wrong, says in (
        ((tmp_path / "none.pem", key), "cannot be read: No such file"),
        ((cert, tmp_path), "cannot be read: Is a directory"),
        ((cert, other[1]), "is not the key of the certificate"),
        (locked, "is encrypted"),
        ((key, key), "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=says):
            Certificate(*wrong).context()


def test_key_that_others_can_read(
    tmp_path: Path, pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key.pem"
    shutil.copy(pair[1], key)
    key.chmod(0o600)
    Certificate(pair[0], key).context()
    assert not caplog.records
    key.chmod(0o644)
    Certificate(pair[0], key).context()
    assert "chmod 600" in caplog.text
