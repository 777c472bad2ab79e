"""The text of a render: ids written in runs are those that a JSON writer writes one by one."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fovea.api.render import ids_text, render_body
from fovea.api.schema import ChatRequest
from fovea.core.types import ChatPrompt, GenerationRequest, Rendered, RenderedSpan

TEXTS = st.lists(st.integers(0, 200_000), max_size=4)
IMAGES = st.lists(st.integers(5, 7), min_size=1, max_size=9)
PIECES = st.lists(st.tuples(TEXTS, IMAGES), max_size=4)
"""Text and image in turns. An image may have text between its rows."""


def rendered(pieces: list[tuple[list[int], list[int]]], end: list[int]) -> Rendered:
    ids: list[int] = []
    spans = []
    for number, (text, image) in enumerate(pieces):
        ids += text
        spans.append(RenderedSpan("image", f"{number:064x}", len(ids), len(image)))
        ids += image
    return Rendered(ids + end, tuple(spans), 4)


@given(PIECES, st.lists(st.integers(0, 9), max_size=3))
def test_runs_of_one_id_are_written_like_the_rest(
    pieces: list[tuple[list[int], list[int]]], end: list[int]
) -> None:
    prompt = rendered(pieces, end)
    assert json.loads(f"[{ids_text(prompt)}]") == prompt.ids


def test_the_whole_is_json() -> None:
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "stream": True, "cache_salt": 'quo"ted'}
    )
    prompt = rendered([([1], [5, 5])], [2])
    found = json.loads(render_body("cmpl", body, "tiny", GenerationRequest("7", ChatPrompt(())), prompt))
    assert (found["request_id"], found["token_ids"]) == ("cmpl-7", [1, 5, 5, 2])
    assert (found["stream"], found["cache_salt"], found["priority"]) == (True, 'quo"ted', 0)
    assert found["features"]["mm_placeholders"] == {"image": [{"offset": 1, "length": 2}]}
