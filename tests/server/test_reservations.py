"""A request reserves its place in the queue before it fetches images, and releases it however it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from fovea import Engine
from fovea.core.errors import InvalidRequest, Overloaded
from fovea.core.types import Delta, GenerationRequest, StageTimings, Usage
from fovea.media.limits import MediaLimits
from fovea.server.app import create_app
from fovea.server.clients import Client, Limits, Places
from fovea.server.settings import ServerSettings
from tests.server.conftest import Web
from tests.server.scripted import Script
from tests.server.support import (
    Json,
    Server,
    chat,
    data_url,
    frozen,
    image,
    picture,
    request_of,
    running,
    until,
    user,
)

CHAT = "/v1/chat/completions"
PLACES = 2


class CountingEngine(Script):
    """An engine with room for PLACES choices."""

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if choices + reserved > PLACES:
            raise Overloaded(f"{reserved} are on their way", retry_after=1.0)


def test_places_are_reserved_until_they_are_handed_over_or_the_request_ends() -> None:
    app = create_app(CountingEngine())
    places = app.state.places
    (first, _), (second, _) = request_of(app), request_of(app)
    first.reserve(2)
    assert places.reserved == 2
    with pytest.raises(Overloaded):
        second.reserve(1)
    first.hand_over(1)
    assert places.reserved == 1
    second.reserve(1)
    assert places.reserved == 2
    first.hand_over(5)
    assert places.reserved == 1
    asyncio.run(second.finish())
    asyncio.run(first.finish())
    assert places.reserved == 0
    assert first.caller.client.places == 2, "until its generations end"


async def test_failed_request_releases_its_places() -> None:
    app = create_app(CountingEngine())
    request, _ = request_of(app)

    async def answer() -> None:
        request.reserve(2)
        raise ZeroDivisionError

    await request.run(answer)
    assert (app.state.places.reserved, request.caller.client.places) == (0, 0)


@pytest.fixture(scope="module")
def narrow(checkpoint: Path, files: Path) -> Iterator[Server]:
    settings = ServerSettings(media=MediaLimits(allow_private_hosts=True))
    with (
        Engine.from_pretrained(
            str(checkpoint), dtype="float32", threads=1, kv_blocks=20, max_running=1, max_queue=PLACES - 1
        ) as engine,
        running(engine, settings, files) as server,
    ):
        yield server


def reserved(server: Server) -> int:
    return int(server.app.state.places.reserved)


def wait_until_idle(server: Server) -> None:
    """Wait until no request holds a place, neither in the server nor in the engine."""
    until(lambda: reserved(server) == 0)

    def all_free() -> bool:
        with contextlib.suppress(Overloaded):
            server.engine.check_room(PLACES)
            return True
        return False

    until(all_free)


def test_requests_that_fetch_images_are_counted(narrow: Server, web: Web) -> None:
    slow = chat(user(image(f"{web.url}/slow"), "what is it?"))
    upload = {"url": f"{web.url}/slow"}
    with ThreadPoolExecutor(2) as pool:
        running_requests = [
            pool.submit(narrow.post, CHAT, slow),
            pool.submit(narrow.post, "/v1/images", upload),
        ]
        until(lambda: reserved(narrow) == PLACES)
        for path, body in ((CHAT, slow), ("/v1/completions", {"prompt": "a"}), ("/v1/images", upload)):
            refused = narrow.post(path, body)
            assert refused.status_code == 429, refused.text
            assert "2 choices are running or waiting; at most 2 may" in refused.text
        stored = narrow.post("/v1/images", {"url": data_url(picture(seed=700)), "encode": False})
        assert stored.status_code == 429, "an upload that is only decoded takes a place, too"
        web.released.set()
        assert [future.result().status_code for future in running_requests] == [200, 200]
    wait_until_idle(narrow)


def disconnect(server: Server, path: str, body: Json) -> None:
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(base_url=server.url, timeout=0.3) as client,
        client.stream("POST", path, json=body) as answer,
    ):
        answer.read()


def while_fetching(server: Server, web: Web) -> None:
    disconnect(server, CHAT, chat(user(image(f"{web.url}/slow"))))


def while_an_upload_fetches(server: Server, web: Web) -> None:
    disconnect(server, "/v1/images", {"url": f"{web.url}/slow"})


def before_the_first_token(server: Server, web: Web) -> None:
    with frozen(server.engine):
        disconnect(server, CHAT, chat(user("hello"), stream=True))


def before_a_complete_answer(server: Server, web: Web) -> None:
    with frozen(server.engine):
        disconnect(server, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4})


def amid_a_stream(server: Server, web: Web) -> None:
    body = chat(stream=True, max_tokens=200)
    with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
        next(answer.iter_lines())


def answers(server: Server, path: str, body: Json, status: int) -> None:
    assert server.post(path, body).status_code == status


ENDS: dict[str, Callable[[Server, Web], None]] = {
    "answered": lambda s, w: answers(s, CHAT, chat(user(image(f"{w.url}/a"), "hi"), n=2), 200),
    "streamed": lambda s, w: answers(s, CHAT, chat(user("hi"), stream=True), 200),
    "completed": lambda s, w: answers(s, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, 200),
    "no image": lambda s, w: answers(s, CHAT, chat(user(image("data:image/png;base64,AAAA"))), 400),
    "too long": lambda s, w: answers(s, CHAT, chat(max_tokens=100_000), 400),
    "two prompts in a stream": lambda s, w: answers(
        s, "/v1/completions", {"prompt": ["a", "b"], "stream": True}, 400
    ),
    "timeout while fetching": lambda s, w: answers(
        s, CHAT, chat(user(image(f"{w.url}/slow")), timeout=0.2), 408
    ),
    "upload": lambda s, w: answers(s, "/v1/images", {"url": f"{w.url}/a"}, 200),
    "bad upload": lambda s, w: answers(s, "/v1/images", {"url": "data:image/png;base64,AAAA"}, 400),
    "left while fetching": while_fetching,
    "left while an upload fetched": while_an_upload_fetches,
    "left before the first token": before_the_first_token,
    "left before a complete answer": before_a_complete_answer,
    "left amid a stream": amid_a_stream,
}


@pytest.mark.parametrize("end", ENDS)
def test_place_is_free_again_however_a_request_ends(narrow: Server, web: Web, end: str) -> None:
    ENDS[end](narrow, web)
    web.released.set()
    wait_until_idle(narrow)


class RecordingEngine(Script):
    """An engine that records the timeout of each request."""

    def __init__(self) -> None:
        super().__init__(Delta(0, "", (), finish_reason="length", usage=Usage(1, 0), timings=StageTimings()))
        self.timeouts: list[float | None] = []

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.timeouts.append(request.timeout)
        return super().stream(request)


async def test_timeout_covers_loading_and_the_engine_together() -> None:
    """In the past, an upload had the full timeout for loading, and again for encoding."""
    script = RecordingEngine()
    app = create_app(script)
    await app.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        url = data_url(picture(640, 480))
        for timeout in (30.0, None):
            upload = {"url": url} if timeout is None else {"url": url, "timeout": timeout}
            assert (await client.post("/v1/images", json=upload)).status_code == 200
            body = chat(user(image(url)), timeout=timeout)
            assert (await client.post(CHAT, json=body)).status_code == 200
    await app.stop()  # the processes that decode images end, too
    *limited, first, second = script.timeouts
    assert [0 < seconds < 30 for seconds in limited if seconds is not None] == [True, True]
    assert [599 < seconds <= 600 for seconds in (first, second) if seconds is not None] == [True, True], (
        "in the past, a request without a timeout of its own had none"
    )


class BusyEngine(Script):
    """An engine that computes 8 answers at a time.

    full: whether it has no room for more choices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.info = replace(self.info, max_running=8)

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if self.full:
            raise Overloaded("no room", retry_after=1.0)


