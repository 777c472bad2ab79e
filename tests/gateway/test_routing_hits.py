"""Requests about known images reach the backend that knows them, also under load and after a failure.

A real gateway runs in front of four servers that answer at once. Only counts are asserted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import httpx
import pytest
from aiohttp import web
from PIL import Image

from fovea.core.media import content_identity
from fovea.gateway.backends.backend import Backend, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.backends.route import Router
from fovea.gateway.backends.watch import LEAST_SAMPLES, eject_outliers
from fovea.gateway.build import Setup, create_gateway
from fovea.gateway.config import BackendConfig, ModelConfig, Tables
from fovea.gateway.experiments.config import ExperimentConfig
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.inspect.images import KnownImages
from fovea.gateway.settings import GatewaySettings, ResilienceSettings, RouteSettings

IMAGES, TIMES, CONCURRENCY = 64, 4, 8
NAMES = ("engine-1", "engine-2", "engine-3", "engine-4")
MODEL = "m"
HOST = "https://1.1.1.1"
"""A public address, so that no name is resolved. Nothing is downloaded: the engines only pretend to."""
SLOW_START_S = 30.0


class Engine:
    """A server that answers every chat request. It can be killed."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def kill(self) -> None:
        """Close the port and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    async def _answer(self, request: web.Request) -> web.Response:
        url = (await request.json())["messages"][0]["content"][0]["image_url"]["url"]
        await asyncio.sleep(0.001)  # so that requests overlap
        return web.json_response(
            {
                "id": "1", "object": "chat.completion", "created": 1, "model": MODEL,
                "choices": [{"index": 0, "finish_reason": "stop",
                             "message": {"role": "assistant", "content": "a picture"}}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
            },
            headers={"x-fovea-images": IDENTITIES[url.rpartition("/")[2].partition("?")[0]]}
            if url.startswith("https:") else {},
        )  # fmt: skip


@cache
def picture(seed: int) -> str:
    """A data: URL of an image of random size and colours.

    It is not compressed, so that its bytes, and with them the order of its backends, are always the same.
    """
    noise = random.Random(seed)
    width, height = noise.randrange(32, 128), noise.randrange(32, 128)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise.randbytes(width * height * 3)).save(
        file, "PNG", compress_level=0
    )
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Identities(dict[str, str]):
    """The identities of the pictures behind URLs, by the last part of their path."""

    def __missing__(self, name: str) -> str:
        data = base64.b64decode(picture(int(name.removesuffix(".png"))).partition(",")[2])
        with Image.open(io.BytesIO(data)) as image:
            self[name] = content_identity("image/png", *image.size, data)
        return self[name]


IDENTITIES = Identities()


@dataclass
class Running:
    """A gateway and its engines. client: sends requests to the gateway."""

    client: httpx.AsyncClient
    engines: dict[str, Engine]

    async def ask(self, image: int, url: str = "") -> tuple[str, str]:
        """Ask about an image, or the one behind a URL. Returns the backend, and the reason for it."""
        parts = [{"type": "image_url", "image_url": {"url": url or picture(image)}}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 8}
        answer = await self.client.post(
            "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200, answer.text
        return answer.headers["x-fovea-backend"], answer.headers["x-fovea-route"]

    async def ask_all(self, images: Sequence[int], kill: str = "") -> list[tuple[int, str]]:
        """Ask about images, CONCURRENCY at a time. kill: an engine that is killed on the way.

        Returns (image, backend) in the order of sending.
        """
        waiting = enumerate(images)
        found: dict[int, tuple[int, str]] = {}

        async def work() -> None:
            for number, image in waiting:
                if kill and number == len(images) // 4:
                    await self.engines[kill].kill()
                found[number] = (image, (await self.ask(image))[0])

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return [found[number] for number in range(len(images))]


@contextlib.asynccontextmanager
async def gateway(policy: str = "cache-affine") -> AsyncIterator[Running]:
    """A gateway with four engines, without a cache of answers."""
    engines = {name: Engine() for name in NAMES}
    for engine in engines.values():
        await engine.start()
    settings = GatewaySettings()
    settings = replace(
        settings,
        route=replace(settings.route, policy=policy),
        response_cache=replace(settings.response_cache, response_cache_mib=0),
    )
    backends = tuple(BackendConfig(engine.url, name, models=(MODEL,)) for name, engine in engines.items())
    setup = Setup(settings, Tables(backends), ExperimentConfig(), lambda name: None)
    app = create_gateway(setup, time.monotonic)
    transport = httpx.ASGITransport(app)
    await app.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield Running(client, engines)
    finally:
        await app.stop()
        for engine in engines.values():
            await engine.kill()


async def test_an_image_behind_a_url_stays_where_it_is_known() -> None:
    """Learning its identity moves it nowhere. Its other URLs, and the picture itself, follow it."""
    numbers = range(16)
    async with gateway() as running:
        asked = [
            (n, (await running.ask(n, f"{HOST}/{n}.png?sig={turn}"))[0]) for turn in range(3) for n in numbers
        ]
        home = dict(asked)
        other_url = {n: (await running.ask(n, f"{HOST}/copies/{n}.png"))[0] for n in numbers}
        known = {n: (await running.ask(n, f"{HOST}/copies/{n}.png"))[0] for n in numbers}
        itself = {n: (await running.ask(n))[0] for n in numbers}
    assert warm_share(asked) == 1.0
    assert other_url != home  # nothing is known about a URL before its first answer
    assert known == home
    assert itself == home


def shuffled(times: int) -> list[int]:
    order = [image for image in range(IMAGES) for _ in range(times)]
    random.Random(1).shuffle(order)
    return order


def warm_share(asked: Sequence[tuple[int, str]]) -> float:
    """The part of the requests about known images that went to a backend that knows the image."""
    seen: dict[int, set[str]] = {}
    hits = known = 0
    for image, backend in asked:
        backends = seen.setdefault(image, set())
        known += bool(backends)
        hits += backend in backends
        backends.add(backend)
    return hits / known


async def test_repeated_images_reach_the_backend_that_knows_them() -> None:
    async with gateway() as running:
        asked = await running.ask_all(shuffled(TIMES))
    assert warm_share(asked) >= 0.95
    used = {backend for _, backend in asked}
    assert used == set(NAMES)  # it is not one backend that gets them all


async def test_without_affinity_they_do_not() -> None:
    """The other test measures something: round robin does not pass it."""
    async with gateway("round-robin") as running:
        asked = await running.ask_all(shuffled(TIMES))
    assert warm_share(asked) < 0.7


async def test_only_the_images_of_a_killed_backend_move() -> None:
    async with gateway() as running:
        before = dict(await running.ask_all(range(IMAGES)))
        await running.ask_all(shuffled(2), kill="engine-2")  # every request is answered
        after = dict(await running.ask_all(range(IMAGES)))
    moved = {image for image in before if after[image] != before[image]}
    assert moved == {image for image in before if before[image] == "engine-2"}
    assert 0 < len(moved) <= 0.3 * IMAGES


def fleet(now: float, count: int = 4) -> Fleet:
    """Backends as a gateway has them when it begins: models are configured before backends are known."""
    made = Fleet(ResilienceSettings(slow_start_s=SLOW_START_S))
    made.configure([ModelConfig(MODEL)])
    made.update(
        [BackendConfig(f"http://host-{n}", f"engine-{n}", (MODEL,)) for n in range(1, count + 1)], now
    )
    return made


def weights(made: Fleet, now: float) -> list[float]:
    return [backend.weight(now) for backend in made]


def test_the_first_backends_have_their_full_share() -> None:
    """They are all cold. With a slow start, most images would be passed on to the next backend at first."""
    assert weights(fleet(100.0), 100.0) == [1.0] * 4


def test_a_backend_that_is_ready_a_moment_later_is_none_that_came_back() -> None:
    made = fleet(100.0)
    late = made.get("engine-2")
    assert isinstance(late, Backend)
    late.note_check(100.0, passed=False)
    late.note_check(105.0, passed=True)
    assert weights(made, 105.0) == [1.0] * 4


def test_backends_that_all_start_slowly_do_not_pass_images_on() -> None:
    """A slow start is relative: it holds back a cold backend among warm ones."""
    made, now = fleet(100.0), 200.0
    for backend in made:
        backend.come_back(now)
    router, load = Router(made, RouteSettings(), lambda: now), Load(20, 300)
    model = made.model(MODEL)
    for number in range(4 * CONCURRENCY):
        choice = router.choose(model, conversation(number % 4), load)
        assert choice is not None
        if number < CONCURRENCY:
            assert choice.reason == "session"
        choice.backend.begin(load, now, vision=False)
    assert max(backend.requests for backend in made) <= 2 * CONCURRENCY  # the bound still holds


def conversation(number: int) -> Demand:
    return Demand(Body({"model": MODEL, "session_id": f"session {number}"}, {}, 0), [])


@pytest.mark.parametrize("how", ["joins", "returns", "ready late"])
def test_a_backend_that_comes_to_warm_ones_starts_slowly(how: str) -> None:
    made = fleet(100.0)
    backend = made.get("engine-2")
    assert backend is not None
    now = 100.0 + 2 * SLOW_START_S
    if how == "joins":
        configs = [one.config for one in made]
        made.update([*configs, BackendConfig("http://host-5", "engine-5", (MODEL,))], now)
        backend = made.get("engine-5")
        assert backend is not None
    else:
        backend.note_check(100.0, passed=how == "returns")
        for _ in range(2):
            backend.note_check(now, passed=False)
        backend.note_check(now, passed=True)
    assert backend.weight(now) == pytest.approx(0.1)
    assert backend.weight(now + SLOW_START_S) == 1.0


def test_a_backend_with_cold_caches_is_no_outlier() -> None:
    """A backend that came back has to encode what others have cached. Later, the same times are too slow."""
    made, now = fleet(100.0), 200.0
    for backend in made:
        cold = backend.name == "engine-2"
        if cold:
            backend.come_back(now)
        for _ in range(2 * LEAST_SAMPLES):
            backend.note_first_byte(0.4 if cold else 0.02)
    settings = ResilienceSettings(slow_start_s=SLOW_START_S)
    assert eject_outliers(list(made), settings, now + SLOW_START_S / 2) == []
    assert eject_outliers(list(made), settings, now + SLOW_START_S) == [made.get("engine-2")]


def test_more_new_images_than_others_are_no_reason_to_be_ejected() -> None:
    """Medians jump where half of the images are new: 0.4 s for a new one, 0.02 s for a known one."""
    made = fleet(100.0)
    for backend in made:
        new = 10 if backend.name == "engine-2" else 6
        for number in range(LEAST_SAMPLES):
            backend.note_first_byte(0.4 if number < new else 0.02)
    settings = ResilienceSettings()
    assert eject_outliers(list(made), settings, 200.0) == []
    for _ in range(4 * LEAST_SAMPLES):  # now it is slow for known images, too
        for backend in made:
            backend.note_first_byte(0.4 if backend.name == "engine-2" else 0.02)
    assert eject_outliers(list(made), settings, 200.0) == [made.get("engine-2")]


@pytest.mark.parametrize("share", [1, 3])
def test_a_backend_with_more_requests_may_be_slower(share: int) -> None:
    """Few keys are spread unevenly. The backend with the most of them is busy, not broken."""
    made = fleet(100.0)
    for backend in made:
        busy = backend.name == "engine-3"
        for _ in range(2 * LEAST_SAMPLES * (share if busy else 1)):
            backend.note_first_byte(0.5 if busy else 0.1)
    ejected = eject_outliers(list(made), ResilienceSettings(), 200.0)
    assert [one.name for one in ejected] == (["engine-3"] if share == 1 else [])


def test_the_first_url_of_a_picture_is_forgotten_with_it() -> None:
    """Otherwise these names would grow without a bound, or lead to another picture."""
    known = KnownImages(2)
    known.learn(b"a", "1")
    known.learn(b"b", "1")
    assert known.first_name("1") == b"a"
    known.learn(b"a", "2")  # the URL shows another picture now
    assert (known.first_name("1"), known.first_name("2")) == (b"", b"a")
    known.learn(b"c", "3")
    known.learn(b"d", "4")
    assert [known.first_name(identity) for identity in "1234"] == [b"", b"", b"c", b"d"]
