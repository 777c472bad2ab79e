"""What the generator yields: images, and turns of a conversation about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from PIL import Image


class Turn(NamedTuple):
    """A question, the answer in the form that it asks for, and all answers that count as right.

    `accepted` begins with `answer`. Case, outer space and a final full stop are for the scorer to forgive.
    """

    question: str
    answer: str
    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation; its images all belong to the first turn, in order.

    facts: numbers that results can be split by: "count" (counting), "characters" and "height" in pixels of the
        capital letters (reading), "frames" (motion), "width" and "image_height" of the images.
    """

    id: str
    kind: str
    images: tuple[Image.Image, ...] = field(repr=False)
    turns: tuple[Turn, ...]
    facts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
