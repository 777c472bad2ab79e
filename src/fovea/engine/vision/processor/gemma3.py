"""The image processor of Gemma 3: every image becomes one square and a fixed number of tokens.

Source: "Gemma 3 Technical Report" (arXiv 2503.19786), section 2.1. Its "pan and scan", which adds views of
parts of very wide or high images, is off in all published settings, and not supported.
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL.Image import Resampling

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan, begins_with_attention
from fovea.engine.vision.processor.pixels import HALF, Fit, Palette, picture
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import expect_dimensions, expect_fixed, read_bounds

_TYPES = ("Gemma3ImageProcessor",)
_AROUND = ("\n\n<start_of_image>", "<end_of_image>\n\n")
"""Texts before and after the visual tokens of an image."""
_MARKER = "<image_soft_token>"


@dataclass(frozen=True, slots=True)
class Gemma3Processor:
    """Plans and prepares images for Gemma 3.

    Budgets: `detail` has no effect, because the architecture has one resolution. A bound in pixels that
        excludes this resolution is refused.

    palette: normalisation of the pixels.
    fit: the resize to the encoder's input.
    patch: side of a patch, in pixels.
    tokens: visual tokens of every image.
    decoder_probe: see `Capabilities`.
    """

    palette: Palette
    fit: Fit
    patch: int
    tokens: int
    decoder_probe: bool

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(decoder_probe=self.decoder_probe)

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        size = self.fit.output_size(height, width)
        expect_fixed(read_bounds(budget), size[0] * size[1], "this architecture (Gemma 3)")
        expect_dimensions(width, height)
        grid = (1, size[0] // self.patch, size[1] // self.patch)
        key = f"gemma3;{self.fit.key};{self.palette.key}"
        text = f"{_AROUND[0]}{_MARKER * self.tokens}{_AROUND[1]}"
        return VisualPlan(width, height, self.tokens, grid, text, key, (size,), around=_AROUND)

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        arrays = {"pixel_values": self.palette.tiles([self.fit.apply(picture(image))])}
        return ProcessedImage(image.identity, plan, arrays)


def build(preprocessor: Config, model: Config, processor: Config) -> Gemma3Processor:
    settings = Settings(preprocessor)
    settings.processor_type(_TYPES, _TYPES[0])
    fit = Fit.read(settings, Size(height=224, width=224), None, Resampling.BILINEAR)
    palette = Palette.read(settings, HALF, HALF)
    if settings.flag("do_pan_and_scan", False):
        raise settings.error("do_pan_and_scan", True, "false")
    for name in ("min_crop_size", "max_num_crops", "min_ratio_to_activate"):
        settings.raw(f"pan_and_scan_{name}")
    settings.close()
    vision = section(model, "vision_config")
    if fit.fixed_size is None:
        raise CheckpointError("the image processor does not resize to a fixed size, which Gemma 3 needs")
    for edge in fit.fixed_size:
        expect_equal("image_size", edge, vision.get("image_size"))
    tokens = settings.positive("mm_tokens_per_image", model.get("mm_tokens_per_image") or 256)
    if processor.get("image_seq_length") is not None:
        expect_equal("image_seq_length", processor["image_seq_length"], tokens)
    patch = settings.positive("vision_config.patch_size", vision.get("patch_size") or 14)
    return Gemma3Processor(palette, fit, patch, tokens, begins_with_attention(model))
