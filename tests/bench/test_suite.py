"""The requests that each workload sends, as the server receives them."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from fovea.bench.context import WorkloadContext
from fovea.bench.measure import Failure, Round, Sample
from fovea.bench.run import PlannedWorkload, plan, play
from fovea.bench.settings import FIXED, Traffic
from fovea.bench.sla import DEFAULT_SLA
from fovea.bench.workloads import SUITE, stall_round, stall_values
from tests.bench.support import SMALL, Json, Scripted, connected, sample, workload_context

CROWD = SMALL.concurrency


class SilentObserver:
    """A progress observer that does nothing."""

    def begin(self, name: str, total: int) -> None:
        pass

    def advance(self, sample: Sample) -> None:
        pass


async def play_round(name: str, script: Scripted) -> Round:
    async with workload_context(script) as context:
        return await SUITE[name].play(context)


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


def test_suite_has_every_fixed_workload() -> None:
    assert tuple(SUITE) == FIXED


@pytest.mark.parametrize(
    ("name", "requests", "samples", "different_pictures"),
    [
        ("cold", 1, 1, 1),
        ("images", CROWD, CROWD, CROWD),
        ("questions", CROWD, CROWD, 1),
        ("followup", 2, 1, 1),
        ("known", 2, 1, 1),
        ("text", CROWD, CROWD, 0),
    ],
)
async def test_requests_of_each_workload(
    name: str, requests: int, samples: int, different_pictures: int
) -> None:
    script = Scripted()
    result = await play_round(name, script)
    assert len(script.questions) == requests == (SUITE[name].requests or CROWD)
    assert len(result.samples) == samples
    assert all(sample.succeeded and sample.output_tokens == SMALL.output_tokens for sample in result.samples)
    assert len({url for body in script.questions for url in pictures(body)}) == different_pictures
    assert len({texts(body) for body in script.questions}) == requests, "no text is sent twice"


async def test_followup_contains_the_first_answer() -> None:
    script = Scripted()
    await play_round("followup", script)
    first, second = script.questions
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1]["content"] == " 0 1 2 3"


async def test_known_puts_new_text_before_the_image() -> None:
    script = Scripted()
    await play_round("known", script)
    first, second = ([part["type"] for part in body["messages"][0]["content"]] for body in script.questions)
    assert (first, second) == (["image_url", "text"], ["text", "image_url"])


@pytest.mark.parametrize("name", ["followup", "known", "stall"])
async def test_round_reports_a_preparation_that_failed(name: str) -> None:
    script = Scripted(statuses=[200, 500])
    (only,) = (await play_round(name, script)).samples
    assert only.failure is not None
    assert only.failure.kind == "http 500"


LEFT = Failure("left", "")
BROKEN = Failure("broken stream", "")


@pytest.mark.parametrize(
    ("stream", "image", "kind"),
    [
        (sample(0.0, 0.1, 0.4, failure=LEFT), sample(0.3, due_at=0.2), None),
        (sample(0.0, 0.1, 0.4), sample(0.3, due_at=0.2), "short stream"),
        (sample(0.0, 0.1, failure=BROKEN), sample(0.3, due_at=0.2), "broken stream"),
        (sample(0.0, 0.1, 0.4, failure=LEFT), sample(failure=Failure("http 500", "")), "http 500"),
    ],
)
def test_stall_needs_a_running_stream(stream: Sample, image: Sample, kind: str | None) -> None:
    result = stall_round(stream, image)
    assert [s.failure.kind if s.failure else None for s in result.samples] == [kind]
    assert bool(result.values) is (kind is None)


def test_stall_is_the_longest_gap_that_overlaps_the_image() -> None:
    stream = sample(0.0, 0.1, 0.2, 0.3, 0.9, 1.0, 3.0)
    image = sample(0.95, due_at=0.25)
    values = stall_values(stream, image)
    assert values["stall_ms"] == pytest.approx(600), "not the two seconds after the image had its answer"
    assert values["median_gap_before_ms"] == pytest.approx(100)


def test_gap_across_the_first_token_of_the_image_counts_in_full() -> None:
    values = stall_values(sample(0.0, 0.1, 0.2, 1.2), sample(0.7, due_at=0.25))
    assert values["stall_ms"] == pytest.approx(1000)


async def test_contents_never_repeat_between_rounds_workloads_and_runs() -> None:
    """Warm-up rounds, measured rounds and runs with another nonce all have contents of their own."""
    script = Scripted()
    shape = replace(SMALL, warmup=1, repeats=2)
    workloads = plan(["cold", "images"], shape, Traffic(), None)
    async with connected(script) as client:
        for nonce in ("one", "two"):
            results = await play(client, workloads, shape, nonce, DEFAULT_SLA.good, SilentObserver())
    assert [result.summary.requests for result in results] == [2, 2 * CROWD]
    bodies = script.questions
    assert len(bodies) == 2 * 3 * (1 + CROWD)
    assert len({url for body in bodies for url in pictures(body)}) == len(bodies)
    assert len({texts(body).split('"text": "')[1].split()[0] for body in bodies}) == len(bodies)


async def test_share_of_a_core_that_the_load_generator_uses() -> None:
    async def spin(context: WorkloadContext) -> Round:
        context.client.running += 1
        start = time.process_time()
        while time.process_time() < start + 0.1:
            await asyncio.sleep(0)
        context.client.running -= 1
        return Round([sample(1.0)])

    workload = PlannedWorkload("spin", "", 1, spin, rounds=1, warm_up=spin, warmups=0)
    async with connected(Scripted()) as client:
        (result,) = await play(client, [workload], SMALL, "nonce", DEFAULT_SLA.good, SilentObserver())
    assert result.core_share > 0
    assert result.as_dict()["client_core_share"] == result.core_share


async def test_equal_nonces_give_equal_requests() -> None:
    script = Scripted()
    workloads = plan(["cold"], SMALL, Traffic(), None)
    async with connected(script) as client:
        for _ in range(2):
            await play(client, workloads, SMALL, "same", DEFAULT_SLA.good, SilentObserver())
    first, second = script.questions
    assert first == second


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (Scripted(tokens_per_event=2), "usage says 4 tokens, they came in 2 events"),
        (Scripted(usage=False), "the server sent no usage: tokens are counted by events"),
        (Scripted(usage=False, tokens_per_event=2), "1 answers ended before the requested length"),
    ],
)
async def test_notes_on_token_counts(script: Scripted, note: str) -> None:
    async with connected(script) as client:
        (result,) = await play(
            client, plan(["cold"], SMALL, Traffic(), None), SMALL, "n", DEFAULT_SLA.good, SilentObserver()
        )
    assert any(note in text for text in result.notes)


async def test_uploaded_pictures_are_referenced_by_id() -> None:
    script = Scripted()
    async with workload_context(script, images_as="sent") as context:
        await SUITE["images"].play(context)
    assert [image["encode"] for image in script.images] == [False] * CROWD
    assert {url for body in script.questions for url in pictures(body)} == {
        f"fovea-image://{number}" for number in range(1, CROWD + 1)
    }


async def test_picture_sizes_alternate() -> None:
    shape = replace(SMALL, visual_tokens=(1, 4))
    async with workload_context(Scripted(), shape) as context:
        first, second, third = [await context.picture() for _ in range(3)]
    assert len({first, second, third}) == 3
    small, large = (len(url) for url in (first, second))
    assert abs(len(third) - small) < abs(len(third) - large) or small == large
