"""The image processor of Pixtral, Mistral 3 and LightOnOCR: any resolution up to a longest edge.

An image that is larger is made smaller. Then each edge is rounded up, to whole patches or to whole squares of
patches that become one token. Source: Pixtral 12B (arXiv:2410.07073), section 2.2.

LightOnOCR has no text between the rows of visual tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from PIL.Image import Resampling

from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import Bytes, Palette, Values, picture, read_filter, resize
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import (
    LEVEL_TOKENS,
    Bounds,
    expect_area,
    expect_dimensions,
    patch_coordinates,
    read_bounds,
)
from fovea.kernels.native.pictures import Order

_TYPES = ("PixtralImageProcessor",)

Pair = tuple[int, int]
"""(height, width) in pixels."""


@dataclass(frozen=True, slots=True)
class PixtralProcessor:
    """Plans and prepares images for models with a Pixtral tower.

    Budgets: "low" is at most 64 tokens, "medium" at most 256, and "high" is the model's own limit. They and
        `max_pixels` lower the longest edge as far as necessary. `min_pixels` enlarges an image, up to the
        model's own limit; more is refused.

    palette: normalisation of the pixels.
    resample: the filter that resizes pictures.
    limit: largest (height, width) of a resized picture; None: pictures are not resized.
    step: the edges of a resized picture are multiples of it, in pixels; at most `factor`.
    patch: side of an encoder patch, in pixels.
    merge: patches along the side of a square that becomes one token.
    marker: text of one visual token.
    row_end: text between two rows of visual tokens.
    image_end: text after the last row.
    """

    palette: Palette
    resample: Resampling
    limit: Pair | None
    step: int
    patch: int
    merge: int
    marker: str
    row_end: str = ""
    image_end: str = ""

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one visual token."""
        return self.patch * self.merge

    @property
    def least_edge(self) -> int:
        """The smallest edge of a resized picture that has a visual token, in pixels."""
        return -(-self.factor // self.step) * self.step

    @property
    def capabilities(self) -> Capabilities:
        resizes_to_tokens = self.limit is not None and self.step == self.factor
        return Capabilities(
            droppable=not self.row_end, any_size=self, resize=self if resizes_to_tokens else None
        )

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        expect_dimensions(width, height)
        if self.limit is None:
            return self._planned(width, height, self._as_is(height, width, bounds))
        return self._planned(width, height, self._target(height, width, bounds))

    def shrink(self, plan: VisualPlan, budget: PixelBudget, most: int) -> VisualPlan:
        """The largest plan of at most `most` tokens; the plan itself if it has no more."""
        if plan.tokens <= most:
            return plan
        size = self._largest(plan.height, plan.width, lambda size: self._tokens(size) <= most)
        return self._planned(plan.width, plan.height, size)

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        ((height, width),) = plan.sizes
        pixels = resize(picture(image), height, width, self.resample)
        return ProcessedImage(image.identity, plan, {"pixel_values": self.patches(pixels)})

    def patches(self, pixels: Bytes) -> Values:
        """Turn bytes (height, width, 3) into (patches, 3 * patch * patch), row by row.

        Pixels beyond the last whole patch are left out.
        """
        patch, grid = self.patch, (1, pixels.shape[0] // self.patch, pixels.shape[1] // self.patch)
        return self.palette.patches([pixels], Order(patch_coordinates(grid, 1) * patch, patch, patch))

    def _planned(self, width: int, height: int, size: Pair) -> VisualPlan:
        """The plan of an image of these dimensions that is resized to `size`."""
        rows, columns = size[0] // self.factor, size[1] // self.factor
        lines = [self.marker * columns] * rows
        text = self.row_end.join(lines) + self.image_end
        grid = (1, size[0] // self.patch, size[1] // self.patch)
        key = f"pixtral;{size[0]}x{size[1]};{self.resample.name};{self.palette.key};patch={self.patch}"
        return VisualPlan(width, height, rows * columns, grid, text, key, (size,))

    def _target(self, height: int, width: int, bounds: Bounds) -> Pair:
        """The size after resizing. Raises InvalidRequest for bounds that cannot be met."""
        least, level = self.least_edge**2, LEVEL_TOKENS.get(bounds.level)
        if bounds.maximum is not None and bounds.maximum < least:
            raise bounds.refuse_maximum(f"this model accepts {least} or more")

        def fits(size: Pair) -> bool:
            few = level is None or self._tokens(size) <= level
            return few and (bounds.maximum is None or size[0] * size[1] <= bounds.maximum)

        size = self._resized(height, width)
        if not fits(size):
            size = self._largest(height, width, fits)
        if bounds.minimum is None or size[0] * size[1] >= bounds.minimum:
            return size
        return self._enlarged(height, width, bounds.minimum, bounds.maximum)

    def _largest(self, height: int, width: int, fits: Callable[[Pair], bool]) -> Pair:
        """The largest size that fits. `fits` must hold for all sizes up to some edge, and for no larger."""
        edges = range(1, max(height, width) + 1)
        first_that_does_not = bisect_left(
            edges, True, key=lambda e: not fits(self._resized(height, width, e))
        )
        return self._resized(height, width, edges[first_that_does_not - 1])

    def _enlarged(self, height: int, width: int, least: int, most: int | None) -> Pair:
        """The smallest size of at least `least` pixels. Raises InvalidRequest if none is within `most`."""
        assert self.limit is not None
        edges = range(1, max(self.limit) + 1)

        def reaches(edge: int) -> bool:
            size = self._resized(height, width, edge, enlarges=True)
            return size[0] * size[1] >= least

        index = bisect_left(edges, True, key=reaches)
        size = self._resized(height, width, edges[min(index, len(edges) - 1)], enlarges=True)
        area = size[0] * size[1]
        if index < len(edges) and (most is None or area <= most):
            return size
        raise InvalidRequest(
            f"min_pixels is {least}; this model encodes this image at {area} pixels or less"
            if index == len(edges)
            else f"min_pixels is {least} and max_pixels is {most}; this model encodes this image at {area} "
            "pixels, or at fewer than min_pixels",
            param="min_pixels",
        )

    def _resized(self, height: int, width: int, edge: int | None = None, *, enlarges: bool = False) -> Pair:
        """(height, width) of nearly the same aspect within the model's limit, rounded up to whole steps.

        The order of the floating-point operations must not change: the reference is Hugging Face's processor.
        Where that computes an edge without a visual token, this one has the smallest edge with a token.

        edge: a further limit of both edges, before rounding; None: there is none.
        enlarges: whether a smaller image becomes as large as the limits allow.
        """
        assert self.limit is not None
        tall, wide = self.limit if edge is None else (min(limit, edge) for limit in self.limit)
        ratio = max(height / tall, width / wide)
        if ratio > 1 or enlarges:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return self._round_up(height), self._round_up(width)

    def _round_up(self, edge: int) -> int:
        return max(self.least_edge, -(-edge // self.step) * self.step)

    def _tokens(self, size: Pair) -> int:
        return (size[0] // self.factor) * (size[1] // self.factor)

    def _as_is(self, height: int, width: int, bounds: Bounds) -> Pair:
        if min(height, width) < self.factor:
            raise InvalidImage(
                f"it is {width}x{height} pixels; this model does not resize (do_resize is false), so both "
                f"edges must have at least {self.factor} pixels"
            )
        expect_area(height * width, bounds)
        return height, width


def build(preprocessor: Config, model: Config, processor: Config) -> PixtralProcessor:
    settings = Settings(preprocessor)
    patch, merge = read_shape(settings, model, processor)
    # The setting `patch_size` has no effect: the model's own class resizes to whole visual tokens.
    settings.raw("patch_size")
    row_end = str(processor.get("image_break_token") or "[IMG_BREAK]")
    image_end = str(processor.get("image_end_token") or "[IMG_END]")
    marker = str(processor.get("image_token") or "[IMG]")
    return read_processor(settings, patch * merge, patch, merge, (marker, row_end, image_end))


def read_processor(
    settings: Settings, step: int, patch: int, merge: int, texts: tuple[str, str, str]
) -> PixtralProcessor:
    """Read the rest of a checkpoint's settings. Raises CheckpointError or UnsupportedModel.

    step, patch, merge: as in `PixtralProcessor`.
    texts: of a visual token, between rows, and after the last row.
    """
    settings.processor_type(_TYPES, _TYPES[0])
    size = settings.size("size", Size(longest_edge=1024))
    longest = None if size is None else size.longest_edge
    limit = (longest, longest) if longest else None if size is None else size.fixed_size
    if limit is None:
        raise settings.error("size", size, "longest_edge, or height and width")
    palette = Palette.read(settings)
    resample = read_filter(settings, Resampling.BICUBIC)
    resizes = settings.flag("do_resize", True)
    # Padding makes the sizes of a batch equal. Here every image is its own batch.
    settings.flag("do_pad", True)
    # Only `do_center_crop` reads it, which is refused.
    settings.raw("crop_size")
    settings.close()
    return PixtralProcessor(palette, resample, limit if resizes else None, step, patch, merge, *texts)


def read_shape(settings: Settings, model: Config, processor: Config) -> tuple[int, int]:
    """The sides of a patch in pixels, and of the square that becomes a token in patches.

    The model's config has them. If processor_config.json has them, too, they must be equal. Raises
    CheckpointError.
    """
    sides = []
    for name, config, default in (
        ("patch_size", section(model, "vision_config"), 16),
        ("spatial_merge_size", model, 1),
    ):
        known, own = config.get(name), processor.get(name)
        sides.append(settings.positive(name, next(x for x in (own, known, default) if x is not None)))
        expect_equal(name, sides[-1], known)
    return sides[0], sides[1]


def build_lighton_ocr(preprocessor: Config, model: Config, processor: Config) -> PixtralProcessor:
    settings = Settings(preprocessor)
    patch, merge = read_shape(settings, model, processor)
    marker = str(processor.get("image_token") or "<|image_pad|>")
    return read_processor(settings, _step(settings, patch * merge), patch, merge, (marker, "", ""))


def _step(settings: Settings, factor: int) -> int:
    """The setting `patch_size`: the edges of a resized picture are multiples of it.

    If it is smaller than the side of a visual token, patches beyond the last whole token become no token.

    factor: side in pixels of the square that becomes one visual token.
    """
    size = settings.size("patch_size", Size(height=16, width=16))
    edges = None if size is None else size.fixed_size
    if edges is None or edges[0] != edges[1] or edges[0] > factor:
        raise settings.error("patch_size", size, f"one integer, or equal height and width, up to {factor}")
    return edges[0]
