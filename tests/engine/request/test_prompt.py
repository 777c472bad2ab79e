"""Prompts as token ids: which ids stand for which image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.media import Image, PixelBudget
from fovea.core.types import ChatPrompt, ImagePart, Message, TemplateInputs, TextPart, TextPrompt, TokenPrompt
from fovea.engine.request.chat_template import NOTHING
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.vision.processor.base import Capabilities, VisualPlan

MARKER, PAD = "@", ord("@")


class Letters:
    """A tokenizer with one id per letter. Its template writes the parts one after the other."""

    vocab_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render(self, messages: Sequence[Message], inputs: TemplateInputs = NOTHING) -> str:
        return "".join(
            MARKER if isinstance(part, ImagePart) else part.text for m in messages for part in m.parts
        )

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def is_sealed(self, text: str) -> bool:
        return False

    def seal(self, text: str) -> str:
        return text

    def ends_thinking(self, text: str) -> bool:
        return False

    render_sealed, encode_sealed = render, encode


class Squares:
    """A processor: width w gives w visual tokens, with a bar between rows of two, as tiled models do."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.image_counts: list[int] = []

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        self.image_counts.append(images)
        if height == 1:
            raise InvalidImage("too flat")
        rows = [MARKER * min(2, width - at) for at in range(0, width, 2)]
        return VisualPlan(width, height, width, (1, 2, 2), f"[{'|'.join(rows)}]", f"{width}:{budget.detail}")


def image(width: int, name: str = "", height: int = 2) -> Image:
    return Image(name or f"image{width}", width, height, bytes(width * height * 3))


def builder(processor: Squares | None = None) -> PromptBuilder:
    tools: Any = (Letters(), processor or Squares())
    return PromptBuilder(*tools, PAD)


def written(prepared: PreparedPrompt) -> str:
    return "".join(map(chr, prepared.ids))


def test_each_marker_becomes_its_image() -> None:
    prompt = TextPrompt("a@b@", (ImagePart(image(3)), ImagePart(image(1))))
    prepared = builder().build(prompt)
    assert written(prepared) == "a[@@|@]b[@]"
    first, second = prepared.spans
    assert (first.start, first.length, first.tokens, first.end) == (2, 4, 3, 6)
    assert (second.start, second.length, second.tokens) == (9, 1, 1)
    assert [span.index for span in prepared.spans] == [0, 1]
    assert prepared.image_tokens == 4


def test_images_of_all_turns_keep_their_order() -> None:
    prompt = ChatPrompt(
        (
            Message("user", (ImagePart(image(2)), TextPart("x"))),
            Message("user", (TextPart("y"), ImagePart(image(4)))),
        )
    )
    prepared = builder().build(prompt)
    assert written(prepared) == "[@@]xy[@@|@@]"
    assert [planned.image.width for planned in prepared.images] == [2, 4]


def test_the_key_depends_on_content_plan_and_salt() -> None:
    def key(part: ImagePart, salt: str = "") -> str:
        return builder().build(TextPrompt("@", (part,)), salt).spans[0].key

    one = key(ImagePart(image(2, "cat")))
    assert key(ImagePart(image(2, "cat"))) == one
    others = [
        key(ImagePart(image(2, "dog"))),
        key(ImagePart(image(3, "cat"))),
        key(ImagePart(image(2, "cat"), PixelBudget("low"))),
        key(ImagePart(image(2, "cat")), "tenant"),
    ]
    assert len({one, *others}) == 5


def test_a_processor_gets_the_number_of_images() -> None:
    """LLaVA-OneVision cuts an image into tiles only if it is the only image."""
    processor = Squares()
    builder(processor).build(TextPrompt("@@@", (ImagePart(image(1)),) * 3))
    assert processor.image_counts == [3, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "kind", "says"),
    [
        (TextPrompt("a@", ()), InvalidRequest, "1 image markers '@' for 0 images"),
        (TextPrompt("a", (ImagePart(image(1)),)), InvalidRequest, "0 image markers '@' for 1 images"),
        (
            TextPrompt("@@", (ImagePart(image(1)), ImagePart(image(1, height=1)))),
            InvalidImage,
            "^image 1: too flat",
        ),
        (TextPrompt("", ()), InvalidRequest, "the prompt is empty"),
        (TokenPrompt((1, PAD)), InvalidRequest, "token id 64 stands for an image"),
    ],
    ids=["marker without image", "image without marker", "a bad image", "empty", "marker as an id"],
)
def test_a_prompt_that_does_not_match_its_images_is_refused(
    prompt: Any, kind: type[InvalidRequest], says: str
) -> None:
    with pytest.raises(kind, match=says):
        builder().build(prompt)


SEGMENTS = st.lists(st.one_of(st.text("ab", max_size=3), st.integers(1, 7)), max_size=6)


@given(SEGMENTS)
def test_spans_cover_exactly_the_image_tokens(segments: list[str | int]) -> None:
    text = "x" + "".join(MARKER if isinstance(segment, int) else segment for segment in segments)
    images = tuple(ImagePart(image(segment)) for segment in segments if isinstance(segment, int))
    prepared = builder().build(TextPrompt(text, images))
    places = [place for place, token in enumerate(prepared.ids) if token == PAD]
    covered = [p for span in prepared.spans for p in range(span.start, span.end) if prepared.ids[p] == PAD]
    assert covered == places
    for span, part in zip(prepared.spans, images, strict=True):
        inside = prepared.ids[span.start : span.end]
        assert inside.count(PAD) == span.tokens == part.image.width
        assert inside[0] == inside[-1] == PAD
