"""Slots and memory of downloads are shared among sites: one slow or greedy server does not take them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from fovea.core.errors import ConfigError, InvalidImage, Overloaded
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.fetch.resolve import Slots
from fovea.media.fetch.response import Arrival, Arrivals
from fovea.media.image.jpeg import FORMAT as JPEG
from fovea.media.image.probe import peek
from fovea.media.limits import MIB, MediaLimits
from tests.media.internet import PNG, PUBLIC, Internet, fails
from tests.media.samples import sample, with_jpeg_segment


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Line:
    """Tasks that wait for slots. order: the sites that got one, in order."""

    def __init__(self, slots: Slots) -> None:
        self.order: list[str] = []
        self._slots = slots
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, site: str) -> asyncio.Task[None]:
        async def wait() -> None:
            await self._slots.acquire(site)
            self.order.append(site)

        task = asyncio.create_task(wait())
        self._tasks.append(task)
        await turns(2)
        return task


async def test_one_site_gets_a_part_of_the_slots() -> None:
    line = Line(Slots(4, 2))
    for site in ("a", "a", "a", "b"):
        await line.join(site)
    assert line.order == ["a", "a", "b"]


async def test_a_free_slot_goes_to_the_site_with_the_fewest() -> None:
    slots = Slots(3, 3)
    line = Line(slots)
    for site in ("a", "a", "a", "a", "a", "b", "c"):
        await line.join(site)
    for _ in range(3):
        slots.release("a")
    await turns()
    assert line.order == ["a", "a", "a", "b", "c", "a"]


async def test_sites_with_equally_many_slots_take_turns() -> None:
    slots = Slots(1, 1)
    line = Line(slots)
    for site in ("x", "a", "a", "a", "b", "b"):
        await line.join(site)
    for count in range(5):
        slots.release(line.order[count])
        await turns()
    assert line.order == ["x", "a", "b", "a", "b", "a"]


async def test_who_leaves_the_line_takes_no_slot() -> None:
    slots = Slots(1, 1)
    line = Line(slots)
    await line.join("a")
    second, third = await line.join("a"), await line.join("a")
    second.cancel()
    await turns()
    slots.release("a")
    third.cancel()  # in the moment in which it is granted
    await turns()
    assert (slots.free, slots._waiting, line.order) == (1, {}, ["a"])
    async with slots.hold("b"):
        assert slots.free == 0
    assert slots.free == 1


def silent(hosts: dict[str, asyncio.Event]) -> httpx.AsyncBaseTransport:
    """A transport whose servers answer after their event is set; others answer at once."""

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            host = request.headers["host"]
            if host in hosts:
                await hosts[host].wait()
            return httpx.Response(200, content=PNG)

    return Transport()


async def test_a_server_that_never_answers_takes_few_slots() -> None:
    """64 downloads from one silent server kept all others waiting for ten seconds."""
    net = Internet({"slow.example": [PUBLIC], "b.slow.example": [PUBLIC], "images.test": [PUBLIC]})
    answer = asyncio.Event()
    limits = MediaLimits(max_concurrent_fetches=4, max_fetches_per_host=3)
    transport = silent({"slow.example": answer, "b.slow.example": answer})
    fetcher = Fetcher(limits, resolve=net.resolve, transport=transport)
    hosts = ("slow.example", "b.slow.example") * 5
    slow = [asyncio.create_task(fetcher.fetch(f"http://{host}/{n}")) for n, host in enumerate(hosts)]
    await turns()
    assert await fetcher.fetch("http://images.test/") == PNG
    assert fetcher.slots.free == 1
    answer.set()
    assert await asyncio.gather(*slow) == [PNG] * 10


async def test_a_redirect_takes_a_slot_of_its_target() -> None:
    """Links on many sites may all redirect to one slow server."""
    names = [f"site{n}.test" for n in range(6)]
    net = Internet({name: [PUBLIC] for name in (*names, "slow.example")})
    answer = asyncio.Event()
    slow = silent({"slow.example": answer})

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.headers["host"] == "slow.example":
                return await slow.handle_async_request(request)
            return httpx.Response(302, headers={"location": "http://slow.example/"})

    limits = MediaLimits(max_concurrent_fetches=4, max_fetches_per_host=2)
    fetcher = Fetcher(limits, resolve=net.resolve, transport=Transport())
    tasks = [asyncio.create_task(fetcher.fetch(f"http://{name}/")) for name in names]
    await turns(50)
    assert fetcher.slots.free == 2
    answer.set()
    assert await asyncio.gather(*tasks) == [PNG] * 6


# ---- memory


async def test_the_largest_download_makes_room() -> None:
    arrivals = Arrivals(100)
    started = asyncio.Event()

    async def large() -> None:
        async with arrivals.open() as arrival:
            arrival.add(80)
            started.set()
            await asyncio.Event().wait()  # nothing more arrives

    task = asyncio.create_task(large())
    await started.wait()
    async with arrivals.open() as small:
        small.add(15)
        small.add(15)
        assert arrivals.held == 30
    with pytest.raises(Overloaded, match="stopped after 80 bytes, as the largest one") as caught:
        await task
    assert caught.value.code == "media_full"
    assert (arrivals.held, arrivals._open) == (0, set())


async def test_a_download_that_is_itself_the_largest_is_refused() -> None:
    arrivals = Arrivals(100)
    async with AsyncExitStack() as stack:
        others: list[Arrival] = [await stack.enter_async_context(arrivals.open()) for _ in range(3)]
        for other in others:
            other.add(20)
        arrival = await stack.enter_async_context(arrivals.open())
        arrival.add(25)
        with pytest.raises(Overloaded, match="stopped after 50 bytes"):
            arrival.add(25)
        with pytest.raises(asyncio.CancelledError):  # its task is stopped, too, wherever it waits
            await asyncio.Event().wait()
        assert arrivals.held == 60
        others[0].add(40)
        assert arrivals.held == 100
    assert arrivals.held == 0


async def test_other_timeouts_pass() -> None:
    with pytest.raises(TimeoutError):
        async with Arrivals(100).open():
            raise TimeoutError


class Endless(httpx.AsyncByteStream):
    """A body that begins with `start`, and then never ends and never sends anything."""

    def __init__(self, start: bytes) -> None:
        self._start = start

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._start
        await asyncio.Event().wait()


async def test_unfinished_downloads_have_a_ceiling_together() -> None:
    """64 videos of 100 MiB could arrive at the same time: 6.4 GiB. Small images pass nevertheless."""
    net = Internet({"images.test": [PUBLIC]})
    large = PNG + bytes(600 * 1024)

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/small":
                return httpx.Response(200, content=PNG)
            return httpx.Response(200, stream=Endless(large))

    limits = MediaLimits(max_bytes=MIB, max_video_bytes=MIB, max_fetching_mib=1)
    fetcher = Fetcher(limits, resolve=net.resolve, transport=Transport())
    tasks = [asyncio.create_task(fetcher.fetch(f"http://images.test/{n}")) for n in range(5)]
    await turns(50)
    assert fetcher.arrivals.held <= MIB
    assert await fetcher.fetch("http://images.test/small") == PNG
    done = [task for task in tasks if task.done()]
    assert len(done) == 4
    assert {type(task.exception()) for task in done} == {Overloaded}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert fetcher.arrivals.held == 0
    assert fetcher.slots.free == limits.max_concurrent_fetches


def test_the_ceiling_holds_one_file() -> None:
    with pytest.raises(ConfigError, match="max_fetching_mib is 64; accepted: at least 100"):
        MediaLimits(max_fetching_mib=64)


# ---- the header while a download arrives


async def test_an_image_whose_size_comes_late_is_not_examined_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole download was copied and parsed at each doubling, up to 20 MiB, on the event loop."""
    lengths: list[int] = []

    def counting(data: bytes, limits: MediaLimits) -> object:
        lengths.append(len(data))
        return peek(data, limits)

    monkeypatch.setattr("fovea.media.fetch.response.peek", counting)
    data = sample("JPEG")
    for _ in range(40):
        data = with_jpeg_segment(data, 0xE2, bytes(65000))
    net = Internet({"images.test": [PUBLIC]}, lambda _: httpx.Response(200, content=Pieces(data)))
    assert await net.fetcher().fetch("http://images.test/") == data
    assert max(lengths) <= 256 * 1024
    assert sum(lengths) <= 600 * 1024
    assert JPEG.scan(data).width == 40


class Pieces(httpx.AsyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._data), 4096):
            yield self._data[at : at + 4096]


async def test_a_jpeg_of_fill_bytes_is_refused_while_it_arrives() -> None:
    """16 such downloads of 20 MiB blocked the event loop for 6 seconds."""
    net = Internet(
        {"images.test": [PUBLIC]}, lambda _: httpx.Response(200, content=b"\xff\xd8" + b"\xff" * MIB)
    )
    await fails(net.fetcher(), "http://images.test/", InvalidImage, "more than 1024 fill bytes")
