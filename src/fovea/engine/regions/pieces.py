"""Views of images as pictures of their own: cut out, resized, and named by what they show."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from fovea.engine.vision.processor.base import AnySizeProcessor, ProcessedImage
from fovea.relevance.realizing import Shape, View

Pixels = NDArray[np.uint8]
MAX_NAMES = 8192
"""How many views' names are known without their pixels, the latest."""


@dataclass(slots=True, eq=False)
class Piece:
    """A view of an image whose full grid is `grid`. name: its key among regions. worth: its relevance, in [0, 1]. cut: its
    pixels (height, width, 3), where they were needed already."""

    image: ProcessedImage
    grid: Shape
    view: View
    worth: float
    name: str
    cut: Pixels | None


class Cutter:
    """crop_invariant: whether the tower makes the same of a picture wherever in a larger one it was cut out. For one thread."""

    def __init__(self, processor: AnySizeProcessor, *, crop_invariant: bool) -> None:
        self._processor = processor
        self._crop_invariant = crop_invariant
        self._names: OrderedDict[tuple[str, object, Shape], str] = OrderedDict()

    def piece(self, image: ProcessedImage, grid: Shape, view: View, worth: float) -> Piece:
        """A name depends on the pixels alone, and where places count, on the place; but who asks once more about an image
        need not cut it up to know it."""
        assert image.plan.reduction is not None
        name, cut = self.known(image, view), None
        if name is None:
            cut = self._cut(image, view)
            name = self._named(cut, grid, view, image.plan.reduction.salt)
            if len(self._names) >= MAX_NAMES:
                self._names.popitem(last=False)
            self._names[image.plan.reduction.whole_key, view.region, view.shape] = name
        return Piece(image, grid, view, worth, name, cut)

    def known(self, image: ProcessedImage, view: View) -> str | None:
        """A view's name, if somebody asked before."""
        assert image.plan.reduction is not None
        key = image.plan.reduction.whole_key, view.region, view.shape
        name = self._names.get(key)
        if name is not None:
            self._names.move_to_end(key)
        return name

    def cut(self, piece: Piece) -> Pixels:
        """Its pixels, from here on its own."""
        if piece.cut is None:
            piece.cut = self._cut(piece.image, piece.view)
        return piece.cut

    def patches(self, piece: Piece) -> NDArray[np.float32]:
        """As the tower takes them, (patches, values)."""
        return self._processor.patches(self.cut(piece))

    def _cut(self, image: ProcessedImage, view: View) -> Pixels:
        side, region = self._processor.factor, view.region
        part = image.arrays["rgb"][
            region.row * side : (region.row + region.rows) * side,
            region.column * side : (region.column + region.columns) * side,
        ]
        part = np.ascontiguousarray(part)
        if view.native:
            return part
        size = view.shape[1] * side, view.shape[0] * side
        return np.asarray(PIL.Image.fromarray(part).resize(size, self._processor.resample))

    def _named(self, cut: Pixels, grid: Shape, view: View, salt: str) -> str:
        """A tenant's regions are its own. Where a tower has learned positions, a region's place is part of what it is."""
        digest = hashlib.sha256(salt.encode() + b"\x00")
        digest.update(cut.data)
        where = "" if self._crop_invariant else f"{view.region} of {grid}"
        return f"{digest.hexdigest()} {view.shape} {where}"
