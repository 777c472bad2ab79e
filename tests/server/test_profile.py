"""/admin/profile with the real py-spy, on a server in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea.core.errors import InvalidRequest, NotFound, Overloaded
from fovea.observe import py_spy
from fovea.observe.py_spy import ProfileOptions, Profiler, ProfilerUnavailable
from tests.support.programs import program
from tests.support.servers import folder, forked, fovea_gateway, free_port
from tests.support.thorough import is_thorough

KEY = {"authorization": "Bearer admin"}


@contextlib.contextmanager
def simulated() -> Iterator[str]:
    port = free_port()
    words = ["serve", "--simulate", "--port", str(port), "--admin-key", "admin", "--lame-duck-s", "0"]
    with folder("serve") as home, forked(words, port, home / "log"):
        yield f"http://127.0.0.1:{port}"


def test_a_running_server_and_gateway_are_profiled() -> None:
    program("py-spy")
    with simulated() as server, fovea_gateway([server], "--admin-key", "admin") as gateway:
        for url in (server, gateway):
            path = f"{url}/admin/profile?seconds=1&format=raw&idle=true"
            assert httpx.get(path).status_code == 401
            answer = httpx.get(path, headers=KEY, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("text/plain")
            assert "fovea" in answer.text
        drawn = httpx.get(f"{server}/admin/profile?seconds=1&idle=true", headers=KEY, timeout=60)
        assert drawn.headers["content-type"] == "image/svg+xml"
        assert "<svg" in drawn.text
        wrong = httpx.get(f"{gateway}/admin/profile?seconds=1000", headers=KEY)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "seconds")
        slow = httpx.get(f"{gateway}/admin/slow", headers=KEY)
        assert slow.json() == {"requests": []}
        for url in (server, gateway) if is_thorough() else (gateway,):
            leave(f"{url}/admin/profile?seconds=60&format=raw")


def leave(url: str) -> None:
    """Leave while a profile of a minute is made. The next profile does not wait for its end."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(url, headers=KEY, timeout=httpx.Timeout(30, read=0.5))
    for _ in range(100):
        answer = httpx.get(url.replace("seconds=60", "seconds=1"), headers=KEY, timeout=30)
        if answer.status_code != 429:
            assert answer.status_code == 200, answer.text
            return
        time.sleep(0.05)
    raise AssertionError("the profile goes on without its client")


@pytest.mark.parametrize(
    "query",
    [{"seconds": "0"}, {"seconds": "61"}, {"seconds": "nan"}, {"seconds": "2.5"}, {"seconds": "x"},
     {"format": "pdf"}, {"native": "maybe"}, {"second": "1"}],
)  # fmt: skip
def test_wrong_options_are_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="accepted"):
        ProfileOptions.of(query)


async def test_one_profile_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def record(*_: Any) -> bytes:
        reached.set()
        await go.wait()
        return b"profile"

    monkeypatch.setattr(py_spy, "_record", record)
    one = Profiler()
    first = asyncio.ensure_future(one.profile(ProfileOptions()))
    await reached.wait()
    with pytest.raises(Overloaded, match="one profile at a time"):
        await one.profile(ProfileOptions())
    go.set()
    assert await first == b"profile"


async def test_a_missing_program_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(py_spy.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ProfilerUnavailable, match="install the extra profiling"):
        await Profiler().profile(ProfileOptions())


async def test_a_process_that_does_nothing_is_no_failure_of_the_profiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """py-spy ends with an error if it saw no stack, and an idle server once answered 501."""
    script = tmp_path / "py-spy"
    script.write_text("#!/bin/sh\necho 'Error: Failed to write flamegraph: No stack counts found'\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(py_spy, "find_program", lambda: str(script))
    with pytest.raises(NotFound, match="idle=true"):
        await Profiler().profile(ProfileOptions())


async def test_a_program_that_may_not_look_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(py_spy, "find_program", lambda: "/bin/false")
    with pytest.raises(ProfilerUnavailable, match="needs the right to trace"):
        await Profiler().profile(ProfileOptions())
