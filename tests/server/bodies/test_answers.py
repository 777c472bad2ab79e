"""Complete answers, small and large, are the same JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.api.bodies.chat import ChatBodies
from fovea.api.bodies.text import CompletionBodies
from fovea.core.types import Completion, StageTimings, TokenLogprob, Usage
from fovea.server.json_answers import BATCH, OneLineResponse, answer_response, json_pieces
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
    assert "".join(json_pieces(body)).encode() == OneLineResponse(body).body


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


@pytest.mark.parametrize(("tokens", "kind"), [(3, OneLineResponse), (300, StreamingResponse)])
@pytest.mark.parametrize(("writer", "count"), [(ChatBodies, 1), (CompletionBodies, 3)])
async def test_a_large_answer_equals_a_small_one(
    tokens: int, kind: type, writer: type[ChatBodies | CompletionBodies], count: int
) -> None:
    """An answer with log probabilities stopped all clients while it was written, in one call, in the loop."""
    bodies, answers = writer("m"), [completion(tokens, 20)] * count
    body = bodies.complete(answers)
    response = await answer_response(bodies, answers)
    assert type(response) is kind
    if isinstance(response, StreamingResponse):
        pieces = [bytes(piece) async for piece in response.body_iterator]  # type: ignore[arg-type]
        assert max(map(len, pieces)) < 1024 * 1024
        text = b"".join(pieces)
    else:
        text = bytes(response.body)
    assert json.loads(text) == body
    assert response.headers["content-length"] == str(len(text))
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029"])
async def test_an_answer_is_one_line(tokens: int, mark: str) -> None:
    """Clients that split text at Unicode's line breaks cut the JSON of an answer with one into halves."""
    whole = replace(completion(tokens, 20), texts=(f"a{mark}b" * tokens,) * 2)
    response = await answer_response(ChatBodies("m"), [whole])
    if isinstance(response, StreamingResponse):
        body = b"".join([bytes(piece) async for piece in response.body_iterator])  # type: ignore[arg-type]
    else:
        body = bytes(response.body)
    assert len(body.decode().splitlines()) == 1
    assert json.loads(body)["choices"][0]["message"]["content"] == whole.texts[0]
    assert response.headers["content-length"] == str(len(body))
