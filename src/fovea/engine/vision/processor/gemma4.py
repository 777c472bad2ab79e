"""The image processor of Gemma 4: any aspect, with about as many visual tokens as one of five budgets.

Every picture is enlarged or made smaller to the largest size of its aspect that has whole tokens, and not
more of them than the budget. The model was trained with the budgets `BUDGETS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from PIL.Image import Resampling

from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import Bytes, Palette, Values, picture, read_filter, resize
from fovea.engine.vision.processor.settings import Config, Settings, expect_equal, section
from fovea.engine.vision.processor.sizes import (
    Bounds,
    expect_area,
    expect_dimensions,
    expect_multiples,
    geometric_mean,
    patch_coordinates,
    read_bounds,
)
from fovea.kernels.native.pictures import Order

_TYPES = ("Gemma4ImageProcessor",)
BUDGETS = (70, 140, 280, 560, 1120)
"""Numbers of visual tokens that the family's processor accepts as the most of an image."""
_TABLE = 10 * 1024
"""Default of `position_embedding_size`, the largest number of patches along an edge."""

Pair = tuple[int, int]
"""(height, width) in pixels."""


def fit_budget(height: int, width: int, side: int, tokens: int) -> Pair:
    """(height, width) of nearly the same aspect, multiples of `side`, with at most `tokens` tokens.

    It is the largest such size, also for a smaller picture. The order of the floating-point operations is
    that of the reference, which has no result for a square that becomes one token.

    side: edge in pixels of the square that becomes one token.
    """
    factor = math.sqrt(tokens * side**2 / (height * width))
    down, across = math.floor(factor * height / side), math.floor(factor * width / side)
    if down == 0:
        down, across = 1, min(max(1, width // height), tokens)
    elif across == 0:
        down, across = min(height // width, tokens), 1
    return down * side, across * side


@dataclass(frozen=True, slots=True)
class Gemma4Processor:
    """Plans and prepares images for Gemma 4.

    Budgets: "high" is the checkpoint's own number of tokens, "low" is the smallest of `BUDGETS`, and "medium"
        is the largest that is not above their geometric mean; with the usual 280 these are 280, 70 and 140.
        `max_pixels` chooses the largest of `BUDGETS` up to the checkpoint's own at which the resized picture
        has no more pixels. `min_pixels` chooses the smallest from the checkpoint's own on at which it has no
        fewer, so it can ask for more than "high". A bound that none of them meets is refused.

    palette: normalisation of the pixels.
    resample: the filter that resizes pictures.
    resizes: whether pictures are resized at all.
    tokens: the checkpoint's own budget, one of `BUDGETS`.
    patch: side of an encoder patch, in pixels.
    pool: patches along the side of a square that becomes one token.
    longest: most patches along an edge for which the encoder has positions.
    marker: text of one visual token.
    around: texts before and after the visual tokens of an image.
    """

    palette: Palette
    resample: Resampling
    resizes: bool
    tokens: int
    patch: int
    pool: int
    longest: int
    marker: str
    around: tuple[str, str]

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one visual token."""
        return self.patch * self.pool

    @property
    def capabilities(self) -> Capabilities:
        # The decoder's first layers have sliding windows, so a method cannot read their scores.
        return Capabilities(any_size=self, resize=self if self.resizes else None, decoder_probe=False)

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        expect_dimensions(width, height)
        target = self._target if self.resizes else self._as_is
        return self._planned(width, height, target(height, width, bounds))

    def shrink(self, plan: VisualPlan, budget: PixelBudget, most: int) -> VisualPlan:
        """The largest plan of at most `most` tokens; the plan itself if it has no more.

        The number may be any, also below `BUDGETS`.
        """
        if plan.tokens <= most:
            return plan
        return self._planned(plan.width, plan.height, self._fit(plan.height, plan.width, max(1, most)))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        ((height, width),) = plan.sizes
        pixels = resize(picture(image), height, width, self.resample)
        return ProcessedImage(image.identity, plan, {"pixel_values": self.patches(pixels)})

    def patches(self, pixels: Bytes) -> Values:
        """Turn bytes (height, width, 3) into float32 (patches, patch * patch * 3), row by row."""
        patch, grid = self.patch, (1, pixels.shape[0] // self.patch, pixels.shape[1] // self.patch)
        order = Order(patch_coordinates(grid, 1) * patch, patch, patch, channels_last=True)
        return self.palette.patches([pixels], order)

    def _planned(self, width: int, height: int, size: Pair) -> VisualPlan:
        """The plan of an image of these dimensions that is resized to `size`."""
        tokens = self._count(size)
        grid = (1, size[0] // self.patch, size[1] // self.patch)
        key = (
            f"gemma4;{size[0]}x{size[1]};{self.resample.name};{self.palette.key};"
            f"patch={self.patch};pool={self.pool}"
        )
        text = f"{self.around[0]}{self.marker * tokens}{self.around[1]}"
        return VisualPlan(width, height, tokens, grid, text, key, (size,), around=self.around)

    def _target(self, height: int, width: int, bounds: Bounds) -> Pair:
        """The size after resizing. Raises InvalidRequest for bounds that cannot be met."""
        own = {"low": BUDGETS[0], "medium": self._medium()}.get(bounds.level, self.tokens)
        possible = [tokens for tokens in BUDGETS if tokens <= self.longest // self.pool]
        sizes = [self._fit(height, width, tokens) for tokens in possible]
        areas = [size[0] * size[1] for size in sizes]
        at = possible.index(own)
        if bounds.minimum is not None:
            if areas[-1] < bounds.minimum:
                raise bounds.refuse_minimum(f"this model encodes this image at {areas[-1]} pixels or fewer")
            at = next(index for index in range(len(areas)) if areas[index] >= bounds.minimum and index >= at)
        if bounds.maximum is None or areas[at] <= bounds.maximum:
            return sizes[at]
        return sizes[self._below(areas, at, bounds)]

    def _below(self, areas: list[int], at: int, bounds: Bounds) -> int:
        """The place of the largest area up to place `at` within the bounds. Raises InvalidRequest."""
        assert bounds.maximum is not None
        fitting = [index for index in range(at) if areas[index] <= bounds.maximum]
        if not fitting:
            raise bounds.refuse_maximum(f"this model encodes this image at {areas[0]} pixels or more")
        if areas[fitting[-1]] < (bounds.minimum or 1):
            raise InvalidRequest(
                f"min_pixels is {bounds.minimum} and max_pixels is {bounds.maximum}; this model encodes this "
                f"image at {areas[fitting[-1]]} pixels, or at {areas[fitting[-1] + 1]}",
                param="min_pixels",
            )
        return fitting[-1]

    def _medium(self) -> int:
        middle = geometric_mean(BUDGETS[0], self.tokens)
        return max(tokens for tokens in BUDGETS if tokens <= middle)

    def _fit(self, height: int, width: int, tokens: int) -> Pair:
        return fit_budget(height, width, self.factor, tokens)

    def _count(self, size: Pair) -> int:
        return size[0] * size[1] // self.factor**2

    def _as_is(self, height: int, width: int, bounds: Bounds) -> Pair:
        expect_multiples(width, height, self.factor)
        tokens = self._count((height, width))
        if tokens > self.tokens:
            raise InvalidImage(
                f"it is {width}x{height} pixels, which are {tokens} tokens; this model does not resize "
                f"(do_resize is false) and accepts {self.tokens}"
            )
        expect_area(height * width, bounds)
        return height, width


def build(preprocessor: Config, model: Config, processor: Config) -> Gemma4Processor:
    settings = Settings(preprocessor)
    settings.processor_type(_TYPES, _TYPES[0])
    vision = section(model, "vision_config")
    tokens = settings.count("max_soft_tokens", 280)
    if tokens not in BUDGETS:
        raise settings.error("max_soft_tokens", tokens, f"one of {', '.join(map(str, BUDGETS))}")
    # The family's own class computes the size from the number of tokens, whatever `size` says.
    settings.raw("size")
    longest = vision.get("position_embedding_size")
    palette = Palette.read(settings, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), normalizes=False)
    result = Gemma4Processor(
        palette=replace(palette, stays_exact=True),
        resample=read_filter(settings, Resampling.BICUBIC),
        resizes=settings.flag("do_resize", True),
        tokens=tokens,
        patch=_shape(settings, vision, "patch_size", 16),
        pool=_shape(settings, vision, "pooling_kernel_size", 3),
        longest=settings.positive("position_embedding_size", _TABLE if longest is None else longest),
        marker=str(processor.get("image_token") or "<|image|>"),
        around=(str(processor.get("boi_token") or "<|image>"), str(processor.get("eoi_token") or "<image|>")),
    )
    settings.close()
    if tokens * result.pool > result.longest:
        most = result.longest // result.pool
        raise settings.error("max_soft_tokens", tokens, f"up to {most}, for which the encoder has positions")
    return result


def _shape(settings: Settings, vision: Config, name: str, default: int) -> int:
    """The side of a patch or of a token, which must be equal to the encoder's."""
    known = vision.get(name)
    value = settings.count(
        name, default if known is None else settings.positive(f"vision_config.{name}", known)
    )
    expect_equal(name, value, known)
    return value
