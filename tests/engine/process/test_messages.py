"""Messages between a server and the process of its engine: errors, requests, and joined deltas."""

from __future__ import annotations

import socket
from types import MappingProxyType
from typing import Any

import pytest

from fovea.core.errors import EngineError, FoveaError, InvalidImage, Overloaded, PromptTooLong, Unavailable
from fovea.core.media import Image, video_of_images
from fovea.core.progress import Loaded
from fovea.core.types import Delta, Usage
from fovea.engine.process.client import deltas_of
from fovea.engine.process.host import Reporter
from fovea.engine.process.messages import LENGTH, Kind, pack, pack_answers, unpack, unpack_answers


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full", retry_after=2.5, param="n", scope="request"),
        InvalidImage("too small", index=3, param="messages[0]"),
        PromptTooLong("too long", code="context_length_exceeded"),
        Unavailable("draining"),
        EngineError("broke"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_class_and_their_attributes(error: FoveaError) -> None:
    ((_, _, found),) = unpack_answers(pack_answers([(Kind.ERROR, 1, error)])[LENGTH.size :])
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.__dict__ == error.__dict__


def test_pixels_and_frames_stay_with_the_server() -> None:
    """Only their numbers travel, with what admission needs to know about them."""
    lent: list[Any] = []

    def lend(source: Any) -> int:
        lent.append(source)
        return len(lent) - 1

    image = Image("ab" * 32, 8, 4, bytes(range(96)))
    values = {"image": image, "video": video_of_images([image, image]), "biases": MappingProxyType({3: 1.0})}
    data = pack((Kind.STREAM, 1, values), lend)
    assert image.pixels not in data
    assert lent[0] is image.pixels

    borrowed: list[tuple[Any, ...]] = []

    class Borrowed:
        def __init__(self, *names: Any) -> None:
            borrowed.append(names)

    _, _, found = unpack(data, Borrowed)
    assert borrowed == [(0, False, 96, 0.0), (1, True, 0, 0.0)]
    assert found["image"] == image
    assert found["video"] == values["video"]
    assert dict(found["biases"]) == {3: 1.0}


def text(index: int, words: str, *ids: int) -> tuple[Any, ...]:
    return Kind.TEXT, 7, index, words, ids, False, 5, 2


def test_texts_of_a_choice_that_wait_are_joined() -> None:
    last = Delta(0, "!", (4,), finish_reason="stop", usage=Usage(5, 4))
    entries = [text(0, "a", 1), text(1, "x", 9), text(0, "b", 2, 3), (Kind.DELTA, 7, last), (Kind.END, 7)]
    assert list(deltas_of(entries)) == [
        Delta(0, "ab", (1, 2, 3), prompt_tokens=5, cached_tokens=2),
        Delta(1, "x", (9,), prompt_tokens=5, cached_tokens=2),
        last,
    ]


def test_text_before_an_error_is_not_lost() -> None:
    deltas = deltas_of([text(0, "a", 1), (Kind.ERROR, 7, EngineError("broke"))])
    assert next(deltas).text == "a"
    with pytest.raises(EngineError, match="broke"):
        next(deltas)


def test_an_engine_tells_how_far_its_weights_are_once_for_each_percent() -> None:
    server, engine = socket.socketpair()
    with server, engine:
        tell = Reporter(engine)
        for done in range(1001):
            tell(Loaded(done, 1000))
        engine.shutdown(socket.SHUT_WR)
        with server.makefile("rb") as file:
            found = []
            while head := file.read(LENGTH.size):
                found += unpack_answers(file.read(LENGTH.unpack(head)[0]))
    assert found == [(Kind.LOADED, 0, 10 * percent, 1000) for percent in range(101)]
