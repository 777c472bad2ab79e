"""Several engines as one, with engines that compute nothing: which one a request gets, sums, and deaths."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from fovea.core.errors import EngineError, InvalidRequest, Overloaded, Unavailable
from fovea.core.media import Image
from fovea.core.protocols import CacheStage, EngineStatus
from fovea.core.types import (
    ChatPrompt,
    Delta,
    GenerationRequest,
    ImagePart,
    Message,
    ModelInfo,
    Prompt,
    Rendered,
    TextPart,
    TextPrompt,
    TokenPrompt,
)
from fovea.engine.process import fleet as module
from fovea.engine.process.fleet import LARGEST, SMALLEST, EngineFleet, combine, key_of
from fovea.observe.table import COUNTERS, GAUGES

WAIT_S = 10.0
INFO = ModelInfo("fake", "none", 0, "bfloat16", "cpu", 100, 100, 0, max_running=4)


class Fake:
    """An engine whose answers wait for `go`, and which can die."""

    def __init__(self, room: int = 1000) -> None:
        self.info = INFO
        self.status: EngineStatus = "ready"
        self.room = room
        self.seen: list[str] = []
        self.rendered: list[str] = []
        self.running = 0
        self.go = asyncio.Event()
        self.figures: dict[str, float] = {}
        self.cleared: list[tuple[str, ...]] = []
        self.closed = 0

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if choices > self.room:
            raise InvalidRequest("too many choices")
        if self.running + reserved + choices > self.room:
            raise Overloaded("full", retry_after=1.0, scope="engine")

    async def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        self.check_room(request.sampling.n)
        self.seen.append(request.id)
        self.running += 1
        try:
            yield Delta(0, "a")
            await self.go.wait()
            if self.status == "stopped":
                raise EngineError("the engine stopped unexpectedly")
            yield Delta(0, "b", finish_reason="stop")
        finally:
            self.running -= 1

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return [1]

    async def render(self, request: GenerationRequest, /) -> Rendered:
        self.rendered.append(request.id)
        return Rendered([1], (), 1)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return "x"

    def stats(self) -> Mapping[str, float]:
        return self.figures

    def clear_caches(self, *stages: CacheStage) -> None:
        if self.status != "ready":
            raise EngineError("died")
        self.cleared.append(stages)

    async def close(self, drain_s: float = 0.0) -> None:
        self.status = "stopped"
        self.closed += 1

    def die(self) -> None:
        self.status = "stopped"
        self.go.set()


def image(number: int) -> Image:
    return Image(f"{number:064x}", 1, 1, b"abc")


def about(number: int, text: str = "what?", id: str = "", **options: Any) -> GenerationRequest:
    parts = ImagePart(image(number)), TextPart(text)
    return GenerationRequest(id or f"{number} {text}", ChatPrompt((Message("user", parts),)), **options)


def asking(text: str, **options: Any) -> GenerationRequest:
    return GenerationRequest(text, ChatPrompt((Message("user", (TextPart(text),)),)), **options)


async def read(fleet: EngineFleet, request: GenerationRequest) -> str:
    return "".join([delta.text async for delta in fleet.stream(request)])


def fakes(count: int = 2, **options: Any) -> tuple[list[Fake], EngineFleet]:
    engines = [Fake(**options) for _ in range(count)]
    for engine in engines:
        engine.go.set()
    return engines, EngineFleet([lambda engine=engine: engine for engine in engines])  # type: ignore[misc]


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_requests_about_one_image_stay_at_one_engine() -> None:
    engines, fleet = fakes(4)
    for turn in range(3):
        for number in range(40):
            assert await read(fleet, about(number, f"turn {turn}")) == "ab"
    for engine in engines:
        counts = Counter(name.split()[0] for name in engine.seen)
        assert set(counts.values()) == {3}
        assert len(counts) >= 4
    await fleet.close()


async def test_a_render_is_made_by_the_engine_that_gets_the_request() -> None:
    """Its load may decide about the detail of images. The render itself is no work that counts."""
    engines, fleet = fakes(4)
    for number in range(20):
        await fleet.render(about(number))
    assert all(peer.pending == 0 for peer in fleet._table.peers)
    for number in range(20):
        await read(fleet, about(number))
    for engine in engines:
        assert engine.rendered == engine.seen
        assert engine.rendered
    await fleet.close()


async def test_later_turns_of_a_text_stay_too() -> None:
    engines, fleet = fakes(4)
    system = Message("system", (TextPart("You are kind."),))
    for number in range(20):
        messages = [system, Message("user", (TextPart(f"question {number}"),))]
        for _ in range(3):
            await read(fleet, GenerationRequest(str(number), ChatPrompt(tuple(messages))))
            messages += [Message("assistant", (TextPart("answer"),)), Message("user", (TextPart("more"),))]
    assert all(set(Counter(engine.seen).values()) == {3} for engine in engines)
    await fleet.close()


def test_keys() -> None:
    assert key_of(about(1, "a")) == key_of(about(1, "b"))
    assert key_of(about(1, "a")) != key_of(about(1, "a", cache_salt="s"))
    assert key_of(about(1))[1]
    assert not key_of(asking("a"))[1]
    texts = TextPrompt("a" * 5000 + "b"), TextPrompt("a" * 5000 + "c")
    assert len({key_of(GenerationRequest("1", prompt)) for prompt in texts}) == 1
    assert key_of(GenerationRequest("1", TextPrompt("<image>", (ImagePart(image(1)),)))) == key_of(about(1))
    assert key_of(GenerationRequest("1", TokenPrompt((1, 2)))) != key_of(
        GenerationRequest("1", TokenPrompt((1, 3)))
    )


async def test_concurrent_requests_are_balanced() -> None:
    engines, fleet = fakes(2)
    for engine in engines:
        engine.go.clear()
    tasks = [asyncio.create_task(read(fleet, asking(f"question {number}"))) for number in range(64)]
    await until(lambda: sum(engine.running for engine in engines) == 64)
    assert max(engine.running for engine in engines) <= 41  # 1.25 times the average, and one
    for engine in engines:
        engine.go.set()
    assert await asyncio.gather(*tasks) == ["ab"] * 64
    assert all(peer.pending == 0 for peer in fleet._table.peers)
    await fleet.close()


async def test_an_image_that_everybody_asks_about_is_answered_by_several() -> None:
    engines, fleet = fakes(2)
    for engine in engines:
        engine.go.clear()
    tasks = [asyncio.create_task(read(fleet, about(1, id=str(number)))) for number in range(32)]
    await until(lambda: sum(engine.running for engine in engines) == 32)
    assert min(engine.running for engine in engines) >= 10
    for engine in engines:
        engine.go.set()
    await asyncio.gather(*tasks)
    await fleet.close()


async def test_two_requests_about_an_image_stay_together() -> None:
    engines, fleet = fakes(2)
    for engine in engines:
        engine.go.clear()
    tasks = [asyncio.create_task(read(fleet, about(1, id=str(number)))) for number in range(2)]
    await until(lambda: sum(engine.running for engine in engines) == 2)
    assert sorted(engine.running for engine in engines) == [0, 2]
    for engine in engines:
        engine.go.set()
    await asyncio.gather(*tasks)
    await fleet.close()


async def test_full_engines_are_passed_over() -> None:
    engines, fleet = fakes(2, room=2)
    for engine in engines:
        engine.go.clear()
    tasks = []
    for number in range(4):
        fleet.check_room(1)
        tasks.append(asyncio.create_task(read(fleet, about(1, id=str(number)))))
        await until(lambda number=number: sum(engine.running for engine in engines) == number + 1)  # type: ignore[misc]
    assert [engine.running for engine in engines] == [2, 2]
    with pytest.raises(Overloaded):
        fleet.check_room(1)
    with pytest.raises(Overloaded):
        await read(fleet, about(2))
    with pytest.raises(InvalidRequest):
        fleet.check_room(3)
    for engine in engines:
        engine.go.set()
    await asyncio.gather(*tasks)
    fleet.check_room(2, reserved=0)
    with pytest.raises(Overloaded):
        fleet.check_room(1, reserved=4)
    assert fleet.info.max_running == 8
    await fleet.close()


def test_figures_are_sums_unless_they_do_not_add_up() -> None:
    assert GAUGES.keys() >= LARGEST
    assert GAUGES.keys() >= SMALLEST
    names = [*GAUGES, *COUNTERS, "step_tokens:8"]
    one, two = ({name: float(value) for name in names} for value in (2, 3))
    total = combine([one, two])
    assert {total[name] for name in LARGEST} == {3}
    assert {total[name] for name in SMALLEST} == {2}
    assert {total[name] for name in names if name not in LARGEST | SMALLEST} == {5}
    assert combine([]) == {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)


@pytest.mark.usefixtures("quick")
async def test_an_engine_that_dies_takes_only_its_requests_with_it(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Fake] = []

    def load() -> Fake:
        engine = Fake()
        engine.figures = {"generation_tokens": 5.0, "requests_running": 1.0}
        made.append(engine)
        return engine

    may_load = threading.Event()
    may_load.set()

    def load_later() -> Fake:
        assert may_load.wait(WAIT_S)
        return load()

    fleet = EngineFleet([load, load_later], pause_s=0.01)
    number = 0
    while await _owner(fleet, number) != 1:
        number += 1
    victim, other = fleet.engines[1], fleet.engines[0]
    assert isinstance(victim, Fake)
    assert isinstance(other, Fake)
    lost = asyncio.create_task(read(fleet, about(number)))
    await until(lambda: victim.running == 1)
    may_load.clear()
    victim.die()
    with pytest.raises(EngineError, match="stopped unexpectedly"):
        await lost
    assert fleet.status == "ready"
    fleet.check_room(1)
    other.go.set()
    assert await read(fleet, about(number)) == "ab"  # by the other one
    fleet.clear_caches("kv")
    assert other.cleared == [("kv",)]
    assert await fleet.tokenize(TextPrompt("a")) == [1]
    await until(lambda: fleet.engines[1] is None)
    await until(lambda: victim.closed == 1)
    assert fleet.stats() == {"generation_tokens": 10.0, "requests_running": 1.0}  # counters do not fall
    may_load.set()
    await until(lambda: isinstance(fleet.engines[1], Fake))
    again = fleet.engines[1]
    assert isinstance(again, Fake)
    assert again is not victim
    assert fleet.stats() == {"generation_tokens": 15.0, "requests_running": 2.0}
    again.go.set()
    await read(fleet, about(number))
    assert len(again.seen) == 1  # the image is back at its place
    assert "engine 2 of 2 has stopped" in caplog.text
    await fleet.close()
    assert fleet.status == "stopped"


async def _owner(fleet: EngineFleet, number: int) -> int:
    """The engine that gets a request about an image: its place."""
    stream = fleet.stream(about(number, id="probe"))
    await anext(stream)
    owner = next(place for place, engine in enumerate(fleet.engines) if engine.running)  # type: ignore[union-attr]
    await stream.aclose()  # type: ignore[attr-defined]
    return owner


@pytest.mark.usefixtures("quick")
async def test_without_any_engine_the_server_waits_for_one() -> None:
    may_load = threading.Event()
    may_load.set()

    def load() -> Fake:
        assert may_load.wait(WAIT_S)
        return Fake()

    fleet = EngineFleet([load, load], pause_s=0.01)
    may_load.clear()
    for engine in fleet.engines:
        engine.die()  # type: ignore[union-attr]
    await until(lambda: fleet.engines == (None, None))
    assert fleet.status == "loading"
    with pytest.raises(Unavailable, match="start again"):
        await read(fleet, about(1))
    with pytest.raises(Unavailable):
        fleet.check_room(1)
    may_load.set()
    await until(lambda: fleet.status == "ready")
    await fleet.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await read(fleet, about(1))


@pytest.mark.usefixtures("quick")
async def test_starts_that_fail_are_repeated_a_few_times_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTS_S", 1000.0)
    starts: list[float] = []

    def load() -> Fake:
        starts.append(time.monotonic())
        if len(starts) > 1:
            raise EngineError("no memory")
        return Fake()

    engines = [Fake()]
    fleet = EngineFleet([lambda: engines[0], load], pause_s=0.01)
    fleet.engines[1].die()  # type: ignore[union-attr]
    await until(lambda: len(starts) == 4)
    await asyncio.sleep(0.1)
    assert len(starts) == 4
    assert fleet.status == "ready"
    await fleet.close()


@pytest.mark.usefixtures("quick")
async def test_if_the_last_engine_cannot_start_the_fleet_has_stopped() -> None:
    engines = [Fake()]

    def load() -> Fake:
        if not engines:
            raise EngineError("no memory")
        return engines.pop()

    fleet = EngineFleet([load], pause_s=0.01)
    fleet.engines[0].die()  # type: ignore[union-attr]
    await until(lambda: fleet.status == "stopped")
    await fleet.close()


def test_an_error_of_loading_closes_the_others() -> None:
    good = Fake()

    def bad() -> Fake:
        raise EngineError("no such model")

    with pytest.raises(EngineError, match="no such model"):
        EngineFleet([lambda: good, bad])
    assert good.closed == 1


@pytest.mark.usefixtures("quick")
async def test_engines_that_die_at_random_under_load_are_replaced() -> None:
    """However engines die, every request ends, and nothing stays counted."""
    rng = random.Random(3)

    def load() -> Fake:
        engine = Fake()
        engine.go.set()
        return engine

    fleet = EngineFleet([load] * 3, pause_s=0.0)
    results: list[str] = []

    async def client(number: int) -> None:
        for turn in range(20):
            try:
                results.append(await read(fleet, about(number, f"{turn}")))
            except (EngineError, Unavailable):
                results.append("failed")
            await asyncio.sleep(0.001)

    async def killer() -> None:
        for _ in range(3):
            await asyncio.sleep(0.02)
            engine = rng.choice(fleet.engines)
            if isinstance(engine, Fake):
                engine.die()

    await asyncio.gather(killer(), *(client(number) for number in range(8)))
    assert len(results) == 160
    assert results.count("ab") > 100
    await until(lambda: all(isinstance(engine, Fake) for engine in fleet.engines))
    assert all(peer.pending == 0 for peer in fleet._table.peers)
    await fleet.close()
