"""Resize, then center crop: how CLIP-like processors bring a picture to the tower's size."""

from __future__ import annotations

from dataclasses import dataclass

import PIL.Image
from PIL.Image import Resampling

from fovea.engine.vision.processor.pixels import (
    Bytes,
    Color,
    center_crop,
    read_filter,
    resize,
    resize_squared,
    to_bytes,
)
from fovea.engine.vision.processor.settings import Settings
from fovea.engine.vision.processor.size import Size, with_shortest_edge


@dataclass(frozen=True, slots=True)
class Fit:
    """size, crop: None where that step is off."""

    resample: Resampling
    size: Size | None
    crop: tuple[int, int] | None

    @classmethod
    def read(cls, settings: Settings, size: Size, crop: Size | None) -> Fit:
        """size, crop: defaults of the processor class; without a default crop, cropping is off unless asked for."""
        square = settings.flag("default_to_square", False)
        wanted = settings.size("size", size, square=square)
        if wanted is not None and not (wanted.fixed or wanted.shortest_edge):
            raise settings.wrong("size", wanted, "height and width, or shortest_edge")
        cut = settings.size("crop_size", crop)
        crops = settings.flag("do_center_crop", crop is not None)
        if crops and (cut is None or cut.fixed is None):
            raise settings.wrong("crop_size", cut, "height and width")
        return cls(
            read_filter(settings, Resampling.BICUBIC),
            wanted if settings.flag("do_resize", True) else None,
            cut.fixed if cut and crops else None,
        )

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after the resize."""
        if self.size is None:
            return height, width
        if self.size.shortest_edge:
            return with_shortest_edge(height, width, self.size.shortest_edge, self.size.longest_edge)
        return self.size.fixed or (height, width)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after both steps."""
        return self.crop or self.resized(height, width)

    @property
    def fixed(self) -> tuple[int, int] | None:
        """(height, width) that every picture ends at, if there is such a size."""
        return self.crop or (self.size.fixed if self.size and not self.size.shortest_edge else None)

    def apply(self, source: PIL.Image.Image, border: Color | None = None) -> Bytes:
        """To (height, width, 3). border: first make the picture square with a border of this color."""
        if border is None:
            target = self.resized(source.height, source.width)
            pixels = to_bytes(resize(source, *target, self.resample))
        else:
            target = self.resized(max(source.size), max(source.size))
            pixels = to_bytes(resize_squared(source, border, *target, self.resample))
        return center_crop(pixels, *self.crop) if self.crop else pixels

    @property
    def key(self) -> str:
        return f"{self.resample.name};fit={self.size and self.size.key};crop={self.crop}"
