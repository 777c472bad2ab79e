"""The cache of downloaded bytes, over sockets: shared downloads, reuse on the host's terms, and policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.core.errors import Forbidden, FoveaError, InvalidImage
from fovea.media.fetch.fetcher import FetchCache, Fetcher
from fovea.media.limits import IMAGE, VIDEO, MediaLimits
from fovea.media.load import MediaLoader
from tests.media.internet import PNG, PUBLIC, Internet
from tests.media.samples import sample
from tests.media.web import Answer, Answers, Web, serve

LOCAL = MediaLimits(allow_private_hosts=True, fetch_timeout_s=5)
OTHER = sample(width=41)
MIB = 1 << 20
TTL = 100.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new_cache(
    clock: Clock | None = None, limits: MediaLimits = LOCAL, capacity: int = MIB, ttl: float = TTL
) -> FetchCache:
    return FetchCache(Fetcher(limits), capacity, ttl, clock or Clock())


@asynccontextmanager
async def serving(answers: Answers, cache: FetchCache) -> AsyncIterator[Web]:
    async with serve(answers) as web:
        yield web
        await cache.aclose()


def picture(*headers: str, **more: object) -> Answer:
    return replace(Answer(PNG, headers=headers), **more)  # type: ignore[arg-type]


def with_etag(etag: str, *headers: str) -> Callable[[str], Answer]:
    """Answer with a picture that has an ETag, or with 304 to a request that names it."""

    def answer(head: str) -> Answer:
        if f"if-none-match: {etag}" in head.lower():
            return Answer(status="304 Not Modified", headers=(f"ETag: {etag}", *headers), length=-1)
        return picture(f"ETag: {etag}", *headers)

    return answer


def numbers(cache: FetchCache) -> tuple[int, int, int]:
    return cache.cache.hits, cache.cache.misses, cache.revalidations


async def test_a_fresh_url_is_downloaded_once() -> None:
    clock = Clock()
    cache = new_cache(clock)
    async with serving({"/": picture("Cache-Control: max-age=60")}, cache) as web:
        for now in (0.0, 59.0):
            clock.now = now
            assert await cache.fetch(web.url("/#part")) == await cache.fetch(web.url("/")) == PNG
        assert len(web.requests) == 1
        clock.now = 60.0
        assert await cache.fetch(web.url("/")) == PNG
        assert len(web.requests) == 2, "without a validator it is downloaded again"
    assert numbers(cache) == (3, 2, 0)


@pytest.mark.parametrize(
    "header", ["Cache-Control: max-age=1000000", "Expires: Sun, 09 Sep 2040 01:46:40 GMT"]
)
async def test_the_time_to_live_is_a_ceiling(header: str) -> None:
    clock = Clock()
    cache = new_cache(clock)
    async with serving({"/": picture(header)}, cache) as web:
        await cache.fetch(web.url("/"))
        clock.now = TTL - 1
        await cache.fetch(web.url("/"))
        clock.now = TTL
        await cache.fetch(web.url("/"))
        assert len(web.requests) == 2


@pytest.mark.parametrize(
    "headers",
    [(), ("Cache-Control: no-store, max-age=60", 'ETag: "1"'), ("Cache-Control: private, max-age=60",)],
)
async def test_responses_that_may_not_be_stored(headers: tuple[str, ...]) -> None:
    cache = new_cache()
    async with serving({"/": picture(*headers)}, cache) as web:
        for _ in range(2):
            assert await cache.fetch(web.url("/")) == PNG
        assert len(web.requests) == 2
        assert "if-none-match" not in web.requests[1].lower()
    assert (cache.cache.bytes, numbers(cache)) == (0, (0, 2, 0))


async def test_a_response_without_a_lifetime_is_revalidated_every_time() -> None:
    cache = new_cache()
    answers: dict[str, Callable[[str], Answer] | Answer] = {"/": with_etag('"1"')}
    async with serving(answers, cache) as web:
        for _ in range(3):
            assert await cache.fetch(web.url("/")) == PNG
        assert numbers(cache) == (2, 1, 2)
        answers["/"] = Answer(OTHER, headers=('ETag: "2"',))
        assert await cache.fetch(web.url("/")) == OTHER, "it changed"
        assert 'if-none-match: "1"' in web.requests[-1].lower()
        answers["/"] = with_etag('"2"')
        assert await cache.fetch(web.url("/")) == OTHER
    assert numbers(cache) == (3, 2, 3)


async def test_a_response_without_an_etag_is_revalidated_by_date() -> None:
    date = "Sun, 09 Sep 2001 01:46:40 GMT"

    def answer(head: str) -> Answer:
        unchanged = f"if-modified-since: {date.lower()}" in head.lower()
        return (
            Answer(status="304 Not Modified", length=-1) if unchanged else picture(f"Last-Modified: {date}")
        )

    cache = new_cache()
    async with serving({"/": answer}, cache) as web:
        assert await cache.fetch(web.url("/")) == await cache.fetch(web.url("/")) == PNG
    assert numbers(cache) == (1, 1, 1)


async def test_a_confirmation_renews_freshness_and_time_to_live() -> None:
    clock = Clock()
    cache = new_cache(clock)
    async with serving({"/": with_etag('"1"', "Cache-Control: max-age=60")}, cache) as web:
        for now, requests in ((0, 1), (59, 1), (60, 2), (119, 2), (120, 3), (219, 4), (320, 5)):
            clock.now = float(now)
            assert await cache.fetch(web.url("/")) == PNG
            assert len(web.requests) == requests
    assert numbers(cache) == (5, 2, 3), "at 320 the time to live, renewed at 219, was over"


async def test_errors_are_not_stored_and_stale_bytes_do_not_replace_them() -> None:
    cache = new_cache()
    answers: dict[str, Callable[[str], Answer] | Answer] = {"/": Answer(status="500 Oops")}
    async with serving(answers, cache) as web:
        with pytest.raises(InvalidImage, match="answered 500"):
            await cache.fetch(web.url("/"))
        answers["/"] = with_etag('"1"')
        assert await cache.fetch(web.url("/")) == PNG
        answers["/"] = Answer(status="500 Oops")
        with pytest.raises(InvalidImage, match="answered 500"):
            await cache.fetch(web.url("/"))
        answers["/"] = with_etag('"1"')
        assert await cache.fetch(web.url("/")) == PNG
    assert numbers(cache) == (1, 1, 1)


async def test_a_304_without_a_revalidation_is_an_error() -> None:
    cache = new_cache()
    async with serving({"/": Answer(status="304 Not Modified", length=-1)}, cache) as web:
        with pytest.raises(InvalidImage, match="answered 304"):
            await cache.fetch(web.url("/"))


async def test_simultaneous_requests_share_a_download() -> None:
    hold = asyncio.Event()
    cache = new_cache(capacity=0)
    async with serving({"/": picture(hold=hold), "/other": picture()}, cache) as web:
        tasks = [asyncio.create_task(cache.fetch(web.url("/"))) for _ in range(3)]
        while not web.requests:
            await asyncio.sleep(0.001)
        assert await cache.fetch(web.url("/other")) == PNG
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        hold.set()
        assert await asyncio.gather(*tasks[1:]) == [PNG, PNG]
        assert len(web.requests) == 2
    assert numbers(cache) == (2, 2, 0)


async def test_an_error_reaches_every_waiting_request() -> None:
    hold = asyncio.Event()
    cache = new_cache()
    async with serving({"/": Answer(status="404 Not Found", hold=hold)}, cache) as web:
        loader = MediaLoader(LOCAL, cache)
        tasks = [asyncio.create_task(loader.load_all([web.url("/")] * 2)) for _ in range(2)]
        while not web.requests:
            await asyncio.sleep(0.001)
        hold.set()
        for task in tasks:
            with pytest.raises(InvalidImage, match="^image [01]: the image's server answered 404"):
                await task
        assert len(web.requests) == 1
        await loader.aclose()


async def test_a_download_is_cancelled_with_its_last_request() -> None:
    hold = asyncio.Event()
    cache = new_cache()
    async with serving({"/": picture("Cache-Control: max-age=60", hold=hold)}, cache) as web:
        task = asyncio.create_task(cache.fetch(web.url("/")))
        while not web.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hold.set()
        assert cache.cache.bytes == 0
        assert await cache.fetch(web.url("/")) == PNG
        assert len(web.requests) == 2


async def test_scopes_and_kinds_share_nothing() -> None:
    cache = new_cache()
    async with serving({"/": picture("Cache-Control: max-age=60")}, cache) as web:
        for scope in ("", "a", "b", "a"):
            assert await cache.fetch(web.url("/"), IMAGE, scope) == PNG
        assert len(web.requests) == 3
        with pytest.raises(FoveaError, match="not a video"):
            await cache.fetch(web.url("/"), VIDEO)
    assert len(cache.cache) == 3


@pytest.mark.parametrize(
    "limits",
    [
        MediaLimits(allow_private_hosts=True, allow_remote=False),
        MediaLimits(allow_private_hosts=True, allowed_hosts=("b.example",)),
        MediaLimits(allow_private_hosts=True, allowed_schemes=("https",)),
        MediaLimits(),
    ],
    ids=["remote off", "hosts", "schemes", "ports"],
)
async def test_the_policy_applies_to_cached_bytes(limits: MediaLimits) -> None:
    """A fetcher with stricter limits gets the entries of another cache, and returns none of them."""
    cache, strict = new_cache(), new_cache(limits=limits)
    async with serving({"/": picture("Cache-Control: max-age=60")}, cache) as web:
        await cache.fetch(web.url("/"))
        strict.cache = cache.cache
        with pytest.raises(Forbidden):
            await strict.fetch(web.url("/"))
    await strict.aclose()


async def test_bytes_are_counted_and_the_least_recently_used_are_evicted() -> None:
    cache = new_cache(capacity=4000)
    async with serving({f"/{n}": picture("Cache-Control: max-age=60") for n in range(9)}, cache) as web:
        for n in range(9):
            await cache.fetch(web.url(f"/{n}"))
            assert 0 < cache.cache.bytes <= 4000
        stats = cache.stats()
        assert stats["fetch_cache_evictions"] == 9 - stats["fetch_cache_entries"] > 0
        assert stats["fetch_cache_bytes"] >= stats["fetch_cache_entries"] * len(PNG)
        await cache.fetch(web.url("/8"))
        await cache.fetch(web.url("/0"))
        assert len(web.requests) == 10


async def test_invalid_bytes_are_dropped_and_downloaded_again() -> None:
    cache = new_cache()
    broken = sample()[:-20]
    answers = {"/": Answer(broken, headers=("Cache-Control: max-age=60",))}
    async with serving(answers, cache) as web:
        loader = MediaLoader(LOCAL, cache)
        (image,) = await loader.load_all([web.url("/")])
        with pytest.raises(InvalidImage, match="truncated"):
            await loader.decode(image)
        answers["/"] = picture("Cache-Control: max-age=60")
        (image,) = await loader.load_all([web.url("/")])
        assert image.width == 40, "the broken bytes were dropped"
        await loader.aclose()


def redirect_chain(*hops: str, final: tuple[str, ...]) -> dict[str, Answer]:
    """Answers in which /0 redirects to /1, and so on, each with its Cache-Control."""
    answers = {
        f"/{n}": Answer(
            status="302 Found", headers=(f"Location: /{n + 1}", *([f"Cache-Control: {hop}"] if hop else []))
        )
        for n, hop in enumerate(hops)
    }
    return answers | {f"/{len(hops)}": picture(*final)}


@pytest.mark.parametrize(
    ("hops", "requests"),
    [(("max-age=50", "max-age=40"), 3), (("max-age=50", ""), 6), (("no-store", "max-age=40"), 6)],
    ids=["fresh", "one without a lifetime", "one not to be stored"],
)
async def test_the_shortest_freshness_of_all_redirects_applies(hops: tuple[str, ...], requests: int) -> None:
    clock = Clock()
    cache = new_cache(clock)
    async with serving(redirect_chain(*hops, final=("Cache-Control: max-age=60",)), cache) as web:
        await cache.fetch(web.url("/0"))
        clock.now = 39.0
        await cache.fetch(web.url("/0"))
        assert len(web.requests) == requests
        clock.now = 40.0
        await cache.fetch(web.url("/0"))
        assert len(web.requests) == requests + 3


async def test_a_redirect_to_a_new_target_is_not_revalidated() -> None:
    """The ETag belongs to the old target. The new target has the same ETag for other bytes."""
    cache = new_cache()
    answers: dict[str, Callable[[str], Answer] | Answer] = {
        "/": Answer(status="302 Found", headers=("Location: /old",)),
        "/old": with_etag('"1"'),
        "/new": lambda head: with_etag('"1"')(head) if "if-none-match" in head.lower() else Answer(OTHER),
    }
    async with serving(answers, cache) as web:
        assert await cache.fetch(web.url("/")) == await cache.fetch(web.url("/")) == PNG
        assert ["if-none-match" in head.lower() for head in web.requests] == [False, False, False, True]
        answers["/"] = Answer(status="302 Found", headers=("Location: /new",))
        assert await cache.fetch(web.url("/")) == OTHER


async def test_a_stale_entry_is_revalidated_only_at_a_public_address() -> None:
    net = Internet(
        {"a.example": [PUBLIC]}, lambda _: httpx.Response(200, content=PNG, headers={"etag": '"1"'})
    )
    cache = FetchCache(net.fetcher(), MIB, TTL)
    await cache.fetch("https://a.example/")
    net.names["a.example"] = ["127.0.0.1"]
    with pytest.raises(Forbidden, match="is not a public host"):
        await cache.fetch("https://a.example/")
    assert len(net.requests) == 1


async def test_an_etag_that_cannot_be_sent_back_is_ignored() -> None:
    headers = [(b"ETag", b"\xff\xfe"), (b"Cache-Control", b"no-cache")]
    net = Internet({"a.example": [PUBLIC]}, lambda _: httpx.Response(200, content=PNG, headers=headers))
    cache = FetchCache(net.fetcher(), MIB, TTL)
    for _ in range(2):
        assert await cache.fetch("https://a.example/") == PNG
    assert (len(net.requests), cache.cache.bytes) == (2, 0)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2)),
        st.tuples(st.just("change"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(1, 60)),
    ),
    max_size=30,
)


@given(EVENTS, st.integers(0, 40), st.integers(0, 5000))
def test_cached_bytes_are_never_older_than_the_host_allows(
    events: list[tuple[str, int]], max_age: int, capacity: int
) -> None:
    """After any sequence of events, the returned version was current at most `max_age` seconds ago."""
    clock = Clock()
    versions = [[(0.0, 0)] for _ in range(3)]

    def body(page: int, version: int) -> bytes:
        return sample(width=20 + page, height=20 + version)

    def answer(request: httpx.Request) -> httpx.Response:
        page = int(request.url.path[1:])
        tag = f'"{versions[page][-1][1]}"'
        headers = {"etag": tag, "cache-control": f"max-age={max_age}"}
        if request.headers.get("if-none-match") == tag:
            return httpx.Response(304, headers=headers)
        return httpx.Response(200, content=body(page, versions[page][-1][1]), headers=headers)

    async def play() -> None:
        net = Internet({"a.example": [PUBLIC]}, answer)
        cache = FetchCache(net.fetcher(), capacity, TTL, clock)
        for what, number in events:
            if what == "wait":
                clock.now += number
            elif what == "change":
                versions[number].append((clock.now, versions[number][-1][1] + 1))
            else:
                result = await cache.fetch(f"https://a.example/{number}")
                ends = [start for start, _ in versions[number][1:]] + [float("inf")]
                current = {
                    body(number, version)
                    for (_, version), end in zip(versions[number], ends, strict=True)
                    if end > clock.now - max_age or end == float("inf")
                }
                assert result in current
            assert cache.cache.bytes <= capacity

    asyncio.run(play())
