"""Loading the media of a whole request: order, indices, limits, timings, cancellation and threads."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fovea.core.errors import (
    EngineError,
    Forbidden,
    FoveaError,
    InvalidImage,
    InvalidRequest,
    Overloaded,
)
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart, TextPrompt
from fovea.media import load as load_module
from fovea.media.cache import DecodedImageCache
from fovea.media.image.decode import decode
from fovea.media.image.probe import ImageHeader, probe
from fovea.media.limits import IMAGE, Kind, MediaLimits
from fovea.media.load import MediaBudget, MediaLoader, MediaTimings, VideoBundle
from fovea.media.sandbox.decoder import LocalDecoder
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


class Decoder(LocalDecoder):
    """A decoder that notes how many images it decodes, and may fail instead."""

    def __init__(self, error: FoveaError | None = None) -> None:
        super().__init__(MediaLimits())
        self.error = error
        self.calls = 0

    def decode_image(self, data: bytes, header: ImageHeader, scope: str = "") -> bytes:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return super().decode_image(data, header)


async def fails(loader: MediaLoader, urls: list[str], kind: type[FoveaError], *fragments: str) -> FoveaError:
    """Load images and read their pixels, as the engine does after admission; return the error."""
    params = [f"messages[0].content[{index}].image_url" for index in range(len(urls))]
    with pytest.raises(kind) as caught:
        await load_pixels(loader, urls, params)
    await loader.aclose()
    assert type(caught.value) is kind
    for fragment in fragments:
        assert fragment in caught.value.message
    return caught.value


async def load_pixels(loader: MediaLoader, urls: list[str], params: list[str]) -> None:
    for index, image in enumerate(await loader.load_all(urls, params)):
        try:
            assert image.rgb
        except InvalidImage as error:
            raise error.at(index, params[index]) from error


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


async def test_the_sum_of_pixels_is_checked_before_decoding() -> None:
    decoder = Decoder()
    loader = MediaLoader(MediaLimits(max_request_pixels=3000), decoder=decoder)
    await fails(loader, [data_url(sample())] * 3, InvalidRequest, "3600 pixels together", "at most 3000")
    assert decoder.calls == 0


async def test_pixels_are_decoded_when_they_are_read_and_not_kept() -> None:
    """In the past, requests held their decoded images until the last token: six small ones took 6 GB."""
    decoder = Decoder()
    loader = MediaLoader(MediaLimits(), decoder=decoder)
    (image,) = await loader.load_all([data_url(sample("JPEG"), "JPEG")])
    assert (image.width, image.height, decoder.calls) == (40, 30, 0)
    assert image.rgb == decode(sample("JPEG"), MediaLimits()).rgb
    assert image.decode_s > 0
    assert image.rgb == image.rgb
    assert decoder.calls == 3, "nothing was kept: this loader has no cache of decoded images"
    await loader.aclose()


async def test_timings_use_the_clock_argument() -> None:
    ticks = iter(range(100))
    loader = MediaLoader(MediaLimits(), clock=lambda: float(next(ticks)))
    loaded = await loader.load_timed([data_url(sample())])
    assert loaded.timings == (MediaTimings(fetch_s=1.0, decode_s=0.0),)
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


async def test_checking_and_hashing_never_run_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def record_thread(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            threads.add(threading.current_thread().name)
            return function(*args)

        return call

    monkeypatch.setattr(load_module, "identify", record_thread(load_module.identify))
    monkeypatch.setattr(load_module, "probe", record_thread(probe))
    loader = MediaLoader(MediaLimits(decode_threads=2))
    await loader.load_all([data_url(sample())] * 8)
    await loader.aclose()
    assert len(threads) in (1, 2)
    assert all(name.startswith("fovea-media") for name in threads)


async def test_an_engine_error_does_not_become_the_clients_error() -> None:
    loader = MediaLoader(MediaLimits(), decoder=Decoder(EngineError("defect")))
    await fails(loader, [data_url(sample())], EngineError, "defect")


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


async def test_a_picture_from_several_sources_is_decoded_once() -> None:
    decoder, cache = Decoder(), DecodedImageCache(1 << 20)
    shelf = Shelf({"https://a.example/1": sample()})
    loader = MediaLoader(MediaLimits(), shelf, image_cache=cache, decoder=decoder)
    urls = [data_url(sample()), data_url(sample()), "https://a.example/1"]
    images = await loader.load_all(urls)
    assert images == (decode(sample(), MediaLimits()),) * 3
    first = images[0].rgb
    assert all(image.rgb is first for image in images)
    assert all(image.rgb is first for image in await loader.load_all(urls))
    assert decoder.calls == 1
    (other,) = await loader.load_all([data_url(sample(width=41))])
    assert other.rgb
    assert decoder.calls == 2
    loaded = await loader.load_timed(urls[:1], scope="another")
    assert loaded.images[0].rgb == first
    assert decoder.calls == 3
    await loader.aclose()


def test_threads_that_need_one_picture_decode_it_once() -> None:
    cache, started, calls = DecodedImageCache(), threading.Barrier(4), []

    def work() -> bytes:
        calls.append(1)
        while cache.cache.hits < 3:  # the others have arrived
            pass
        return b"pixels"

    def ask(_: int) -> bytes:
        started.wait()
        return cache.get("name", work)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [b"pixels"] * 4
    assert len(calls) == 1


def test_a_failed_decoding_fails_everybody_who_waits_and_is_not_stored() -> None:
    cache = DecodedImageCache(1 << 20)

    def broken() -> bytes:
        raise InvalidImage("broken")

    for _ in range(2):
        with pytest.raises(InvalidImage, match="broken"):
            cache.get("name", broken)
    assert cache.get("name", lambda: b"pixels") == b"pixels"


async def test_files_of_requests_in_flight_have_a_ceiling() -> None:
    """A request holds the files of its images until it ends. All together have a ceiling, so that many
    requests in the queue cannot fill the memory; a large file finds the room full earlier than a small one.
    """
    budget = MediaBudget(1000)
    requests = [Holder() for _ in range(7)]
    for request in requests:
        budget.hold(request, 100)
    with pytest.raises(
        Overloaded, match="100 bytes has no room.* 700 bytes; accepted: at most 750"
    ) as caught:
        budget.hold(Holder(), 100)
    assert caught.value.code == "media_full"
    for _ in range(10):
        requests.append(Holder())
        budget.hold(requests[-1], 30)
    with pytest.raises(Overloaded):
        budget.hold(Holder(), 30)
    del requests, request
    assert budget.held == 0
    last = Holder()
    budget.hold(last, 5000)
    assert budget.held == 5000, "a single file may be larger than the ceiling"


def test_one_client_cannot_fill_the_ceiling_for_files() -> None:
    """One client asked for 22 long answers about large files; then all others got 429 for their images."""
    budget = MediaBudget(1000)
    files = [Holder() for _ in range(30)]
    for file in files[:16]:
        budget.hold(file, 30, "greedy")
    with pytest.raises(Overloaded, match="of 'greedy' in flight take 480 bytes; .* at most 500"):
        budget.hold(files[16], 30, "greedy")
    budget.hold(files[17], 30, "calm")
    budget.hold(files[18], 30)
    budget.release(files[0])
    budget.release(files[0])
    budget.hold(files[19], 30, "greedy")
    large = Holder()
    budget.hold(large, 200, "alone")
    assert budget.held == 16 * 30 + 60 + 200
    for file in (*files, large):
        budget.release(file)
    assert budget.held == 0
    budget.hold(large, 900, "alone")
    assert budget.held == 900, "the first file of a client may be of any size"


async def test_a_stored_image_counts_for_every_request_that_names_it() -> None:
    """Images sent ahead were stored decoded, and counted nowhere once a request named them: twelve requests
    took 2 GB. Now the file is stored, and each request holds it as if it had sent it.
    """
    loader = MediaLoader(MediaLimits())
    (stored,) = await loader.load_all([data_url(sample())])
    assert stored.held_bytes == len(sample())
    before = loader.budget.held
    lent = loader.lend(stored)
    assert loader.budget.held == before + len(sample())
    assert lent == stored
    assert lent.rgb == stored.rgb
    prompt = ChatPrompt((Message("user", (TextPart("a"), ImagePart(lent))),))
    loader.release(prompt)
    loader.release(prompt)
    loader.release(TextPrompt("a"))
    assert loader.budget.held == before
    await loader.aclose()


class Holder:
    """Holds a file in the test of the ceiling."""


async def test_no_room_for_a_file_names_the_image() -> None:
    loader = MediaLoader(MediaLimits(max_media_mib=1))
    loader.budget.hold(loader, (1 << 20) - len(sample()))
    with pytest.raises(Overloaded, match="image 1: a file of") as caught:
        await loader.load_all([data_url(sample())] * 2, ["first", "second"])
    assert (caught.value.retry_after, caught.value.param) == (1.0, "second")
    await loader.aclose()


async def test_a_hit_is_checked_like_a_miss() -> None:
    """Headers are checked before the lookup, and the request's sum of pixels includes cached images."""
    cache = DecodedImageCache(1 << 20)
    wide = MediaLoader(MediaLimits(), image_cache=cache)
    (image,) = await wide.load_all([data_url(sample())])
    assert image.rgb
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
            assert (await loader.load_all(["https://a.example/1"]))[0].rgb
        await asyncio.sleep(0)
        assert shelf.dropped == ["https://a.example/1"] * count
    with pytest.raises(InvalidImage):
        assert (await loader.load_all([data_url(data)]))[0].rgb
    await asyncio.sleep(0)
    assert len(shelf.dropped) == 2
    await loader.aclose()


async def test_the_scope_reaches_the_fetcher() -> None:
    shelf = Shelf({"https://a.example/1": sample()})
    loader = MediaLoader(MediaLimits(), shelf)
    await loader.load_timed(["https://a.example/1"], scope="mine")
    assert shelf.scopes == {"mine"}
    await loader.aclose()
