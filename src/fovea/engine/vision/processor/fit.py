"""Brings a picture to the tower's size as CLIP-like processors do: a resize, then a center crop."""

from __future__ import annotations

from dataclasses import dataclass

from PIL.Image import Resampling

from fovea.engine.vision.processor.pixels import (
    Bytes,
    Color,
    center_crop,
    read_filter,
    resize,
    resize_squared,
)
from fovea.engine.vision.processor.settings import Settings
from fovea.engine.vision.processor.size import Size, with_shortest_edge


@dataclass(frozen=True, slots=True)
class Fit:
    """The resize and the center crop of a checkpoint.

    resample: the filter of the resize.
    size: target of the resize; None: pictures are not resized.
    crop: (height, width) after the crop, in pixels; None: pictures are not cropped.
    """

    resample: Resampling
    size: Size | None
    crop: tuple[int, int] | None

    @classmethod
    def read(
        cls, settings: Settings, size: Size, crop: Size | None, resample: Resampling = Resampling.BICUBIC
    ) -> Fit:
        """Read both steps from a checkpoint's settings. Raises CheckpointError.

        size: default of the processor class.
        crop: default of the processor class; None: it crops only if the settings say so.
        resample: default of the processor class.
        """
        square = settings.flag("default_to_square", False)
        wanted = settings.size("size", size, square=square)
        if wanted is not None and not (wanted.fixed_size or wanted.shortest_edge):
            raise settings.error("size", wanted, "height and width, or shortest_edge")
        cut = settings.size("crop_size", crop)
        crops = settings.flag("do_center_crop", crop is not None)
        if crops and (cut is None or cut.fixed_size is None):
            raise settings.error("crop_size", cut, "height and width")
        return cls(
            read_filter(settings, resample),
            wanted if settings.flag("do_resize", True) else None,
            cut.fixed_size if cut and crops else None,
        )

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after the resize."""
        if self.size is None:
            return height, width
        if self.size.shortest_edge:
            return with_shortest_edge(height, width, self.size.shortest_edge, self.size.longest_edge)
        return self.size.fixed_size or (height, width)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after both steps."""
        return self.crop or self.resized_size(height, width)

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """(height, width) of every output, if it does not depend on the picture; else None."""
        return self.crop or (self.size.fixed_size if self.size and not self.size.shortest_edge else None)

    def apply(self, source: Bytes, border: Color | None = None) -> Bytes:
        """Apply both steps to bytes (h, w, 3). Returns bytes (height, width, 3).

        border: color of a border that first makes the picture square; None: no border.
        """
        if border is None:
            target = self.resized_size(*source.shape[:2])
            pixels = resize(source, *target, self.resample)
        else:
            side = max(source.shape[:2])
            pixels = resize_squared(source, border, *self.resized_size(side, side), self.resample)
        return center_crop(pixels, *self.crop) if self.crop else pixels

    @property
    def key(self) -> str:
        return f"{self.resample.name};fit={self.size and self.size.key};crop={self.crop}"
