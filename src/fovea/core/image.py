"""What an image is, between the media floor that reads it and the engine that encodes it.

Pixels travel as plain bytes, so that no floor needs to agree on an array library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal

from fovea.core.errors import InvalidRequest

Level = Literal["low", "medium", "high"]
LEVELS: tuple[Level, ...] = ("low", "medium", "high")
Detail = Literal["auto", "low", "medium", "high"]
DETAILS: tuple[Detail, ...] = ("auto", *LEVELS)


@dataclass(frozen=True, slots=True)
class Image:
    """A decoded RGB image.

    identity: 64 hex digits, a 256-bit hash of the source bytes with their type and dimensions
        (`media.identity`); the name of the image in every cache.
    rgb: `height * width * 3` bytes, row-major, channels last.
    """

    identity: str
    width: int
    height: int
    rgb: bytes = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.rgb) != self.width * self.height * 3:
            raise ValueError(f"rgb holds {len(self.rgb)} bytes, {self.width}x{self.height}x3 needed")


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """How many of an image's visual tokens the decoder is to see, and who chooses them.

    method: its name in `engine.reduce.methods`. keep: a share of the tokens that the image would have, more than 0 and at
        most 1; or budget: so many tokens. One of the two; neither leaves it to the image, where the method can tell. Of
        the method "views" both are of all images together that wish the same.
    explain: whether the answer is to say what was seen where; `relevance` can.

    Raises InvalidRequest.
    """

    method: str
    keep: float | None = None
    budget: int | None = None
    explain: bool = False

    def __post_init__(self) -> None:
        if self.keep is not None and self.budget is not None:
            raise InvalidRequest("keep and budget say the same; send one", param="visual_tokens")
        if self.keep is not None and not (_is(self.keep, int | float) and 0 < self.keep <= 1):
            raise InvalidRequest(
                f"keep is {self.keep!r}; accepted: more than 0, at most 1", param="visual_tokens"
            )
        if self.budget is not None and not (_is(self.budget, int) and self.budget >= 1):
            raise InvalidRequest(
                f"budget is {self.budget!r}; accepted: a whole number from 1 on", param="visual_tokens"
            )


def _is(value: object, kind: type | UnionType) -> bool:
    """True is no number here."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """How many pixels of an image the model may see; what the model's processor makes of it is its plan.

    detail: "low" is about 64 visual tokens and "medium" about 256 where the architecture allows it, "high" the model's
        own limit; which of them "auto" is, the engine's policy decides.
    min_pixels, max_pixels: bounds on the pixels after resizing; they override `detail`. None: the model's own.
    visual: how many of the tokens that these make are kept; None: what the engine's policy says.
    """

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    visual: VisualTokens | None = None

    @property
    def explicit(self) -> bool:
        """Whether pixels are named, so that `detail` does not count."""
        return self.min_pixels is not None or self.max_pixels is not None


@dataclass(frozen=True, slots=True)
class RelevanceRecord:
    """How an image was seen in parts, in numbers for whoever watches.

    regions: (relevance in [0, 1], tokens) of each. tensions: compress, exploit, focus. ways: means of the propositional,
    perspectival and participatory maps. seconds: of balancing and attending.
    """

    regions: tuple[tuple[float, int], ...]
    tensions: tuple[float, float, float]
    ways: tuple[float, float, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class ImageUse:
    """How closely an image of a request was looked at, for whoever asked.

    detail: the level; "pixels" where bounds on pixels were named. tokens: visual tokens. reason: why this level.
    method, full: who chose them, and out of how many, where not all of them are there. looked: of an image that was seen in
    parts, if that is still known; relevance: the same for a reader, if that was asked for.
    """

    detail: Level | Literal["pixels"]
    tokens: int
    reason: str
    method: str | None = None
    full: int | None = None
    record: RelevanceRecord | None = field(default=None, compare=False)
    relevance: Mapping[str, Any] | None = field(default=None, compare=False)


def content_identity(media_type: str, width: int, height: int, data: bytes) -> str:
    """SHA-256 over length-framed (media_type, width, height, data); 64 hex digits.

    Framing keeps two different tuples from ever hashing the same byte string.
    """
    digest = hashlib.sha256()
    for part in (media_type.encode(), str(width).encode(), str(height).encode(), data):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
