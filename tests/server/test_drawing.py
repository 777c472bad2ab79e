"""PDF files that keep their process busy: what waits for them, and what does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fovea.http.bodies import BodyBudget
from fovea.media.limits import MediaLimits
from fovea.media.pdf import PageRange
from fovea.media.sandbox.decoder import DocumentPages
from fovea.server import drawing
from fovea.server.app import create_app
from fovea.server.drawing import Drawing
from fovea.server.routes.pdf import receive_file
from tests.server.scripted import Script
from tests.server.support import request_of


class Stuck:
    """A renderer whose files named "stuck" are drawn until `go` is set or nobody waits for them."""

    def __init__(self, _: MediaLimits) -> None:
        self.go = threading.Event()
        self.begun: list[bytes] = []
        self.abandoned = threading.Event()

    def render(
        self, data: bytes, wanted: PageRange, abandoned: Callable[[], bool], tenant: str
    ) -> DocumentPages:
        self.begun.append(data)
        while data.startswith(b"stuck") and not self.go.wait(0.01):
            if abandoned():
                self.abandoned.set()
                break
        return DocumentPages([], 1)

    def close(self) -> None:
        self.go.set()


@pytest.fixture
async def clients(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Drawing]:
    monkeypatch.setattr(drawing, "DocumentRenderer", Stuck)
    made = Drawing(MediaLimits(pdf_workers=1))
    yield made
    await asyncio.to_thread(made.close)


def renderer_of(drawing: Drawing) -> Any:
    return drawing._renderer


async def begin(drawing: Drawing, client: str, *files: bytes) -> list[asyncio.Task[DocumentPages]]:
    """Send files, and wait until each of them waits where it will wait."""
    tasks = [asyncio.ensure_future(drawing.render(client, data, PageRange())) for data in files]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_many_slow_files_of_one_client_delay_others_by_one_file(clients: Drawing) -> None:
    slow = await begin(clients, "mallory", *(b"stuck %d" % number for number in range(40)))
    await begin(clients, "alice", b"page")
    renderer_of(clients).go.set()
    await asyncio.gather(*slow)
    assert renderer_of(clients).begun[:3] == [b"stuck 0", b"page", b"stuck 1"]


async def test_slow_files_take_no_thread_that_others_need(clients: Drawing) -> None:
    for number in range(40):
        await begin(clients, f"mallory {number}", b"stuck")
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 30) == "free"


async def test_a_file_that_nobody_waits_for_leaves_its_process(clients: Drawing) -> None:
    renderer = renderer_of(clients)
    (task,) = await begin(clients, "mallory", b"stuck")
    task.cancel()
    assert await asyncio.to_thread(renderer.abandoned.wait, 30)
    assert await clients.render("mallory", b"page", PageRange()) == DocumentPages([], 1)
    assert clients._turns == {}


class Piece(bytes):
    """A piece of a body that counts how often it is looked at."""

    looks = 0

    def __len__(self) -> int:
        Piece.looks += 1
        return super().__len__()


async def test_the_work_for_a_body_grows_with_its_pieces_and_not_with_their_square() -> None:
    pieces = [Piece(b"%"), *(Piece(b"P") for _ in range(500))]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False
    left = iter(messages)

    async def receive() -> Any:
        return next(left)

    request, _ = request_of(create_app(Script()))
    request._receive = receive
    memory = BodyBudget(1 << 20, 1 << 20).begin("mallory", lambda: None)
    assert await receive_file(request, 1 << 20, memory.add) == b"%" + b"P" * 500
    assert Piece.looks <= 3 * len(pieces)
