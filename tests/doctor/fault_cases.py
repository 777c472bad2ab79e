"""Servers under load and with faults, and the verdicts that they get."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fovea.doctor.check import Status
from fovea.doctor.server import Answer
from fovea.doctor.subject import Subject
from tests.doctor.case import Case, case
from tests.doctor.fakes import (
    CARD,
    METRICS,
    FakeLauncher,
    FakeWeb,
    error,
    fake_load,
    figures,
    live,
    raising,
    reply,
    subject,
)

PASS, WARN, FAIL, NONE = Status.PASS, Status.WARN, Status.FAIL, Status.NOT_APPLICABLE
CHAT = "/v1/chat/completions"


def loaded(**changes: Any) -> partial[Subject]:
    """A subject under another load."""
    return partial(_loaded, **changes)


def _loaded(**changes: Any) -> Subject:
    # A load test keeps its results, so every subject gets a new one.
    return subject(load=fake_load(**changes))


def warming(*times: float) -> Callable[[], Subject]:
    """A subject whose questions take these seconds, by its clock."""

    def make() -> Subject:
        ticks = itertools.chain([0.0], itertools.chain.from_iterable((0.0, time) for time in times))
        now = itertools.accumulate(ticks)
        return subject(clock=lambda: next(now, 1e3))

    return make


def breaks_at(clients: int, **changes: Any) -> Callable[[int], Any]:
    """A closed loop in which requests fail from a number of clients on."""
    good = {"per_second": 5.0}
    return lambda count: figures(**(changes if count >= clients else {**good, "per_second": 5.0 * count}))


def stages(**seconds: float) -> partial[Subject]:
    """A server whose requests spent these seconds in each stage."""
    values = {f'fovea:stage_seconds_sum{{stage="{name}"}}': value for name, value in seconds.items()}
    return partial(subject, FakeWeb(metrics=values))


DEFECT = FakeWeb(routes={CHAT: error(500, "a defect", {})})
LOAD = [
    case("load/warm-up", PASS, warming(0.2, 0.1, 0.1, 0.1), "first 200 ms, later ones 100 ms"),
    case("load/warm-up", WARN, warming(4.0, 0.1, 0.1, 0.1), "first 4000 ms"),
    case("load/warm-up", FAIL, partial(subject, DEFECT), "a defect"),
    case("load/saturation", PASS, subject, "knee at 4 clients: 20.0 of at most 20.0"),
    case("load/saturation", WARN, loaded(closed=breaks_at(1000)), "--max-clients"),
    case(
        "load/saturation", FAIL,
        loaded(closed=breaks_at(4, failed=3, errors={"timeout": 3}, per_second=4.0)), "3 times timeout",
    ),
    case(
        "load/saturation", PASS,
        loaded(closed=breaks_at(4, failed=3, refused=3, errors={"http 429": 3}, per_second=4.0)), "2 clients",
    ),
    case(
        "load/saturation", FAIL,
        loaded(closed=lambda count: figures(failed=20, per_second=0.0, errors={"http 500": 20})), "no answer",
    ),
    case("load/saturation", NONE, live, "--destructive"),
    case("load/saturation", PASS, partial(live, destructive=True)),
    case("load/ramp", PASS, subject, "10%: P50/P95/P99 100/150/160 ms, 0.0% errors of 20; 50%"),
    case(
        "load/ramp", FAIL,
        loaded(arriving=lambda rate: figures(per_second=rate, failed=2, errors={"broken stream": 2})),
        "at 10% 2 of 20 fail: 2 times broken stream",
    ),
    case(
        "load/ramp", FAIL,
        loaded(arriving=lambda rate: figures(per_second=rate, missed=["end_to_end_p95_ms"])), "targets",
    ),
    case(
        "load/ramp", WARN,
        loaded(arriving=lambda rate: figures(end_to_end=(50.0 * rate, 1e3, 1e3))), "5.0 times as long",
    ),
    case(
        "load/ramp", WARN,
        loaded(
            arriving=lambda rate: (
                figures(per_second=rate, failed=4, refused=4) if rate > 15 else figures(per_second=rate)
            )
        ),
        "4 requests are refused",
    ),
    case("load/ramp", NONE, loaded(closed=lambda count: figures(failed=20, per_second=0.0))),
    case("load/bottleneck", PASS, subject, "decode 80%, encode 20%"),
    case("load/bottleneck", WARN, stages(queue=9, decode=1), "queue 90%"),
    case("load/bottleneck", NONE, stages(), "no request"),
]  # fmt: skip


def refusing(answer: Answer | Callable[[Any], Answer], **changes: Any) -> partial[Subject]:
    """A server that answers chats in another way."""
    return partial(subject, FakeWeb(routes={CHAT: answer, **changes}))


GONE = {"/health": Answer(503)}


LATER = error(429, "later", {})
OK = reply({"choices": [{"message": {"content": "yes"}}]})


def crowded(
    answer: Callable[[int], Answer | None], pool: int = 512, context: int = 8192, **routes: Answer
) -> partial[Subject]:
    """A server with a small KV pool, whose tokenizer makes three tokens of a word.

    answer: to a request by its number; None: a good one.
    """

    def route(body: Any) -> Answer | None:
        text = body["messages"][0]["content"]
        if ":" not in text:
            return reply({"usage": {"prompt_tokens": 3 * text.count("word")}})
        assert text.count("word") in (2048 // 3, 96 // 3)
        return answer(int(text.partition(":")[0])) or OK

    metrics = {**METRICS, "fovea:kv_blocks_total": pool}
    card = {**CARD, "max_model_len": context}
    return partial(subject, FakeWeb(routes={CHAT: route, **routes}, metrics=metrics, card=card))


def hosts(failing: str, status: int) -> Callable[[], Subject]:
    """A server that fetches images, and answers for one kind of broken host with another status."""

    def route(body: Any) -> Answer | None:
        content = body["messages"][0]["content"]
        if not isinstance(content, list) or not content[0]["image_url"]["url"].startswith("http"):
            return None
        fault = content[0]["image_url"]["url"].rpartition("/")[2]
        if fault == failing:
            return error(status, "an answer", {}) if status else raising("no data for 30 s")(body)
        if fault == "good":
            return reply({"choices": [{"message": {"content": "It is blue."}}]})
        return error(400, "the image cannot be used", {})

    return partial(subject, FakeWeb(routes={CHAT: route}))


def answers(text: str) -> FakeWeb:
    """A server that answers every question that is not a stream with a text."""

    def route(body: Any) -> Answer | None:
        return None if body.get("stream") else reply({"choices": [{"message": {"content": text}}]})

    return FakeWeb(routes={CHAT: route}, metrics={**METRICS, "fovea:embed_disk_corrupt_total": 1})


def started(*webs: FakeWeb, status: int | None = 0, entries: bool = True) -> Callable[[], Subject]:
    """A subject whose launcher starts these servers, one after the other, on a cache folder."""

    def make() -> Subject:
        folder = Path(tempfile.mkdtemp(prefix="fovea-test-"))
        if entries:
            (folder / "ab").mkdir()
            (folder / "ab" / "entry.safetensors").write_bytes(bytes(100))
        ticks = itertools.count(0.0, 1.0)
        return subject(launcher=FakeLauncher(folder, *webs, status=status), clock=lambda: next(ticks))

    return make


def broken_stream(body: Any) -> Answer | None:
    return Answer(200, b"data: {}\n\n") if body.get("stream") else None


ELSEWHERE = "http://192.0.2.9"
BROKEN = FakeWeb(routes={CHAT: broken_stream})
UNNOTICED = FakeWeb()
FAULTS = [
    case("faults/prompt-too-long", PASS, subject, "too large"),
    case("faults/prompt-too-long", FAIL, refusing(raising("connection reset")), "connection reset"),
    case("faults/prompt-too-long", FAIL, refusing(reply({})), "cut or accepted"),
    case("faults/prompt-too-long", FAIL, refusing(error(500, "out of memory", {})), "out of memory"),
    case("faults/prompt-too-long", FAIL, refusing(error(400, "too long", {}), **GONE), "ended the server"),
    case("faults/prompt-too-long", WARN, refusing(Answer(413)), "not told"),
    case("faults/prompt-too-long", NONE, live, "--destructive"),
    case("faults/image-too-large", PASS, subject, "too large"),
    case("faults/image-too-large", FAIL, refusing(raising("connection reset")), "connection reset"),
    case("faults/crowd", PASS, crowded(lambda number: None), "2048 tokens, for a pool of 8192: 6"),
    case("faults/crowd", PASS, crowded(lambda number: None, context=128), "16 requests of 96 tokens"),
    case("faults/crowd", PASS, crowded(lambda number: LATER if number else None), "5 refused"),
    case("faults/crowd", FAIL, crowded(lambda number: error(500, "no memory", {})), "status 500"),
    case("faults/crowd", FAIL, crowded(lambda number: LATER), "0 answered"),
    case("faults/crowd", FAIL, crowded(raising("reset")), "reset"),
    case("faults/crowd", FAIL, crowded(lambda number: None, **GONE), "gone"),
    case("faults/crowd", NONE, crowded(lambda number: None, pool=0), "not known"),
    case("faults/crowd", NONE, partial(live, destructive=True), "for long"),
    case("faults/timeout", PASS, subject, "status 408"),
    case("faults/timeout", FAIL, refusing(reply({})), "given up"),
    case("faults/timeout", FAIL, refusing(error(408, "late", {}), **GONE), "gone"),
    case("faults/image-hosts", PASS, hosts("none", 0), "9 of 9 refused"),
    case("faults/image-hosts", FAIL, hosts("bomb", 500), "bomb: status 500"),
    case("faults/image-hosts", FAIL, hosts("hang", 0), "hang: no data for 30 s"),
    case("faults/image-hosts", FAIL, hosts("good", 400), "a good host"),
    case("faults/image-hosts", NONE, subject, "as it should"),
    case("faults/image-hosts", NONE, partial(live, url=ELSEWHERE, destructive=True), "another machine"),
    case("faults/kill-and-restart", PASS, started(answers("red")), "the same answer"),
    case("faults/kill-and-restart", FAIL, started(answers("red"), answers("blue")), "'blue'"),
    case(
        "faults/kill-and-restart", FAIL,
        started(answers("red"), FakeWeb(routes={CHAT: error(500, "", {})})), "not answered",
    ),
    case("faults/kill-and-restart", NONE, live, "MODEL"),
    case("faults/damaged-entry", PASS, started(answers("red")), "1 damaged file, 1 noticed"),
    case("faults/damaged-entry", FAIL, started(answers("red"), answers("blue")), "'blue'"),
    case("faults/damaged-entry", FAIL, started(UNNOTICED), "as if it were whole"),
    case("faults/damaged-entry", NONE, started(answers("red"), entries=False), "not kept on disk"),
    case("faults/drain", PASS, started(FakeWeb()), "4 of 4 streams complete"),
    case("faults/drain", FAIL, started(BROKEN), "0 of 4 streams"),
    case("faults/drain", FAIL, started(FakeWeb(), status=None), "did not end in order"),
]  # fmt: skip
CASES: list[Case] = [*LOAD, *FAULTS]
