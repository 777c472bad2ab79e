"""The image processor of LLaVA-1.5: every image becomes one square and a fixed number of tokens.

Source: "Improved Baselines with Visual Instruction Tuning" (arXiv:2310.03744).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import CLIP_MEAN, CLIP_STD, HALF, Fit, Palette, picture
from fovea.engine.vision.processor.settings import Config, Settings, Size, Tower, expect_equal
from fovea.engine.vision.processor.sizes import expect_dimensions, expect_fixed, read_bounds

_TYPES = ("LlavaImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor")


@dataclass(frozen=True, slots=True)
class LlavaProcessor:
    """Plans and prepares images for LLaVA-1.5.

    Budgets: `detail` has no effect, because the architecture has one resolution. A bound in pixels that
        excludes this resolution is refused. Without a border, images more elongated than 200:1 are refused:
        to resize their shortest edge would fill the memory.

    palette: normalisation of the pixels.
    fit: resize and crop.
    background: color of the border that makes the source square first; None: no border.
    height, width: size of the encoder's input, in pixels.
    patch: side of a patch, in pixels.
    tokens: visual tokens of every image.
    marker: text of one visual token.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    palette: Palette
    fit: Fit
    background: tuple[int, int, int] | None
    height: int
    width: int
    patch: int
    tokens: int
    marker: str

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        expect_fixed(read_bounds(budget), self.height * self.width, "this architecture (LLaVA-1.5)")
        expect_dimensions(width, height, aspect=self.background is None)
        side = max(height, width)
        resized = (
            self.fit.resized_size(height, width)
            if self.background is None
            else self.fit.resized_size(side, side)
        )
        grid = (1, self.height // self.patch, self.width // self.patch)
        key = f"llava;{resized[0]}x{resized[1]};{self.fit.key};{self.palette.key};square={self.background}"
        return VisualPlan(width, height, self.tokens, grid, self.marker * self.tokens, key, (resized,))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        pixels = self.fit.apply(picture(image), border=self.background)
        arrays = {"pixel_values": self.palette.tiles([pixels])}
        return ProcessedImage(image.identity, plan, arrays)


def build(preprocessor: Config, model: Config, processor: Config) -> LlavaProcessor:
    settings = Settings(preprocessor)
    kind = settings.processor_type(_TYPES, _TYPES[0])
    siglip = kind == "SiglipImageProcessor"
    square = Size(height=224, width=224)
    fit = Fit.read(settings, square if siglip else Size(shortest_edge=224), None if siglip else square)
    mean, std = (HALF, HALF) if siglip else (CLIP_MEAN, CLIP_STD)
    palette = Palette.read(settings, mean, std)
    # In LLaVA's own class, `do_pad` makes the source square. In the others, it has no effect on a single
    # image.
    pads = settings.flag("do_pad", False) and kind == "LlavaImageProcessor"
    settings.close()
    if fit.fixed_size is None:
        raise CheckpointError(
            "the image processor neither crops nor resizes to a fixed size, which LLaVA needs"
        )
    tower = Tower.read(model, processor, image_size=336, patch_size=14, strategy="default")
    height, width = fit.fixed_size
    for edge in fit.fixed_size:
        expect_equal("image_size", edge, tower.image_size)
    tokens = tower.rows((height // tower.patch_size) * (width // tower.patch_size))
    marker = str(processor.get("image_token") or "<image>")
    return LlavaProcessor(
        palette, fit, palette.average if pads else None, height, width, tower.patch_size, tokens, marker
    )
