"""What the generator yields: images, and turns of a conversation about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from PIL import Image

from fovea.evaluation.scenes.scene import Box


class Turn(NamedTuple):
    """A question, the answer in the form that it asks for, and all answers that count as right.

    `accepted` begins with `answer`. Case, outer space and a final full stop are for the scorer to forgive.
    focus: where in the first image the answer is to be found, in its pixels; () for nowhere in particular, and for
        questions about several images.
    """

    question: str
    answer: str
    accepted: tuple[str, ...]
    focus: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation; its images all belong to the first turn, in order.

    facts: numbers that results can be split by: "count" (counting), "characters" and "height" in pixels of the
        capital letters (reading, small_text), "size" in pixels of the item asked about (small_object), "frames"
        (motion), "width" and "image_height" of the images.
    """

    id: str
    kind: str
    images: tuple[Image.Image, ...] = field(repr=False)
    turns: tuple[Turn, ...]
    facts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
