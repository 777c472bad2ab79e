"""Many clients at once, some of which disconnect, on a KV pool that is too small for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea import Engine
from fovea.server.settings import ServerSettings
from tests.server.support import Server, chat, data_url, image, picture, running, until, user
from tests.support.thorough import is_thorough

CHAT = "/v1/chat/completions"
REQUESTS = 36 if is_thorough() else 15
DISCONNECT_EVERY = 3
"""Every third client disconnects early."""


@pytest.fixture(scope="module")
def crowded(checkpoint: Path, files: Path) -> Iterator[Server]:
    with (
        Engine.from_pretrained(
            str(checkpoint), dtype="float32", threads=1, kv_blocks=16, max_running=6, max_step_tokens=48
        ) as engine,
        running(engine, ServerSettings(), files) as server,
    ):
        yield server


def bodies() -> list[dict[str, Any]]:
    """Combinations of a few questions and pictures, so that requests share prefixes and encoder outputs."""
    urls = [data_url(picture(64 + 32 * (seed % 3), 96, seed)) for seed in range(4)]
    texts = ["what is it?", "the red circle", "describe the picture, please. " * 3]
    return [
        chat(
            user(image(urls[i % 4]), texts[i % 3], *([image(urls[(i + 1) % 4])] if i % 5 == 0 else [])),
            max_tokens=28,
        )
        for i in range(12)
    ]


def disconnect_early(server: Server, body: dict[str, Any], lines: int) -> None:
    with server.client() as client, client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        for _ in zip(range(lines), answer.iter_lines(), strict=False):
            pass


def test_answers_under_load_equal_answers_alone(crowded: Server) -> None:
    questions = bodies()
    waiting = {n % len(questions) for n in range(REQUESTS) if n % DISCONNECT_EVERY}
    alone = {
        which: crowded.post(CHAT, questions[which]).json()["choices"][0]["message"]["content"]
        for which in sorted(waiting)
    }
    crowded.engine.clear_caches()
    draw = random.Random(5)

    def visit(number: int) -> tuple[int, str | None]:
        which = number % len(questions)
        if number % DISCONNECT_EVERY == 0:
            disconnect_early(crowded, questions[which], draw.randrange(1, 24))
            return which, None
        answer: httpx.Response = crowded.post(CHAT, questions[which])
        return which, answer.json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(visit, range(REQUESTS)))
    wrong = [which for which, text in answers if text is not None and text != alone[which]]
    assert wrong == []
    assert crowded.metrics()["fovea:preemptions_total"] > 0
    until(lambda: crowded.metrics()["fovea:requests_running"] == 0)
    until(lambda: crowded.metrics()["fovea:kv_blocks_used"] == 0)
    assert crowded.metrics()["fovea:integrity_errors_total"] == 0
    crowded.engine.check_integrity()
