"""Encodes LLaVA-NeXT's view of the whole image, and the tiles that a question needs (`fovea.relevance`).

The whole is encoded first, because the coupling with the question is computed from it. Tiles of which no
token is kept are not encoded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fovea.engine.regions.relevance_model import RelevanceModel
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.processor.surveys import read_survey
from fovea.engine.vision.processor.tile_regions import tiling
from fovea.engine.vision.slices import Slices, UpcomingImages
from fovea.engine.vision.tiler import Tiler
from fovea.relevance.policy import Tiling, attend_tiles, kept_tokens, needed_tiles


class TileRegionEncoder:
    """Encodes images region by region, for models with tiles: a region is a tile."""

    def __init__(self, model: Tiler, relevance: RelevanceModel) -> None:
        self._model = model
        self._relevance = relevance

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        """Encode an image whose plan has the method `relevance`.

        Returns its visual tokens, with their numbers among all of the image's tokens.

        ahead: not used, because tiles are not shared between images.
        """
        plan, reduction = image.plan, image.plan.reduction
        assert reduction is not None
        side = self._model.side
        tiles = tiling(plan, side, reduction.full_tokens)
        survey = read_survey(image, image.arrays["pixel_values"].shape[-1] // side)
        [base] = yield from self._encode_tiles(image, [0])
        patches = base[len(base) - side**2 :]
        realization = self._relevance.realize(
            survey,
            reduction,
            plan.tokens,
            self._relevance.tensions(survey, reduction, plan.tokens),
            self._relevance.couple(survey, reduction, (side, side), patches),
            lambda relevance, content, total: attend_tiles(relevance, content, total, tiles),
        )
        numbers = needed_tiles(realization.allocation, tiles)
        encoded = []
        if numbers:
            encoded = yield from self._encode_tiles(
                image, [1 + self._tile_index(number, plan.grid, tiles) for number in numbers]
            )
        rows = self._assemble(dict(zip(numbers, encoded, strict=True)), plan.grid, tiles, base)
        kept = torch.tensor(kept_tokens(realization.allocation, tiles), device=base.device)
        embeds = torch.cat((base, rows))[kept]
        return VisualFeatures(embeds, places=kept[:, None].to(torch.int32))

    def _encode_tiles(self, image: ProcessedImage, numbers: list[int]) -> Slices[list[Tensor]]:
        """Projected patches of some tiles, (patches, hidden) each.

        The result for a tile does not depend on the others.
        """
        arrays = {"pixel_values": image.arrays["pixel_values"][numbers]}
        patches = yield from self._model.tiles(replace(image, arrays=arrays))
        return list(patches)

    def _assemble(
        self, encoded: dict[int, Tensor], grid: tuple[int, int, int], tiles: Tiling, base: Tensor
    ) -> Tensor:
        """The picture's cells with a newline after each row, (rows * (columns + 1), hidden).

        Cells of tiles that were not encoded are zeros.
        """
        side, hidden = tiles.side, base.shape[1]
        canvas = base.new_zeros((grid[1] * grid[2], side * side, hidden))
        for number, tile in encoded.items():
            canvas[self._tile_index(number, grid, tiles)] = tile
        picture = self._model.picture(canvas, grid)
        picture = picture[:, tiles.top : tiles.top + tiles.rows, tiles.left : tiles.left + tiles.columns]
        ends = self._model.newline[:, None, None].expand(-1, tiles.rows, 1)
        return torch.cat((picture, ends), dim=-1).flatten(1).transpose(0, 1)

    @staticmethod
    def _tile_index(number: int, grid: tuple[int, int, int], tiles: Tiling) -> int:
        """Index of a region's tile among all tiles. Tiles that only have border are not regions."""
        first_row, first_column = tiles.top // tiles.side, tiles.left // tiles.side
        across = -(-(tiles.left + tiles.columns) // tiles.side) - first_column
        row, column = divmod(number, across)
        return (first_row + row) * grid[2] + first_column + column
