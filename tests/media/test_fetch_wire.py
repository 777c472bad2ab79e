"""Fetcher over real sockets and TLS, with a server on loopback that sends prepared answers."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from fovea.core.errors import Forbidden, InvalidImage
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.fetch.wire import WireTransport
from fovea.media.limits import MediaLimits
from tests.media.internet import PNG, Internet, fails
from tests.media.samples import png_header
from tests.media.web import Answer, serve

LOCAL = MediaLimits(allow_private_hosts=True, fetch_timeout_s=5)
PEM = Path(__file__).with_name("images.example.pem")


@pytest.mark.parametrize("step", [1 << 20, 7])
async def test_downloads(step: int) -> None:
    async with serve({"/a.png": Answer(PNG, step=step)}) as web:
        fetcher = Fetcher(LOCAL)
        assert await fetcher.fetch(web.url("/a.png")) == PNG
        assert await fetcher.fetch(web.url("/a.png")) == PNG
        await fetcher.aclose()
    assert f"Host: 127.0.0.1:{web.port}" in web.requests[0]
    assert web.connections == 2  # a connection is not reused by the next download


async def test_chunked_body_without_length() -> None:
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(PNG), PNG)
    answer = Answer(chunked, headers=("Transfer-Encoding: chunked",), length=-1)
    async with serve({"/": answer}) as web:
        assert await Fetcher(LOCAL).fetch(web.url("/")) == PNG


@pytest.mark.parametrize(
    ("answer", "fragment", "code"),
    [
        (Answer(status="404 Not Found"), "answered 404; accepted: 200", "image_fetch_failed"),
        (Answer(PNG, status="403 Forbidden"), "answered 403", "image_fetch_failed"),
        (Answer(PNG, status="206 Partial Content"), "answered 206", "image_fetch_failed"),
        (Answer(status="204 No Content", length=-1), "answered 204", "image_fetch_failed"),
        (Answer(status="304 Not Modified", length=-1), "answered 304", "image_fetch_failed"),
        (Answer(status="500 Oops"), "answered 500", "image_fetch_failed"),
        (Answer(), "empty body", "image_fetch_failed"),
        (Answer(PNG, headers=("Content-Encoding: gzip",)), "content encoding 'gzip'", "image_fetch_failed"),
        (Answer(PNG, length=60_000), "sends 60000 bytes; accepted: at most 50000", "image_too_large"),
        (Answer(PNG + bytes(60_000), length=-1), "sends more", "image_too_large"),
        (Answer(PNG, length=len(PNG) + 1), "failed (RemoteProtocolError)", "image_fetch_failed"),
        (Answer(b"<!doctype html>" + b" " * 90), "an HTML page", "unsupported_image_type"),
        (Answer(png_header(16_000, 16_000) + bytes(90)), "16000x16000", "image_too_large"),
        (Answer(PNG, status="BAD"), "failed (RemoteProtocolError)", "image_fetch_failed"),
    ],
)
async def test_answers_refused(answer: Answer, fragment: str, code: str) -> None:
    limits = MediaLimits(allow_private_hosts=True, max_bytes=50_000, fetch_timeout_s=5)
    async with serve({"/": answer}) as web:
        error = await fails(Fetcher(limits), web.url("/"), InvalidImage, fragment)
    assert error.code == code


@pytest.mark.parametrize("body", [b"<html>" + b" " * 200_000, png_header(16_000, 16_000) + bytes(200_000)])
async def test_refused_before_it_is_downloaded(body: bytes) -> None:
    """Nothing follows the first part. A fetch that waited for more would end with the timeout's code."""
    async with serve({"/": Answer(body, step=1000, stalls=True)}) as web:
        error = await fails(Fetcher(LOCAL), web.url("/"), InvalidImage)
    assert error.code in ("unsupported_image_type", "image_too_large")
    assert web.sent == 1000


async def test_the_timeout_bounds_a_download_from_a_slow_server() -> None:
    limits = MediaLimits(allow_private_hosts=True, fetch_timeout_s=0.3)
    async with serve({"/": Answer(PNG, step=1, pause=0.05)}) as web:
        error = await fails(Fetcher(limits), web.url("/"), InvalidImage, "did not arrive within 0.3 s")
    assert error.code == "image_fetch_failed"
    assert 0 < web.sent < len(PNG)


async def test_a_refused_connection_is_an_error() -> None:
    async with serve({}) as web:
        pass
    await fails(Fetcher(LOCAL), web.url("/"), InvalidImage, "failed (ConnectError)")


async def test_loopback_is_refused_by_default() -> None:
    async with serve({"/": Answer(PNG)}) as web:
        limits = MediaLimits(allowed_ports=(web.port,))
        await fails(Fetcher(limits), web.url("/"), Forbidden, "is not a public host")
    assert web.connections == 0


async def test_environment_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serve({"/": Answer(PNG)}) as web:
        assert await Fetcher(LOCAL).fetch(web.url("/")) == PNG


async def test_downloads_at_one_time_are_bounded() -> None:
    limits = MediaLimits(allow_private_hosts=True, max_concurrent_fetches=1)
    async with serve({"/": Answer(PNG, step=len(PNG) // 2, pause=0.05)}) as web:
        fetcher = Fetcher(limits)
        await asyncio.gather(*(fetcher.fetch(web.url("/")) for _ in range(3)))
    assert (web.connections, web.most_open) == (3, 1)


async def test_cancelling_closes_the_connection() -> None:
    async with serve({"/": Answer(PNG, step=1, pause=0.2)}) as web:
        task = asyncio.create_task(Fetcher(LOCAL).fetch(web.url("/")))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(("name", "verified"), [("images.example", True), ("other.example", False)])
async def test_certificates_are_verified_against_the_name(name: str, verified: bool) -> None:
    """The connection goes to 127.0.0.1, the certificate is for images.example."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(PEM)
    client_side = ssl.create_default_context(cafile=str(PEM))
    net = Internet({name: ["127.0.0.1"]})
    async with serve({"/": Answer(PNG)}, tls=server_side) as web:
        fetcher = Fetcher(LOCAL, resolve=net.resolve, transport=WireTransport(client_side))
        if verified:
            assert await fetcher.fetch(f"https://{name}:{web.port}/") == PNG
        else:
            await fails(fetcher, f"https://{name}:{web.port}/", InvalidImage, "failed (ConnectError)")
        await fetcher.aclose()
