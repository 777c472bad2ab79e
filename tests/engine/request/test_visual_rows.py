"""Prompts with rows of visual tokens: the tokenizer gets one marker of each row, and the ids are the same."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fovea.engine.simulate.serving import load_prompt_builder

TOKENIZER, BUILDER = load_prompt_builder()
IMAGE, VIDEO = BUILDER._markers
PARTS = st.one_of(
    st.sampled_from(
        ["a", " b", "\n", "<|vision_start|>", "<|vision_end|>", "<1.5 seconds>", "<|image", "\\1"]
    ),
    st.tuples(st.sampled_from([IMAGE, VIDEO]), st.integers(1, 40)).map(lambda row: row[0] * row[1]),
)


@given(st.lists(PARTS, max_size=12).map("".join))
def test_the_ids_are_those_of_the_whole_text(text: str) -> None:
    ids, positions = BUILDER._encode(text, TOKENIZER.encode, BUILDER._markers)
    assert ids == TOKENIZER.encode(text)
    assert positions == [i for i, token in enumerate(ids) if token in BUILDER._tokens]
    sealed = TOKENIZER.seal(text)
    again = BUILDER._encode(sealed, TOKENIZER.encode_sealed, BUILDER._sealed_markers)
    assert again == (TOKENIZER.encode_sealed(sealed), positions)
