"""The image processor of Qwen-VL, GLM-4V and PaddleOCR-VL: any resolution, in whole merge windows.

Source: Qwen2-VL (arXiv:2409.12191), section 2.1, "naive dynamic resolution". The others have another rule for
small pictures. GLM-4.1V (arXiv:2507.01006, section 2) and GLM-4.6V-Flash have limits for all frames together.
PaddleOCR-VL (arXiv:2510.14528, section 2.2) has no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL.Image import Resampling

from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import (
    Arrays,
    Capabilities,
    ProcessedImage,
    VisualPlan,
    begins_with_attention,
)
from fovea.engine.vision.processor.pixels import Bytes, Palette, Values, picture, read_filter, resize
from fovea.engine.vision.processor.regions import AnySizeRegions
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import (
    LEVEL_TOKENS,
    Bounds,
    SizeRule,
    expect_area,
    expect_dimensions,
    expect_multiples,
    patch_coordinates,
    read_bounds,
    smart_resize,
    trim,
)
from fovea.kernels.native.pictures import Order


@dataclass(frozen=True, slots=True)
class QwenProcessor:
    """Plans and prepares images for Qwen's vision-language models, and for others with such patches.

    Budgets: `max_pixels` is never exceeded, and must not be above the model's own limit. `min_pixels` is met
        as far as whole merge windows within `max_pixels` allow. "low" is at most 64 tokens, "medium" at most
        256.

    palette: normalisation of the pixels.
    resample: the filter that resizes pictures.
    resizes: whether pictures are resized at all.
    min_pixels, max_pixels: the model's own limits of the area after resizing, in pixels.
    patch: side of an encoder patch, in pixels.
    merge: patches along the side of a window that becomes one token.
    frames: how often a still image is repeated in time, to fill the encoder's temporal patch.
    marker: text of one visual token.
    rule: the size to which the family resizes a picture.
    decoder_probe: see `Capabilities`.
    """

    palette: Palette
    resample: Resampling
    resizes: bool
    min_pixels: int
    max_pixels: int
    patch: int
    merge: int
    frames: int
    marker: str
    rule: SizeRule = smart_resize
    decoder_probe: bool = True

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one visual token."""
        return self.patch * self.merge

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            encoder_taps=True,
            any_size=self,
            resize=self if self.resizes else None,
            regions=AnySizeRegions(self),
            decoder_probe=self.decoder_probe,
        )

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        new_height, new_width = self._target(height, width, bounds)
        rows, columns = new_height // self.patch, new_width // self.patch
        tokens = rows * columns // self.merge**2
        key = (
            f"qwen;{new_height}x{new_width};{self.resample.name};{self.palette.key};"
            f"patch={self.patch};merge={self.merge};frames={self.frames}"
        )
        resized = ((new_height, new_width),)
        return VisualPlan(width, height, tokens, (1, rows, columns), self.marker * tokens, key, resized)

    def shrink(self, plan: VisualPlan, budget: PixelBudget, most: int) -> VisualPlan:
        """The largest plan of at most `most` tokens; the plan itself if it has no more."""
        if plan.tokens <= most:
            return plan
        pixels = min(most * self.factor**2, self.max_pixels)
        return self.plan(plan.width, plan.height, PixelBudget(budget.detail, max_pixels=pixels))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        ((height, width),) = plan.sizes
        pixels = resize(picture(image), height, width, self.resample)
        grid = np.array([plan.grid], dtype=np.int64)
        arrays: Arrays = {"pixel_values": self.patches(pixels), "grid_thw": grid}
        return ProcessedImage(image.identity, plan, arrays)

    def patches(self, pixels: Bytes) -> Values:
        """Turn bytes (height, width, 3) into (patches, 3 * patch * patch).

        Patches that merge into one token are neighbours in the result. A still image is not repeated in time
        here: the encoder does it (`layers.linear.PatchLinear`).
        """
        patch, grid = self.patch, (1, pixels.shape[0] // self.patch, pixels.shape[1] // self.patch)
        return self.palette.patches(
            [pixels], Order(patch_coordinates(grid, self.merge) * patch, patch, patch)
        )

    def _target(self, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        low, high = self._limits(bounds)
        if not self.resizes:
            return self._as_is(height, width, bounds)
        size = self.rule(height, width, self.factor, low, high)
        # With the model's own limits, its rounding stays, even if it exceeds them. A client's limits must
        # hold.
        return trim(*size, self.factor, high) if bounds.level in LEVEL_TOKENS or bounds.explicit else size

    def _limits(self, bounds: Bounds) -> tuple[int, int]:
        """Limits of the area after resizing: (least, most) pixels. Raises InvalidRequest."""
        least, most = self.factor**2, self.max_pixels
        if bounds.level in LEVEL_TOKENS:
            most = min(most, LEVEL_TOKENS[bounds.level] * least)
        if bounds.maximum is not None:
            if not least <= bounds.maximum <= most:
                raise bounds.refuse_maximum(f"this model accepts {least} (one token) to {most}")
            most = bounds.maximum
        if bounds.minimum is None:
            return min(self.min_pixels, most), most
        if bounds.minimum > most:
            raise bounds.refuse_minimum(f"this model accepts at most {most}")
        return bounds.minimum, most

    def _as_is(self, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        expect_dimensions(width, height)
        expect_multiples(width, height, self.factor)
        expect_area(height * width, bounds)
        return height, width


@dataclass(frozen=True, slots=True)
class ProcessorClass:
    """The facts about a family's processor class that its settings do not contain.

    types: names of the class in the settings; the first is the default.
    size: the model's own limits of the area, for settings that lack them, in pixels.
    marker: text of one visual token, for processors that do not name it.
    rule: see `QwenProcessor.rule`.
    frames: the only accepted repetition of an image in time; None: it is the encoder's.
    volume: the limits of the settings count the pixels of all repetitions of an image.
    """

    types: tuple[str, ...]
    size: Size
    marker: str
    rule: SizeRule
    frames: int | None = None
    volume: bool = False

    def build(self, preprocessor: Config, model: Config, processor: Config) -> QwenProcessor:
        """Build the processor of a family from a checkpoint's files, see `processor.build`."""
        settings = Settings(preprocessor)
        settings.processor_type(self.types, self.types[0])
        vision = section(model, "vision_config")
        frames = _frames(settings, vision, self.frames)
        low, high = _own_limits(settings, self.size, frames if self.volume else 1)
        patch = _shape(settings, "patch_size", vision, "patch_size", 14)
        result = QwenProcessor(
            palette=Palette.read(settings),
            resample=read_filter(settings, Resampling.BICUBIC),
            resizes=settings.flag("do_resize", True),
            min_pixels=low,
            max_pixels=high,
            patch=patch,
            merge=_shape(settings, "merge_size", vision, "spatial_merge_size", 2),
            frames=frames,
            marker=str(processor.get("image_token") or self.marker),
            rule=self.rule,
            decoder_probe=begins_with_attention(model),
        )
        settings.close()
        if high < result.factor**2:
            raise settings.error("max_pixels", high, f"at least {result.factor**2}, the pixels of one token")
        return result


QWEN = ProcessorClass(
    types=("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor"),
    size=Size(shortest_edge=56 * 56, longest_edge=28 * 28 * 1280),
    marker="<|image_pad|>",
    rule=smart_resize,
)


def _frames(settings: Settings, vision: Config, only: int | None) -> int:
    if only is None:
        return _shape(settings, "temporal_patch_size", vision, "temporal_patch_size", 2)
    frames = settings.count("temporal_patch_size", only)
    if frames != only:
        raise settings.error("temporal_patch_size", frames, str(only))
    return frames


def _own_limits(settings: Settings, default: Size, counted: int) -> tuple[int, int]:
    """The model's own limits of the area, in pixels.

    counted: how often the settings count each pixel. They must be multiples of it.

    Old files name them `min_pixels` and `max_pixels`. New files have them in `size`, under the names of
    edges. The flat names take precedence. The processor class's defaults are used only if `size` is absent.
    """
    size = settings.size("size", default)
    assert size is not None
    low = settings.count("min_pixels", size.shortest_edge or size.min_pixels or 0)
    high = settings.count("max_pixels", size.longest_edge or size.max_pixels or 0)
    if size.fixed_size or not low or not high or low > high:
        raise settings.error(
            "size", size, "areas shortest_edge <= longest_edge in pixels (or min_pixels, max_pixels)"
        )
    if low % counted or high % counted:
        raise settings.error("size", size, f"multiples of {counted}, because every pixel counts so often")
    return low // counted, high // counted


def _shape(settings: Settings, name: str, vision: Config, theirs: str, default: int) -> int:
    """A patch or merge size, which must be equal to the encoder's.

    If the processor's file lacks it, it is the encoder's.

    theirs: name of the setting in the encoder's config.
    """
    known = vision.get(theirs)
    value = settings.count(
        name, default if known is None else settings.positive(f"vision_config.{theirs}", known)
    )
    expect_equal(name, value, known)
    return value


def scaling_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) as `smart_resize` computes it for a picture whose edges are at least `factor`.

    A smaller picture is first scaled until both of its edges are, with fractions cut off. The order of the
    floating-point operations must not change: the reference is GLM's own implementation.

    Raises InvalidImage for an image without pixels or more elongated than 200:1.
    """
    expect_dimensions(width, height, aspect=True)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return smart_resize(height, width, factor, min_pixels, max_pixels)


GLM4V = ProcessorClass(
    types=("Glm4vImageProcessor", "Glm46VImageProcessor"),
    size=Size(shortest_edge=112 * 112, longest_edge=28 * 28 * 15000),
    marker="<|image|>",
    rule=scaling_resize,
    volume=True,
)


def enlarging_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) as `smart_resize` computes it for a picture whose edges are at least `factor`.

    A smaller picture counts with the size at which its shorter edge is `factor`. The rounding and the order
    of the two steps must not change: the reference is PaddleOCR-VL's own implementation.

    Raises InvalidImage for an image without pixels or more elongated than 200:1.
    """
    expect_dimensions(width, height, aspect=True)
    if height < factor:
        height, width = factor, round(width * factor / height)
    if width < factor:
        height, width = round(height * factor / width), factor
    return smart_resize(height, width, factor, min_pixels, max_pixels)


PADDLEOCR_VL = ProcessorClass(
    types=("PaddleOCRVLImageProcessor",),
    size=Size(shortest_edge=384 * 384, longest_edge=1536 * 1536),
    marker="<|IMAGE_PLACEHOLDER|>",
    rule=enlarging_resize,
    frames=1,
)
"""The configuration of the published tower has a temporal patch size of 2, which its code does not use."""
