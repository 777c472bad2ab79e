"""The protocol of models whose images are tiles that can be encoded one by one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.slices import Slices


class Tiler(Protocol):
    """Encodes tiles and lays them out as a picture. `models.llava.TiledLlava` implements it.

    side: patches along an edge of a tile.
    newline: the embedding (hidden,) that ends each row of the picture.
    """

    @property
    def side(self) -> int: ...

    @property
    def newline(self) -> Tensor: ...

    def tiles(self, image: ProcessedImage) -> Slices[Tensor]:
        """Projected patches of the image's tiles, (tiles, patches, hidden)."""
        ...

    def picture(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Tiles (rows * columns, side * side, hidden) put together: (hidden, rows * side, columns * side)."""
        ...
