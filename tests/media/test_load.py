"""Loading the media of a whole request: order, indices, limits, timings, cancellation and threads."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fovea.core.errors import EngineError, Forbidden, FoveaError, InvalidImage, InvalidRequest
from fovea.media import load as load_module
from fovea.media.bundle import MediaTimings, VideoBundle
from fovea.media.image.cache import DecodedImageCache
from fovea.media.image.decode import decode
from fovea.media.image.probe import probe
from fovea.media.kind import IMAGE, Kind
from fovea.media.limits import MediaLimits
from fovea.media.load import MediaLoader
from tests.media.samples import FORMATS, MEDIA_TYPES, animation, png_header, sample


def data_url(data: bytes, kind: str = "PNG") -> str:
    return f"data:{MEDIA_TYPES[kind]};base64,{base64.b64encode(data).decode()}"


class Shelf:
    """A fetcher with prepared pictures. A missing one fails; "/slow" waits until it is cancelled."""

    def __init__(self, pictures: dict[str, bytes] | None = None) -> None:
        self.pictures = pictures or {}
        self.cancelled = 0
        self.closed = False
        self.scopes: set[str] = set()
        self.dropped: list[str] = []

    def forget(self, url: str, kind: Kind = IMAGE, scope: str = "") -> None:
        self.dropped.append(url)

    async def fetch(self, url: str, kind: Kind = IMAGE, scope: str = "") -> bytes:
        self.scopes.add(scope)
        if url.endswith("/slow"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        await asyncio.sleep(0)
        if url.endswith("/inner"):
            raise Forbidden("'x' is not a public host", code="url_not_allowed")
        if url not in self.pictures:
            raise InvalidImage("the image's server answered 404", code="image_fetch_failed")
        return self.pictures[url]

    async def aclose(self) -> None:
        self.closed = True


async def fails(loader: MediaLoader, urls: list[str], kind: type[FoveaError], *fragments: str) -> FoveaError:
    params = [f"messages[0].content[{index}].image_url" for index in range(len(urls))]
    with pytest.raises(kind) as caught:
        await loader.load_all(urls, params)
    await loader.aclose()
    assert type(caught.value) is kind
    for fragment in fragments:
        assert fragment in caught.value.message
    return caught.value


async def test_all_formats_in_order() -> None:
    loader = MediaLoader(MediaLimits())
    urls = [data_url(sample(kind, width=40 + n), kind) for n, kind in enumerate(FORMATS)]
    images = await loader.load_all(urls)
    assert [image.width for image in images] == [40, 41, 42, 43, 44]
    assert images[0] == decode(sample(), MediaLimits())
    assert await loader.load_all([]) == ()
    await loader.aclose()


async def test_equal_bytes_from_different_sources_are_one_image() -> None:
    loader = MediaLoader(
        MediaLimits(), Shelf({"https://a.example/1": sample(), "https://b.example/2": sample()})
    )
    wrong_type = data_url(sample(), "JPEG")
    images = await loader.load_all(
        ["https://a.example/1", "https://b.example/2", data_url(sample()), wrong_type]
    )
    assert len({image.identity for image in images}) == 1
    assert (await loader.load_all(["https://a.example/1"]))[0].identity == images[0].identity
    await loader.aclose()


@pytest.mark.parametrize(
    ("bad", "kind", "fragments", "code"),
    [
        (
            "https://a.example/404",
            InvalidImage,
            ["image 1: the image's server answered 404"],
            "image_fetch_failed",
        ),
        ("https://a.example/inner", Forbidden, ["image 1: 'x' is not a public host"], "url_not_allowed"),
        ("ftp://a.example/", InvalidImage, ["image 1: ", "'ftp'"], "invalid_image_url"),
        ("file:///etc/passwd", Forbidden, ["image 1: file:// URLs"], "url_not_allowed"),
        (
            "data:image/png;base64,AAAAAAAA",
            InvalidImage,
            ["image 1: ", "unknown data"],
            "unsupported_image_type",
        ),
        (data_url(sample()[:-20]), InvalidImage, ["image 1: the PNG is truncated"], "image_truncated"),
        (data_url(png_header(9, 9)), InvalidImage, ["image 1: the PNG cannot be decoded"], "invalid_image"),
        (data_url(png_header(15_000, 15_000)), InvalidImage, ["image 1: ", "225000000"], "image_too_large"),
        (data_url(animation("GIF"), "GIF"), InvalidImage, ["image 1: ", "animated"], "image_animated"),
    ],
)
async def test_errors_name_the_image(
    bad: str, kind: type[FoveaError], fragments: list[str], code: str
) -> None:
    error = await fails(MediaLoader(MediaLimits(), Shelf()), [data_url(sample()), bad], kind, *fragments)
    assert error.param == "messages[0].content[1].image_url"
    assert error.code == code
    if isinstance(error, InvalidImage):
        assert error.index == 1


async def test_too_many_images() -> None:
    loader = MediaLoader(MediaLimits(max_images=2))
    error = await fails(loader, [data_url(sample())] * 3, InvalidRequest, "has 3 images; accepted: at most 2")
    assert error.code == "too_many_images"
    assert error.param == "messages[0].content[2].image_url"


async def test_the_sum_of_pixels_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(load_module, "decode", never)
    loader = MediaLoader(MediaLimits(max_request_pixels=3000))
    await fails(loader, [data_url(sample())] * 3, InvalidRequest, "3600 pixels together", "at most 3000")


async def test_headers_are_read_before_pixels_are_decoded() -> None:
    loader = MediaLoader(MediaLimits())
    (encoded,) = await loader.read_all([data_url(sample("JPEG"), "JPEG")])
    assert (encoded.header.media_type, encoded.header.pixels) == ("image/jpeg", 1200)
    loaded = await loader.decode_all([encoded])
    assert loaded.images[0] == decode(sample("JPEG"), MediaLimits())
    await loader.aclose()


async def test_timings_use_the_clock_argument() -> None:
    ticks = iter(range(100))
    loader = MediaLoader(MediaLimits(), clock=lambda: float(next(ticks)))
    loaded = await loader.load_timed([data_url(sample())])
    assert loaded.timings == (MediaTimings(fetch_s=1.0, decode_s=1.0),)
    await loader.aclose()


async def test_the_first_failure_cancels_the_others() -> None:
    shelf = Shelf()
    urls = ["https://a.example/slow", "https://a.example/404", "https://a.example/slow"]
    await asyncio.wait_for(fails(MediaLoader(MediaLimits(), shelf), urls, InvalidImage, "image 1: "), 2)
    assert shelf.cancelled == 2


async def test_cancelling_the_request_cancels_its_fetches() -> None:
    shelf = Shelf()
    loader = MediaLoader(MediaLimits(), shelf)
    task = asyncio.create_task(loader.load_all(["https://a.example/slow"] * 2))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert shelf.cancelled == 2
    await loader.aclose()


async def test_decoding_never_runs_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def record_thread(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            threads.add(threading.current_thread().name)
            return function(*args)

        return call

    monkeypatch.setattr(load_module, "decode", record_thread(decode))
    monkeypatch.setattr(load_module, "probe", record_thread(probe))
    loader = MediaLoader(MediaLimits(decode_threads=2))
    await loader.load_all([data_url(sample())] * 8)
    await loader.aclose()
    assert len(threads) in (1, 2)
    assert all(name.startswith("fovea-media") for name in threads)


async def test_an_engine_error_does_not_become_the_clients_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise EngineError("defect")

    monkeypatch.setattr(load_module, "decode", defect)
    await fails(MediaLoader(MediaLimits()), [data_url(sample())], EngineError, "defect")


async def test_aclose_closes_only_what_the_loader_created() -> None:
    shelf = Shelf()
    with ThreadPoolExecutor(1) as pool:
        await MediaLoader(MediaLimits(), shelf, pool).aclose()
        assert not shelf.closed
        assert pool.submit(lambda: 1).result() == 1


async def test_wait_of_a_request() -> None:
    timings = (MediaTimings(3.0, 1.0), MediaTimings(1.0, 2.0))
    assert load_module.ImageBundle((), timings).wait == (3.0, 2.0), "decoded after all were fetched"
    assert VideoBundle((), timings).wait == (3.0, 1.0), "each video is opened as soon as it arrives"
    assert load_module.ImageBundle((), ()).wait == VideoBundle((), ()).wait == (0.0, 0.0)


async def test_a_picture_from_several_sources_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = []

    def record(data: bytes, limits: MediaLimits, identity: str | None = None) -> object:
        calls.append(identity)
        return decode(data, limits, identity)

    monkeypatch.setattr(load_module, "decode", record)
    cache = DecodedImageCache(1 << 20)
    loader = MediaLoader(MediaLimits(), Shelf({"https://a.example/1": sample()}), image_cache=cache)
    urls = [data_url(sample()), data_url(sample()), "https://a.example/1"]
    images = await loader.load_all(urls)
    assert images == (decode(sample(), MediaLimits()),) * 3
    assert all(image.rgb is images[0].rgb for image in images)
    assert await loader.load_all(urls) == images
    assert calls == [images[0].identity]
    await loader.load_all([data_url(sample(width=41))])
    assert len(calls) == 2
    loaded = await loader.load_timed(urls[:1], scope="another")
    assert loaded.images == images[:1]
    assert len(calls) == 3
    await loader.aclose()


async def test_a_hit_is_checked_like_a_miss() -> None:
    """Headers are checked before the lookup, and the request's sum of pixels includes cached images."""
    cache = DecodedImageCache(1 << 20)
    wide = MediaLoader(MediaLimits(), image_cache=cache)
    await wide.load_all([data_url(sample())])
    await wide.aclose()
    assert len(cache.cache) == 1
    for limits in (MediaLimits(max_pixels=100), MediaLimits(max_side=20), MediaLimits(max_bytes=50)):
        await fails(MediaLoader(limits, image_cache=cache), [data_url(sample())], InvalidImage, "at most")
    narrow = MediaLoader(MediaLimits(max_request_pixels=3000), image_cache=cache)
    await fails(narrow, [data_url(sample())] * 3, InvalidRequest, "3600 pixels together")
    assert cache.cache.hits == 0


@pytest.mark.parametrize("data", [b"GIF89a", png_header(9, 9)], ids=["header", "pixels"])
async def test_fetched_bytes_that_are_invalid_are_dropped(data: bytes) -> None:
    shelf = Shelf({"https://a.example/1": data})
    loader = MediaLoader(MediaLimits(), shelf)
    for count in (1, 2):
        with pytest.raises(InvalidImage):
            await loader.load_all(["https://a.example/1"])
        assert shelf.dropped == ["https://a.example/1"] * count
    with pytest.raises(InvalidImage):
        await loader.load_all([data_url(data)])
    assert len(shelf.dropped) == 2
    await loader.aclose()


async def test_the_scope_reaches_the_fetcher() -> None:
    shelf = Shelf({"https://a.example/1": sample()})
    loader = MediaLoader(MediaLimits(), shelf)
    await loader.load_timed(["https://a.example/1"], scope="mine")
    assert shelf.scopes == {"mine"}
    await loader.aclose()
