"""Checks a client's PixelBudget, and turns it into bounds for a processor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.media import DETAILS, Level, PixelBudget

LEVEL_TOKENS: dict[Level, int] = {"low": 64, "medium": 256}
"""About so many visual tokens make up a level, where the architecture allows it.

"high" is the model's own limit.
"""
MAX_ASPECT = 200
"""Largest ratio of the longer edge to the shorter one, where a processor needs such a limit."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of an image's area.

    minimum, maximum: pixels; None: the client names no such bound.
    level: the detail level; "high" if the client names pixels.
    """

    minimum: int | None
    maximum: int | None
    level: Level = "high"

    @property
    def explicit(self) -> bool:
        """Whether the client names pixels."""
        return self.minimum is not None or self.maximum is not None


def read_bounds(budget: PixelBudget) -> Bounds:
    """Check a budget and return its bounds. If it names a bound in pixels, its `detail` has no effect.

    Raises InvalidRequest; `param` names the field.
    """
    if budget.detail not in DETAILS:
        raise InvalidRequest(f"detail is {budget.detail!r}; accepted: {', '.join(DETAILS)}", param="detail")
    for name, value in (("min_pixels", budget.min_pixels), ("max_pixels", budget.max_pixels)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InvalidRequest(f"{name} is {value!r}; accepted: a positive integer", param=name)
    low, high = budget.min_pixels, budget.max_pixels
    if low is not None and high is not None and low > high:
        raise InvalidRequest(f"min_pixels is {low}, above max_pixels, which is {high}", param="min_pixels")
    level: Level = "high" if budget.explicit or budget.detail == "auto" else budget.detail
    return Bounds(low, high, level)


def geometric_mean(smallest: int, largest: int) -> int:
    """The geometric mean, rounded down.

    It is the size of the level "medium" for models that cut images into tiles.
    """
    return math.isqrt(smallest * largest)


def expect_dimensions(width: int, height: int, *, aspect: bool = False) -> None:
    """Raise InvalidImage for an image without pixels.

    aspect: also refuse images more elongated than 200:1. Some resizes turn these into no pixels, or into
        gigabytes.
    """
    if width < 1 or height < 1:
        raise InvalidImage(f"it is {width}x{height} pixels; both must be at least 1")
    if aspect and max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidImage(
            f"it is {width}x{height} pixels; one edge may be at most {MAX_ASPECT} times as long as the other"
        )


def expect_area(area: int, bounds: Bounds) -> None:
    """Raise InvalidRequest if an image that is not resized has more or fewer pixels than asked for."""
    if not (bounds.minimum or 1) <= area <= (bounds.maximum or area):
        raise InvalidRequest(
            f"the image has {area} pixels and this model does not resize (do_resize is false)",
            param="max_pixels" if bounds.maximum and area > bounds.maximum else "min_pixels",
        )


def expect_fixed(bounds: Bounds, pixels: int, architecture: str) -> None:
    """Raise InvalidRequest for a bound that excludes the only number of pixels.

    pixels: area to which the architecture resizes every image.
    architecture: its name, for the error message.
    """
    if bounds.maximum is not None and bounds.maximum < pixels:
        raise InvalidRequest(
            f"max_pixels is {bounds.maximum}; {architecture} has a fixed resolution of {pixels} pixels "
            "per image",
            param="max_pixels",
        )
    if bounds.minimum is not None and bounds.minimum > pixels:
        raise InvalidRequest(
            f"min_pixels is {bounds.minimum}; {architecture} has a fixed resolution of {pixels} pixels "
            "per image",
            param="min_pixels",
        )
