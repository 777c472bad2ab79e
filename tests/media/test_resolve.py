"""Lookups of names whose name servers do not answer: they end in time, and delay only names of their site."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from fovea.core.errors import InvalidImage, Overloaded
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.fetch.resolve import Resolver, look_up, site_of
from fovea.media.limits import MediaLimits
from tests.media.internet import PUBLIC, fails


class Names:
    """A resolver of the system: names that contain "slow" get no answer until `answer` is set.

    calls: names that were looked up, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answer = threading.Event()

    def look_up(self, host: str) -> Sequence[str]:
        self.calls.append(host)
        if "slow" in host:
            self.answer.wait(30)
        if "missing" in host:
            raise OSError("no such name")
        return [PUBLIC]


@asynccontextmanager
async def names(timeout_s: float = 30.0, most: int = 16) -> AsyncIterator[tuple[Names, Resolver]]:
    known = Names()
    try:
        yield known, Resolver(timeout_s, most, known.look_up)
    finally:
        known.answer.set()


async def times_out(resolver: Resolver, host: str) -> None:
    with pytest.raises(TimeoutError):
        await resolver.resolve(host, 80)


async def until(condition: object) -> None:
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.001)


async def test_a_slow_site_does_not_delay_other_names() -> None:
    """Lookups ran in the event loop's own threads: a few dozen slow names stopped all resolution."""
    async with names() as (known, resolver):
        slow = [asyncio.create_task(resolver.resolve(f"{n}.slow.example", 80)) for n in range(40)]
        assert await resolver.resolve("images.example.org", 80) == [PUBLIC]
        assert len([host for host in known.calls if "slow" in host]) == 2  # an eighth of 16 threads
        known.answer.set()
        assert await asyncio.gather(*slow) == [[PUBLIC]] * 40


async def test_names_of_a_stuck_site_fail_at_once() -> None:
    async with names(timeout_s=0.4) as (known, resolver):
        for host in ("a.slow.example", "b.slow.example"):
            await times_out(resolver, host)
        await times_out(resolver, "c.slow.example")
        assert known.calls == ["a.slow.example", "b.slow.example"]  # no thread for the third
        assert await resolver.resolve("images.example.org", 80) == [PUBLIC]


async def test_a_name_that_is_stuck_is_not_looked_up_twice() -> None:
    async with names(timeout_s=0.4) as (known, resolver):
        await times_out(resolver, "a.slow.example")
        await times_out(resolver, "a.slow.example")
        assert known.calls == ["a.slow.example"]


async def test_if_all_threads_are_stuck_every_lookup_fails_at_once() -> None:
    async with names(timeout_s=0.4, most=4) as (known, resolver):
        hosts = [f"slow{n}.example" for n in range(4)]
        await asyncio.gather(*(times_out(resolver, host) for host in hosts))
        # A lookup's clock starts just after that of the one who asked, who therefore gives up just before it.
        await until(lambda: all(flight.stuck for flight in resolver._flights.values()))
        with pytest.raises(Overloaded, match="all 4 lookups .* wait for name servers") as caught:
            await resolver.resolve("images.example.org", 80)
        assert caught.value.code == "lookups_full"
        assert await resolver.resolve("127.0.0.1", 80) == ("127.0.0.1",)  # needs no lookup
        known.answer.set()
        await until(lambda: not resolver._flights)
        assert await resolver.resolve("images.example.org", 80) == [PUBLIC]


async def test_simultaneous_lookups_of_one_name_are_one() -> None:
    async with names() as (known, resolver):
        tasks = [asyncio.create_task(resolver.resolve("slow.example", 80)) for _ in range(20)]
        await until(lambda: known.calls)
        tasks[0].cancel()
        known.answer.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [[PUBLIC]] * 19
        assert known.calls == ["slow.example"]
        await resolver.resolve("slow.example", 80)
        assert known.calls == ["slow.example"] * 2  # an answer is not kept


async def test_a_lookup_whose_client_left_gives_its_thread_back() -> None:
    async with names(most=1) as (known, resolver):
        task = asyncio.create_task(resolver.resolve("slow.example", 80))
        await until(lambda: known.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        known.answer.set()
        assert await resolver.resolve("images.example.org", 80) == [PUBLIC]


async def test_errors_of_the_system() -> None:
    async with names() as (known, resolver):
        with pytest.raises(OSError, match="no such name"):
            await resolver.resolve("missing.example", 80)
        with pytest.raises(OSError, match="has 254 characters"):
            await resolver.resolve("a" * 254, 80)
        assert known.calls == ["missing.example"]


async def test_a_host_with_thousands_of_addresses_is_refused() -> None:
    """Each address is checked on the event loop, and an answer over TCP holds four thousand."""
    resolver = Resolver(30, 4, lambda _: [f"93.184.{n >> 8}.{n & 255}" for n in range(4000)])
    with pytest.raises(OSError, match="4000 addresses; accepted: at most 64"):
        await resolver.resolve("images.example", 80)


async def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("no more threads")

    async with names(most=1) as (_, resolver):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OSError, match="no thread"):
                await resolver.resolve("images.example", 80)
        assert await resolver.resolve("images.example", 80) == [PUBLIC]


async def test_system_resolver() -> None:
    resolver = Resolver(30, 4)
    assert list(await resolver.resolve("127.0.0.1", 80)) == ["127.0.0.1"]
    assert list(await resolver.resolve("2130706433", 80)) == ["127.0.0.1"]
    assert "127.0.0.1" in look_up("localhost") or "::1" in look_up("localhost")


async def test_the_message_of_a_fetch_names_host_and_time() -> None:
    async with names(timeout_s=0.4) as (_, resolver):
        fetcher = Fetcher(MediaLimits(resolve_timeout_s=0.4), resolve=resolver.resolve)
        await fails(
            fetcher, "http://a.slow.example/", InvalidImage, "'a.slow.example' was not resolved within 0.4 s"
        )


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("images.example.com", "example.com"),
        ("A.B.C.Example.COM.", "example.com"),
        ("example.com", "example.com"),
        ("localhost", "localhost"),
        ("a.b.example.co.uk", "example.co.uk"),
        ("x.y.t.co", "t.co"),
        ("co.uk", "co.uk"),
        ("93.184.216.34", "93.184.216.34"),
        ("0x5d.184.55330", "93.184.216.34"),
        ("1572395042", "93.184.216.34"),
        ("1.2.3.4.5", "4.5"),
        ("7.example.com", "example.com"),
        ("2606:4700::1111", "2606:4700::"),
        ("2606:4700:0:0:ffff::1", "2606:4700::"),
        ("::1", "::"),
    ],
)
def test_site(host: str, site: str) -> None:
    assert site_of(host) == site
