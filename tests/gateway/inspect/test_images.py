"""Images are checked by their headers and hosts, and every error names the image."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fovea.core.errors import Forbidden, FoveaError, InvalidImage, InvalidRequest, InvalidVideo
from fovea.core.media import content_identity
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.fields import media_parts
from fovea.gateway.inspect.images import (
    HOST_S,
    THREAD_BYTES,
    ImageInspector,
    KnownImages,
    RequestImage,
    name_of,
)
from fovea.media.fetch.resolve import Resolver
from fovea.media.limits import IMAGE, Kind, MediaLimits
from fovea.media.load import MediaLoader
from tests.gateway.samples import body, chat, cut, data_url
from tests.media.samples import animation, png, png_header, sample

SMALL = sample("PNG", 8, 6)
PUBLIC = "93.184.216.34"


class Web:
    """A name server and a store of images.

    lookups: hosts that were asked for.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, Sequence[str]] = {"store.example": (PUBLIC,)}
        self.files: dict[str, bytes] = {}
        self.lookups: list[str] = []
        self.now = 0.0

    def look_up(self, host: str) -> Sequence[str]:
        self.lookups.append(host)
        if host not in self.addresses:
            raise OSError("no such host")
        return self.addresses[host]

    async def fetch(self, url: str, kind: Kind = IMAGE, scope: str = "") -> bytes:
        return self.files[url]


@pytest.fixture
def web() -> Web:
    return Web()


@pytest.fixture
def known() -> KnownImages:
    return KnownImages()


@pytest.fixture
def make(web: Web, known: KnownImages) -> Iterator[Any]:
    made: list[ImageInspector] = []

    def make(remote: str = "resolve", **limits: Any) -> ImageInspector:
        bounds = MediaLimits(**limits)
        resolver = Resolver(3.0, 8, web.look_up)
        made.append(ImageInspector(bounds, remote, known, resolver.resolve, web.fetch, lambda: web.now))
        return made[-1]

    yield make
    for inspector in made:
        inspector.close()


async def inspect(inspector: ImageInspector, given: Body) -> list[RequestImage]:
    return await inspector.inspect(given, list(media_parts(given.value)))


async def refusal(inspector: ImageInspector, value: dict[str, Any]) -> FoveaError:
    with pytest.raises(FoveaError) as caught:
        await inspect(inspector, body(value))
    return caught.value


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("width", [9, 90], ids=["short", "long"])
async def test_the_facts_are_those_of_the_server(make: Any, kind: str, width: int) -> None:
    data = sample(kind, width, 7)
    url = data_url(data, "image/any")
    [image] = await inspect(make(), body(chat(url)))
    assert (image.width, image.height, image.size) == (width, 7, len(data))
    assert image.identity == content_identity(f"image/{kind.lower()}", width, 7, data)
    assert image.key == image.identity
    loader = MediaLoader(MediaLimits())
    try:
        [loaded] = await loader.load_all([url])
    finally:
        await loader.aclose()
    assert loaded.identity == image.identity


async def test_large_images_are_read_in_a_thread(make: Any) -> None:
    data = png(3, 2, b"\0" * 20, extra=b"") + b"\0" * THREAD_BYTES
    [image] = await inspect(make(), body(chat(data_url(data))))
    assert image.identity == content_identity("image/png", 3, 2, data)


async def test_base64_without_a_url_is_the_same_image(make: Any) -> None:
    data = sample("PNG", 64, 64)
    for text in (data, SMALL):
        source = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(text).decode()}
        given = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        [bare] = await inspect(make(), body(given))
        [whole] = await inspect(make(), body(chat(data_url(text))))
        assert bare.identity == whole.identity


async def test_a_url_with_escaped_slashes_is_the_same_image(make: Any) -> None:
    url = data_url(sample("PNG", 64, 64))
    [plain] = await inspect(make(), body(chat(url)))
    [escaped] = await inspect(make(), cut(json.dumps(chat(url)).replace("/", "\\/").encode()))
    assert plain.identity == escaped.identity


