"""Images behind URLs: routed by what they show, downloaded here if configured, and never private ones."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Mapping

import pytest

from fovea.core.media import content_identity
from fovea.media.limits import MediaLimits
from tests.gateway.support import FakeEngine, Plan, about, data_url, picture, running

LOCAL = MediaLimits(allow_private_hosts=True)


def identity(png: bytes, size: int = 32) -> str:
    return content_identity("image/png", size, size, png)


@contextlib.asynccontextmanager
async def image_server(files: Mapping[str, bytes]) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve files by HTTP. Yields the server's URL, and the paths that are asked for."""
    asked: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1]
        asked.append(path)
        data = files.get(path.partition("?")[0])
        status, body = (b"404 x", b"") if data is None else (b"200 OK", data)
        kind = b"image/png" if data is not None else b"text/plain"
        head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        writer.write(head % (status, kind, len(body)) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


async def test_a_url_signed_anew_goes_to_the_backend_that_has_its_image() -> None:
    """The first answer tells the image's identity. Its other URLs, and its data: URL, then follow it."""
    engines = [FakeEngine(name) for name in "abcd"]
    homes = set()
    async with engines[0], engines[1], engines[2], engines[3], running(*engines, media=LOCAL) as gateway:
        for number in range(8):
            png = picture(number)
            for engine in engines:
                engine.plan = Plan(headers={"x-fovea-images": identity(png)})
            url = f"http://images.test/{number}.png?v=2&X-Amz-Date={{}}&X-Amz-Signature={{}}"
            first = await gateway.ask(messages=about(url.format(1, "aa")))
            home = first.headers["x-fovea-backend"]
            homes.add(home)
            assert first.headers["x-fovea-images"] == identity(png)
            again = await gateway.ask(messages=about(url.format(2, "bb")), stream=True)
            await gateway.ask(messages=about(f"http://mirror.test/{number}.png"))  # tells the same identity
            mirror = await gateway.ask(messages=about(f"http://mirror.test/{number}.png?X-Amz-Date=3"))
            inline = await gateway.ask(messages=about(data_url(png)))
            for answer in (again, mirror, inline):
                assert answer.headers["x-fovea-backend"] == home
                assert answer.headers["x-fovea-route"] == "image"
        sent = [received for engine in engines for received in engine.received]
        assert any("X-Amz-Signature=bb" in str(received.json) for received in sent), "URLs stay as they were"
    assert len(homes) > 1


async def test_an_engine_that_tells_nonsense_about_images_teaches_nothing() -> None:
    plan = Plan(headers={"x-fovea-images": "x" * 64 + ",," + "0" * 63})
    async with FakeEngine(plan=plan) as engine, running(engine, media=LOCAL) as gateway:
        for _ in range(2):
            answer = await gateway.ask(messages=about("http://images.test/a.png", "http://images.test/b.png"))
            assert answer.status_code == 200
        assert len(gateway.gateway.services.known) == 0


async def test_fetched_images_become_data_urls_and_equal_bytes_share_an_answer() -> None:
    png, other = picture(1), picture(2)
    files = {"/one.png": png, "/two.png": png, "/other.png": other}
    async with (
        image_server(files) as (url, asked),
        FakeEngine("a") as one,
        FakeEngine("b") as two,
        running(one, two, media=LOCAL, remote_images="fetch") as gateway,
    ):
        first = await gateway.ask(messages=about(f"{url}/one.png?sig=1"), temperature=0)
        assert (first.status_code, first.headers["x-fovea-cache"]) == (200, "miss")
        received = (one.received + two.received)[-1].json["messages"][0]["content"][0]["image_url"]["url"]
        assert received == data_url(png)
        second = await gateway.ask(messages=about(f"{url}/two.png"), temperature=0)
        assert (second.status_code, second.headers["x-fovea-cache"]) == (200, "hit")
        inline = await gateway.ask(messages=about(data_url(png)), temperature=0)
        assert inline.headers["x-fovea-cache"] == "hit"
        third = await gateway.ask(messages=about(f"{url}/other.png"), temperature=0)
        assert third.headers["x-fovea-cache"] == "miss"
        missing = await gateway.ask(messages=about(data_url(png), f"{url}/none.png"))
        assert missing.status_code == 400
        error = missing.json()["error"]
        assert (error["code"], error["param"]) == (
            "image_fetch_failed",
            "messages[0].content[1].image_url.url",
        )
        assert "image 1" in error["message"]
    assert len(one.received) + len(two.received) == 2
    assert asked[0] == "/one.png?sig=1"


PRIVATE = ["http://127.0.0.1/x.png", "http://10.0.0.7/x.png", "http://169.254.169.254/latest", "http://[::1]/x.png",
           "http://localhost/x.png", "http://0x7f000001/x.png", "http://2130706433/x.png"]  # fmt: skip


@pytest.mark.parametrize("remote", ["resolve", "fetch"])
async def test_private_addresses_are_refused_by_the_index_of_the_image(remote: str) -> None:
    async with FakeEngine() as engine, running(engine, remote_images=remote) as gateway:
        for url in PRIVATE:
            answer = await gateway.ask(messages=about(data_url(picture()), url))
            error = answer.json()["error"]
            assert answer.status_code in (400, 403), url
            assert "image 1" in error["message"], url
            assert error["param"] == "messages[0].content[1].image_url.url"
        scheme = await gateway.ask(messages=about("file:///etc/passwd"))
        assert scheme.status_code in (400, 403)
    assert not engine.received


async def test_a_remote_image_is_refused_if_that_is_configured() -> None:
    async with FakeEngine() as engine, running(engine, remote_images="refuse", media=LOCAL) as gateway:
        answer = await gateway.ask(messages=about("http://images.test/a.png"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "url_not_allowed")
        assert (await gateway.ask(messages=about(data_url(picture())))).status_code == 200
    assert len(engine.received) == 1


async def test_images_that_are_broken_are_named_before_anything_is_sent() -> None:
    broken = "data:image/png;base64," + base64.b64encode(picture()[:20]).decode()
    async with FakeEngine() as engine, running(engine) as gateway:
        for url in (broken, "data:image/png;base64,@@@@", "data:image/png;base64,", "data:text/plain,x"):
            answer = await gateway.ask(messages=about(data_url(picture()), url))
            assert answer.status_code == 400, url
            assert "image 1" in answer.json()["error"]["message"]
    assert not engine.received
