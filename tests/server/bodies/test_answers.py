"""Complete answers, small and large, are the same JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.api.completion_bodies import ChatBodies, CompletionBodies
from fovea.core.json_text import dump
from fovea.core.types import Completion, StageTimings, TokenLogprob, Usage
from fovea.server.app import create_app
from fovea.server.json_answers import BATCH, Bodies, json_pieces, send_answers
from tests.server.scripted import Script
from tests.server.support import request_of
from tests.support.thorough import examples

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@settings(max_examples=examples(100), deadline=None, derandomize=True, database=None)
@given(VALUES, st.sampled_from([0, 1, BATCH, BATCH + 1, 3 * BATCH]))
def test_pieces_are_the_text_of_the_whole(value: Any, copies: int) -> None:
    body = {"value": value, "copies": [value] * copies}
    assert "".join(json_pieces(body)) == dump(body)


def completion(tokens: int, alternatives: int) -> Completion:
    top = tuple((at, f"é{at}", -1.5) for at in range(alternatives))
    entries = tuple(TokenLogprob(7, "x", -0.5, top) for _ in range(tokens))
    return Completion(
        texts=("x" * tokens,) * 2,
        token_ids=((7,) * tokens,) * 2,
        finish_reasons=("length",) * 2,
        usage=Usage(1, tokens),
        timings=StageTimings(),
        logprobs=(entries,) * 2,
    )


async def sent(bodies: Bodies, answers: list[Completion]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The parts of the body of an answer, and its headers."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    request, inside = request_of(create_app(Script()))
    request.send = send
    await send_answers(request, bodies, answers)
    start, *parts = messages
    return [part["body"] for part in parts], dict(start["headers"])


@pytest.mark.parametrize(("tokens", "pieces"), [(3, False), (300, True)])
@pytest.mark.parametrize(("writer", "count"), [(ChatBodies, 1), (CompletionBodies, 3)])
async def test_a_large_answer_equals_a_small_one(
    tokens: int, pieces: bool, writer: type[ChatBodies | CompletionBodies], count: int
) -> None:
    """An answer with log probabilities stopped all clients while it was written, in one call, in the loop."""
    bodies, answers = writer("m"), [completion(tokens, 20)] * count
    body = bodies.complete(answers)
    parts, headers = await sent(bodies, answers)
    assert (len(parts) > 2) == pieces
    assert max(map(len, parts)) < 1024 * 1024
    text = b"".join(parts)
    assert json.loads(text) == body
    assert headers[b"content-length"] == str(len(text)).encode()
    assert headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029"])
async def test_an_answer_is_one_line(tokens: int, mark: str) -> None:
    """Clients that split text at Unicode's line breaks cut the JSON of an answer with one into halves."""
    whole = replace(completion(tokens, 20), texts=(f"a{mark}b" * tokens,) * 2)
    parts, headers = await sent(ChatBodies("m"), [whole])
    body = b"".join(parts)
    assert len(body.decode().splitlines()) == 1
    assert json.loads(body)["choices"][0]["message"]["content"] == whole.texts[0]
    assert headers[b"content-length"] == str(len(body)).encode()
