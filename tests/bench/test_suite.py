"""What each workload asks, as the server sees it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fovea.bench.measure import Round
from fovea.bench.run import plan, play
from fovea.bench.sample import Failure, Sample
from fovea.bench.settings import FIXED, Traffic
from fovea.bench.sla import DOCUMENTED
from fovea.bench.suite import SUITE, stall_values, stalled
from tests.bench.support import SMALL, Json, Scripted, connected, sample, stage_over

CROWD = SMALL.concurrency


class Silent:
    """Nobody looks on."""

    def begin(self, name: str, total: int) -> None:
        pass

    def seen(self, sample: Sample) -> None:
        pass


async def played(name: str, script: Scripted) -> Round:
    async with stage_over(script) as stage:
        return await SUITE[name].play(stage)


def pictures(body: Json) -> list[str]:
    return [
        part["image_url"]["url"]
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def texts(body: Json) -> str:
    return json.dumps(body["messages"][-1])


def test_every_fixed_workload_is_there() -> None:
    assert tuple(SUITE) == FIXED


@pytest.mark.parametrize(
    ("name", "asked", "measured", "different_pictures"),
    [
        ("cold", 1, 1, 1),
        ("images", CROWD, CROWD, CROWD),
        ("questions", CROWD, CROWD, 1),
        ("followup", 2, 1, 1),
        ("known", 2, 1, 1),
        ("text", CROWD, CROWD, 0),
    ],
)
async def test_who_asks_about_what(name: str, asked: int, measured: int, different_pictures: int) -> None:
    script = Scripted()
    found = await played(name, script)
    assert len(script.questions) == asked == (SUITE[name].sends or CROWD)
    assert len(found.samples) == measured
    assert all(sample.whole and sample.output == SMALL.output_tokens for sample in found.samples)
    assert len({url for body in script.questions for url in pictures(body)}) == different_pictures
    assert len({texts(body) for body in script.questions}) == asked, "no text twice"


async def test_a_follow_up_holds_the_answer() -> None:
    script = Scripted()
    await played("followup", script)
    first, second = script.questions
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1]["content"] == " 0 1 2 3"


async def test_a_known_image_stands_behind_new_text() -> None:
    script = Scripted()
    await played("known", script)
    first, second = ([part["type"] for part in body["messages"][0]["content"]] for body in script.questions)
    assert (first, second) == (["image_url", "text"], ["text", "image_url"])


@pytest.mark.parametrize("name", ["followup", "known", "stall"])
async def test_a_preparation_that_fails_is_what_is_told(name: str) -> None:
    script = Scripted(statuses=[200, 500])
    (only,) = (await played(name, script)).samples
    assert only.failure is not None
    assert only.failure.kind == "http 500"


LEFT = Failure("left", "")
BROKEN = Failure("broken stream", "")


@pytest.mark.parametrize(
    ("stream", "image", "told"),
    [
        (sample(0.0, 0.1, 0.4, failure=LEFT), sample(0.3, scheduled=0.2), None),
        (sample(0.0, 0.1, 0.4), sample(0.3, scheduled=0.2), "short stream"),
        (sample(0.0, 0.1, failure=BROKEN), sample(0.3, scheduled=0.2), "broken stream"),
        (sample(0.0, 0.1, 0.4, failure=LEFT), sample(failure=Failure("http 500", "")), "http 500"),
    ],
)
def test_a_stall_needs_a_stream_that_goes_on(stream: Sample, image: Sample, told: str | None) -> None:
    found = stalled(stream, image)
    assert [s.failure.kind if s.failure else None for s in found.samples] == [told]
    assert bool(found.values) is (told is None)


def test_the_stall_is_the_longest_gap_that_the_image_touches() -> None:
    stream = sample(0.0, 0.1, 0.2, 0.3, 0.9, 1.0, 3.0)
    image = sample(0.95, scheduled=0.25)
    found = stall_values(stream, image)
    assert found["stall_ms"] == pytest.approx(600), "not the two seconds after the image had its answer"
    assert found["median_gap_before_ms"] == pytest.approx(100)


def test_a_gap_that_goes_on_when_the_image_is_answered_counts_whole() -> None:
    found = stall_values(sample(0.0, 0.1, 0.2, 1.2), sample(0.7, scheduled=0.25))
    assert found["stall_ms"] == pytest.approx(1000)


async def test_no_workload_finds_what_another_left_in_a_cache() -> None:
    """Nor does a measured round what a warm-up left, nor another run with another nonce."""
    script = Scripted()
    shape = replace(SMALL, warmup=1, repeats=2)
    parts = plan(["cold", "images"], shape, Traffic(), None)
    async with connected(script) as client:
        for nonce in ("one", "two"):
            results = await play(client, parts, shape, nonce, DOCUMENTED.good, Silent())
    assert [result.summary.requests for result in results] == [2, 2 * CROWD]
    asked = script.questions
    assert len(asked) == 2 * 3 * (1 + CROWD)
    assert len({url for body in asked for url in pictures(body)}) == len(asked)
    assert len({texts(body).split('"text": "')[1].split()[0] for body in asked}) == len(asked)


async def test_the_same_nonce_asks_the_same() -> None:
    script = Scripted()
    parts = plan(["cold"], SMALL, Traffic(), None)
    async with connected(script) as client:
        for _ in range(2):
            await play(client, parts, SMALL, "same", DOCUMENTED.good, Silent())
    first, second = script.questions
    assert first == second


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (Scripted(tokens_per_event=2), "usage says 4 tokens, they came in 2 events"),
        (Scripted(usage=False), "the server sent no usage: tokens are counted by events"),
        (Scripted(usage=False, tokens_per_event=2), "1 answers ended before the length that was asked for"),
    ],
)
async def test_counts_that_differ_are_told(script: Scripted, note: str) -> None:
    async with connected(script) as client:
        (result,) = await play(
            client, plan(["cold"], SMALL, Traffic(), None), SMALL, "n", DOCUMENTED.good, Silent()
        )
    assert any(note in said for said in result.notes)


async def test_pictures_sent_ahead_are_named() -> None:
    script = Scripted()
    async with stage_over(script, images_as="sent") as stage:
        await SUITE["images"].play(stage)
    assert [image["encode"] for image in script.images] == [False] * CROWD
    assert {url for body in script.questions for url in pictures(body)} == {
        f"fovea-image://{number}" for number in range(1, CROWD + 1)
    }


async def test_sizes_are_taken_in_turn() -> None:
    shape = replace(SMALL, visual_tokens=(1, 4))
    async with stage_over(Scripted(), shape) as stage:
        first, second, third = [await stage.picture() for _ in range(3)]
    assert len({first, second, third}) == 3
    small, large = (len(url) for url in (first, second))
    assert abs(len(third) - small) < abs(len(third) - large) or small == large