BROKEN = {
    "bomb": (data_url(png_header(60_000, 60_000)), "60000x60000", "image_too_large"),
    "pixels": (data_url(png_header(16_000, 16_000)), "256000000", "image_too_large"),
    "empty sides": (data_url(png_header(0, 5)), "0x5", "invalid_image"),
    "truncated": (data_url(sample("JPEG", 64, 64)[:30]), "truncated", "image_truncated"),
    "wrong type": (data_url(b"%PDF-1.7 and so on, no image"), "not an image", "unsupported_image_type"),
    "empty": (data_url(b""), "no data", None),
    "animated": (data_url(animation("GIF")), "animated", "image_animated"),
    "wrong base64": ("data:image/png;base64,!!!!", "base64", None),
    "no base64": ("data:image/png,abc", "not base64", "invalid_image_url"),
    "wrong media type": ("data:text/html;base64,QUJD", "text/html", "invalid_image_url"),
    "no comma": ("data:image/png;base64", "no comma", "invalid_image_url"),
    "no scheme": ("picture.png", "no scheme", "invalid_image_url"),
    "nothing": ("", "empty", "invalid_image_url"),
    "ftp": ("ftp://store.example/a.png", "ftp", "invalid_image_url"),
    "long and wrong": ("x" * 5000, "invalid_image_url", None),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_error_names_the_image(make: Any, name: str) -> None:
    url, reason, code = BROKEN[name]
    error = await refusal(make(), chat(data_url(SMALL), url))
    assert isinstance(error, InvalidImage)
    assert error.message.startswith("image 1: ")
    assert error.param == "messages[0].content[1].image_url.url"
    assert reason in error.message or reason == error.code
    assert code in (None, error.code)
    assert len(error.message) < 500


async def test_a_url_that_is_no_unicode_names_the_image(make: Any) -> None:
    error = await refusal(make(), chat(data_url(SMALL), "data:image/png;base64," + "\ud800" * 100))
    assert error.message.startswith("image 1: ")
    assert error.param == "messages[0].content[1].image_url.url"
    assert error.status == 400


async def test_an_image_of_too_many_bytes(make: Any) -> None:
    error = await refusal(make(max_bytes=100), chat(data_url(SMALL + b"\0" * 200)))
    assert isinstance(error, InvalidImage)
    assert "at most 100" in error.message
    assert error.param == "messages[0].content[0].image_url.url"


async def test_too_many_images(make: Any) -> None:
    error = await refusal(make(max_images=2), chat(*[data_url(SMALL)] * 4))
    assert (error.code, error.param) == ("too_many_images", "messages[0].content[2].image_url.url")
    assert "at most 2" in error.message
    clips = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}] * 3
    error = await refusal(make(max_videos=1), {"messages": [{"content": clips}]})
    assert (error.code, error.param) == ("too_many_videos", "messages[0].content[1].video_url.url")


async def test_too_many_pixels_together(make: Any) -> None:
    inspector = make(max_request_pixels=96)
    assert len(await inspect(inspector, body(chat(data_url(SMALL), data_url(SMALL))))) == 2
    error = await refusal(inspector, chat(*[data_url(SMALL)] * 3))
    assert isinstance(error, InvalidRequest)
    assert "144 pixels together" in error.message
    assert "at most 96" in error.message


async def test_videos_are_counted_for_themselves(make: Any) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(SMALL)}},
        {"type": "video_url", "video_url": {"url": data_url(b"clip", "video/mp4")}},
        {"type": "video_url", "video_url": {"url": data_url(b"clip", "image/png")}},
    ]
    error = await refusal(make(), {"messages": [{"role": "user", "content": content}]})
    assert isinstance(error, InvalidVideo)
    assert error.message.startswith("video 1: ")
    image, clip = await inspect(make(), body({"messages": [{"role": "user", "content": content[:2]}]}))
    assert (image.is_video, clip.is_video) == (False, True)
    assert clip.identity != image.identity
    assert (clip.width, clip.size) == (0, 4)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "2130706433", "0x7f.1", "0x7f000001", "017700000001", "127.1", "0", "0.0.0.0",
        "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "168.63.129.16",
        "224.0.0.1", "255.255.255.255", "[::1]", "[::]", "[::ffff:10.0.0.1]", "[::ffff:7f00:1]", "[fe80::1]",
        "[fd00::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[ff02::1]",
        "localhost", "LOCALHOST", "localhost.", "inside.example", "mixed.example", "nothing.example",
        "%6c%6fcalhost", "１２７.0.0.1",
    ],
)  # fmt: skip
async def test_private_hosts_are_refused_in_every_spelling(make: Any, web: Web, host: str) -> None:
    web.addresses.update(
        {
            "localhost": ("127.0.0.1", "::1"),
            "localhost.": ("127.0.0.1",),
            "inside.example": ("10.0.0.5",),
            "mixed.example": (PUBLIC, "10.0.0.5"),
            "nothing.example": (),
        }
    )
    error = await refusal(make(), chat(data_url(SMALL), f"http://{host}/a.png"))
    assert isinstance(error, Forbidden | InvalidImage)
    assert error.message.startswith("image 1: ")
    assert error.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        " file:///etc/passwd",
        "http://user:secret@store.example/a.png",
        "http://store.example:22/a.png",
        f"http://store.example:{'0' * 233}80@10.0.0.1/a.png",
    ],
)
async def test_urls_that_are_not_allowed(make: Any, url: str) -> None:
    error = await refusal(make(), chat(url))
    assert isinstance(error, Forbidden)
    assert error.code == "url_not_allowed"
    assert error.message.startswith("image 0: ")
    assert "secret" not in error.message


