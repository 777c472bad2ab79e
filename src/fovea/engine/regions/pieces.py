"""Pieces: views of images with their pixels, and their names in the region cache."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.engine.vision.processor.base import AnySizeProcessor, ProcessedImage
from fovea.engine.vision.processor.pixels import resize
from fovea.relevance.realizing import Shape, View

Pixels = NDArray[np.uint8]
MAX_NAMES = 8192
"""Names of so many recent views are remembered, so that their pixels are not needed to compute them again."""


@dataclass(slots=True, eq=False)
class Piece:
    """A view of an image, with its pixels and its name in the region cache.

    grid: rows and columns of the image's full grid, in tokens.
    relevance: relevance of the view's region, in [0, 1].
    name: key in the region cache.
    pixels: the view's pixels, (height, width, 3); None: not cut out yet.
    """

    image: ProcessedImage
    grid: Shape
    view: View
    relevance: float
    name: str
    pixels: Pixels | None


class Cutter:
    """Cuts views out of images and names them. Not thread-safe."""

    def __init__(self, processor: AnySizeProcessor, *, crop_invariant: bool) -> None:
        """crop_invariant: whether a crop's output is independent of its place in the image, in this tower."""
        self._processor = processor
        self._crop_invariant = crop_invariant
        self._names: OrderedDict[tuple[str, object, Shape], str] = OrderedDict()

    def piece(self, image: ProcessedImage, grid: Shape, view: View, relevance: float) -> Piece:
        """Make the piece of a view.

        The name depends on the pixels, and on the place if the tower's output does. Names are remembered, so
        a further question about an image needs no pixels.

        grid: rows and columns of the image's full grid, in tokens.
        relevance: relevance of the view's region, in [0, 1].
        """
        assert image.plan.reduction is not None
        name, pixels = self.cached_name(image, view), None
        if name is None:
            pixels = self._cut(image, view)
            name = self._make_name(pixels, grid, view, image.plan.reduction.salt)
            if len(self._names) >= MAX_NAMES:
                self._names.popitem(last=False)
            self._names[image.plan.reduction.whole_key, view.region, view.shape] = name
        return Piece(image, grid, view, relevance, name, pixels)

    def cached_name(self, image: ProcessedImage, view: View) -> str | None:
        """A view's name if it is remembered, else None."""
        assert image.plan.reduction is not None
        key = image.plan.reduction.whole_key, view.region, view.shape
        name = self._names.get(key)
        if name is not None:
            self._names.move_to_end(key)
        return name

    def cut(self, piece: Piece) -> Pixels:
        """The piece's pixels, (height, width, 3). They are cut out at the first call."""
        if piece.pixels is None:
            piece.pixels = self._cut(piece.image, piece.view)
        return piece.pixels

    def patches(self, piece: Piece) -> NDArray[Any]:
        """The tower's input of a piece, (patches, values)."""
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
        size = view.shape[0] * side, view.shape[1] * side
        return resize(part, *size, self._processor.resample)

    def _make_name(self, pixels: Pixels, grid: Shape, view: View, salt: str) -> str:
        """Return the name of a view in the region cache.

        The salt is part of the name, so no tenant finds another's regions. So is the place, for towers with
        learned positions.
        """
        digest = hashlib.sha256(salt.encode() + b"\x00")
        digest.update(pixels.data)
        place = "" if self._crop_invariant else f"{view.region} of {grid}"
        return f"{digest.hexdigest()} {view.shape} {place}"
