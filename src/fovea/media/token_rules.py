"""Counts of visual tokens that need no model: OpenAI's published rule for tiles, and an estimate.

The rules of models that Fovea knows are in `engine.vision.token_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fovea.core.errors import ConfigError, InvalidImage, InvalidRequest
from fovea.core.media import Detail
from fovea.core.protocols import VisualTokenRule

_FIT = 2048
"""Side of the square, in pixels, into which OpenAI's rule first fits an image."""
_SHORT = 768
"""Longest shorter side of an image, in pixels, after the second step of OpenAI's rule."""
_TILE = 512
"""Side of a tile in pixels."""


@dataclass(frozen=True, slots=True)
class OpenAITiles:
    """OpenAI's rule for models that count 512 x 512 tiles (GPT-4o, GPT-4.1 and GPT-4.5).

    An image is made smaller until it fits into a square of 2048 pixels and its shorter side has at most 768.
    It then counts `base` tokens and `tile` tokens for each tile that it touches. With detail "low" it counts
    `base`. Small images are not enlarged. `images`, `min_pixels` and `max_pixels` have no effect: OpenAI's
    interface has no such bounds.

    Source: OpenAI's guide "Images and vision", section "Calculating costs", whose examples the tests repeat.
    The guide does not say how the smaller picture's sides are rounded; they are not rounded here.

    base: tokens of every image.
    tile: tokens of each tile.
    """

    base: int = 85
    tile: int = 170

    @property
    def name(self) -> str:
        return "openai-tiles"

    def tokens(
        self, width: int, height: int, *, detail: Detail = "auto", images: int = 1,
        min_pixels: int | None = None, max_pixels: int | None = None,
    ) -> int:  # fmt: skip
        """Count the tokens of an image, see `VisualTokenRule.tokens`.

        Raises InvalidImage for an image without pixels, InvalidRequest for a detail level that OpenAI does
        not have.
        """
        _expect_pixels(width, height)
        if detail == "low":
            return self.base
        if detail not in ("auto", "high"):
            raise InvalidRequest(f"detail is {detail!r}; accepted: auto, low, high", param="detail")
        short, long = (width, height) if width < height else (height, width)
        # Sides are short / unit and long / unit: fractions stay exact without floating-point numbers.
        unit = 1
        if long > _FIT:
            short, long, unit = short * _FIT, long * _FIT, long
        if short > _SHORT * unit:
            short, long, unit = short * _SHORT, long * _SHORT, short
        side = _TILE * unit
        return self.base + self.tile * -(-short // side) * -(-long // side)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A guess for models whose rule is not known: tokens in proportion to the image's area.

    `detail` and `images` have no effect. A client's bounds limit the area as they do for models that take
    any resolution.

    pixels_per_token: area of one token, in pixels.
    low, high: fewest and most tokens of an image.
    """

    pixels_per_token: int
    low: int
    high: int

    @property
    def name(self) -> str:
        return "estimate"

    def tokens(
        self, width: int, height: int, *, detail: Detail = "auto", images: int = 1,
        min_pixels: int | None = None, max_pixels: int | None = None,
    ) -> int:  # fmt: skip
        """Estimate the tokens of an image, see `VisualTokenRule.tokens`.

        Raises InvalidImage for an image without pixels.
        """
        _expect_pixels(width, height)
        area = width * height
        if min_pixels is not None and area < min_pixels:
            area = min_pixels
        if max_pixels is not None and area > max_pixels:
            area = max_pixels
        return min(self.high, max(self.low, -(-area // self.pixels_per_token)))


def estimate_rule(pixels_per_token: int = 28 * 28, *, low: int = 4, high: int = 16384) -> Estimate:
    """Build the estimate for models whose rule is not known.

    The defaults are the area of a token and the limits of Qwen2-VL and Qwen2.5-VL.

    Raises ConfigError unless pixels_per_token and low are at least 1 and high is at least low.
    """
    if pixels_per_token < 1 or not 1 <= low <= high:
        raise ConfigError(
            f"the estimate has {pixels_per_token} pixels per token and {low} to {high} tokens; accepted: at "
            "least 1 pixel, and 1 or more tokens up to a number that is not smaller"
        )
    return Estimate(pixels_per_token, low, high)


RULES: Mapping[str, Callable[[], VisualTokenRule]] = MappingProxyType(
    {"openai-tiles": OpenAITiles, "estimate": estimate_rule}
)
"""Rules that a setting can name, beside the names of models."""


def _expect_pixels(width: int, height: int) -> None:
    """Raise InvalidImage for an image without pixels."""
    if width < 1 or height < 1:
        raise InvalidImage(f"it is {width}x{height} pixels; both must be at least 1")