async def test_a_file_url_beneath_a_root_is_not_forwarded(make: Any, tmp_path: Any) -> None:
    (tmp_path / "a.png").write_bytes(SMALL)
    error = await refusal(make(file_root=tmp_path), chat((tmp_path / "a.png").as_uri()))
    assert isinstance(error, Forbidden)


async def test_a_host_that_does_not_exist(make: Any) -> None:
    error = await refusal(make(), chat("https://missing.example/a.png"))
    assert isinstance(error, InvalidImage)
    assert error.code == "image_fetch_failed"
    assert error.param == "messages[0].content[0].image_url.url"


async def test_a_public_url_is_known_by_its_name(make: Any, known: KnownImages) -> None:
    inspector, url = make(), "https://store.example/a.png"
    [image] = await inspect(inspector, body(chat(url)))
    assert (image.identity, image.name, image.width) == ("", name_of(url), 0)
    assert image.key == f"url:{name_of(url).hex()}"
    known.learn(name_of(url), "f" * 64)
    [image] = await inspect(inspector, body(chat(f"{url}?X-Amz-Signature=1")))
    assert image.identity == "f" * 64
    assert image.key == f"url:{name_of(url).hex()}"  # the key stays, so that its backend is found again


async def test_a_long_url_is_read_to_its_end(make: Any) -> None:
    """Signed URLs have more bytes than the strings that stay in the body's skeleton."""
    signature = "X-Amz-Security-Token=" + "s" * 600
    first = f"https://store.example/{'folder/' * 60}a.png"
    urls = (first, f"{first}?{signature}", f"https://store.example/{'folder/' * 60}b.png")
    images = await inspect(make(), body(chat(*urls)))
    assert [image.name for image in images] == [name_of(url) for url in urls]
    assert images[0].name == images[1].name != images[2].name


async def test_a_public_host_is_resolved_again_after_a_while(make: Any, web: Web) -> None:
    inspector = make()
    for _ in range(3):
        await inspect(inspector, body(chat("https://store.example/a.png")))
    assert web.lookups == ["store.example"]
    web.addresses["store.example"] = ("127.0.0.1",)
    web.now = HOST_S + 1
    assert isinstance(await refusal(inspector, chat("https://store.example/a.png")), Forbidden)


async def test_remote_images_can_be_refused(make: Any, web: Web) -> None:
    error = await refusal(make("refuse"), chat("https://store.example/a.png"))
    assert isinstance(error, Forbidden)
    assert "data: URL" in error.message
    assert len(await inspect(make("refuse"), body(chat(data_url(SMALL))))) == 1
    assert not web.lookups


@pytest.mark.parametrize("path", ["a.png", "folder/" * 60 + "a.png"], ids=["short", "long"])
async def test_a_fetched_image_becomes_a_data_url_of_the_body(make: Any, web: Web, path: str) -> None:
    url = f"https://store.example/{path}"
    web.files[url] = sample("PNG", 50, 40)
    given = body(chat(url, data_url(SMALL)))
    first, second = await inspect(make("fetch"), given)
    assert first.identity == content_identity("image/png", 50, 40, web.files[url])
    assert json.loads(given.encoded()) == chat(data_url(web.files[url]), data_url(SMALL))
    assert second.width == 8


async def test_a_fetched_file_that_is_no_image(make: Any, web: Web) -> None:
    web.files["https://store.example/a"] = b"<html>"
    error = await refusal(make("fetch"), chat("https://store.example/a"))
    assert isinstance(error, InvalidImage)
    assert error.message.startswith("image 0: ")


async def test_many_requests_at_once_share_an_inspector(make: Any) -> None:
    inspector = make()
    sizes = range(1, 20)
    found = await asyncio.gather(
        *(inspect(inspector, body(chat(data_url(sample("PNG", n, 2))))) for n in sizes)
    )
    assert [images[0].width for images in found] == list(sizes)
