"""The values that the generator yields: images, and the turns of a conversation about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from PIL import Image

from fovea.evaluation.scenes.scene import Box


class Turn(NamedTuple):
    """A question with its answers.

    question: text of the question.
    answer: the right answer in the form that the question asks for.
    accepted: all answers that count as right; the first is `answer`. The scorer ignores case, outer white
        space and a final full stop.
    focus: boxes of the first image that contain the answer, in its pixels; () if the answer is at no place in
        particular, and for questions about several images.
    role: who says the question: the user, or a tool that was called, whose result it is then.
    schema: JSON Schema of the answer, which the request brings; None: any text.
    """

    question: str
    answer: str
    accepted: tuple[str, ...]
    focus: tuple[Box, ...] = ()
    role: Literal["user", "tool"] = "user"
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation about one or several images.

    id: kind, seed and index.
    kind: kind of its questions.
    images: all of them belong to the first turn, in order.
    turns: questions with their answers, in order.
    facts: numbers that results can be split by: "count" (counting), "characters" and "height" in pixels of
        the capital letters (reading, small_text), "size" in pixels of the item asked about (small_object),
        "frames" (motion), "width" and "image_height" of the images.
    tools: definitions of the tools that the model is offered, in OpenAI's form.
    """

    id: str
    kind: str
    images: tuple[Image.Image, ...] = field(repr=False)
    turns: tuple[Turn, ...]
    facts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    tools: tuple[Mapping[str, Any], ...] = ()