def test_a_client_leaves_half_of_the_running_answers_to_the_others() -> None:
    """One client held all 64 answers that are computed at a time with streams that it did not read, and
    every other client waited for their ends.
    """
    places = Places(BusyEngine(), is_fair=lambda: True)
    greedy, calm = Client("greedy"), Client("calm")
    for _ in range(4):
        places.take(greedy, 1)
    with pytest.raises(Overloaded, match="greedy. has 4 choices .* accepted: 4, half of"):
        places.take(greedy, 1)
    places.take(calm, 3)
    alone = Places(BusyEngine())
    alone.take(Client("alone"), 8)
    alone.take(Client("alone"), 8)


def test_a_single_request_of_a_client_leaves_half_of_the_running_answers_too() -> None:
    """One completion with 64 prompts and n=5 took all 320 places of a server with two keys: the first request
    of a client was accepted whatever its size, and every other client got 429 until its end.

    Now such a request is refused for good, also while the server is full: to repeat it would not help.
    """
    engine = BusyEngine()
    places, greedy = Places(engine, is_fair=lambda: True), Client("greedy")
    with pytest.raises(InvalidRequest, match="5 choices are .* key 'greedy' may have at most 4 in") as error:
        places.take(greedy, 5)
    assert (error.value.param, error.value.code) == ("n", "key_limit_exceeded")
    assert "max_places_per_key" in error.value.message
    places.take(greedy, 4)
    assert places.reserved == 4
    places.give_up(greedy, 4)
    assert (places.reserved, greedy.places) == (0, 0)
    engine.full = True
    with pytest.raises(InvalidRequest):
        places.take(greedy, 5)
    with pytest.raises(Overloaded):
        places.take(greedy, 4)
    engine.full = False
    engine.info = replace(engine.info, max_running=1)
    places.take(greedy, 1)  # one choice is accepted however few answers are computed at a time
    places.give_up(greedy, 1)
    with pytest.raises(InvalidRequest, match="at most 1 in flight"):
        places.take(greedy, 2)


def test_a_limit_of_its_own_lets_a_client_have_more_than_its_share() -> None:
    places = Places(BusyEngine(), is_fair=lambda: True)
    places.take(Client("large", Limits(places=8)), 8)
    assert places.reserved == 8
