"""Tiles that are worth it: LLaVA-NeXT's view of the whole, and of its tiles those that a question needs (`fovea.relevance`).

The whole is encoded first, because what the question is coupled to is read off it; tiles of which nothing is kept never are.
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
from fovea.relevance.tiles import Tiling, attend_tiles, kept_tokens, needed_tiles


class TileRegionEncoder:
    def __init__(self, model: Tiler, relevance: RelevanceModel) -> None:
        self._model = model
        self._relevance = relevance

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        """Visual tokens of an image whose plan says `relevance`, with their numbers among all of its tokens."""
        plan, reduction = image.plan, image.plan.reduction
        assert reduction is not None
        side = self._model.side
        tiles = tiling(plan, side, reduction.full_tokens)
        survey = read_survey(image, image.arrays["pixel_values"].shape[-1] // side)
        [base] = yield from self._tiles(image, [0])
        patches = base[len(base) - side**2 :]
        realized = self._relevance.realize(
            survey,
            reduction,
            plan.tokens,
            self._relevance.tensions(survey, reduction, plan.tokens),
            ((side, side), patches),
            lambda worth, held, total: attend_tiles(worth, held, total, tiles),
        )
        numbers = needed_tiles(realized.allocation, tiles)
        encoded = []
        if numbers:
            encoded = yield from self._tiles(
                image, [1 + self._place(number, plan.grid, tiles) for number in numbers]
            )
        rows = self._picture(dict(zip(numbers, encoded, strict=True)), plan.grid, tiles, base)
        kept = torch.tensor(kept_tokens(realized.allocation, tiles), device=base.device)
        embeds = torch.cat((base, rows))[kept]
        return VisualFeatures(embeds, places=kept[:, None].to(torch.int32))

    def _tiles(self, image: ProcessedImage, numbers: list[int]) -> Slices[list[Tensor]]:
        """Projected patches of some tiles, each (patches, hidden). What is computed for a tile does not depend on the others."""
        arrays = {"pixel_values": image.arrays["pixel_values"][numbers]}
        made = yield from self._model.tiles(replace(image, arrays=arrays))
        return list(made)

    def _picture(
        self, encoded: dict[int, Tensor], grid: tuple[int, int, int], tiles: Tiling, base: Tensor
    ) -> Tensor:
        """Cells of the picture with a newline after each row, (rows * (columns + 1), hidden); zeros where no tile was encoded."""
        side, hidden = tiles.side, base.shape[1]
        laid = base.new_zeros((grid[1] * grid[2], side * side, hidden))
        for number, tile in encoded.items():
            laid[self._place(number, grid, tiles)] = tile
        picture = self._model.picture(laid, grid)
        picture = picture[:, tiles.top : tiles.top + tiles.rows, tiles.left : tiles.left + tiles.columns]
        ends = self._model.newline[:, None, None].expand(-1, tiles.rows, 1)
        return torch.cat((picture, ends), dim=-1).flatten(1).transpose(0, 1)

    @staticmethod
    def _place(number: int, grid: tuple[int, int, int], tiles: Tiling) -> int:
        """A region's tile among all: those that hold nothing but border are no regions."""
        first_row, first_column = tiles.top // tiles.side, tiles.left // tiles.side
        across = -(-(tiles.left + tiles.columns) // tiles.side) - first_column
        row, column = divmod(number, across)
        return (first_row + row) * grid[2] + first_column + column
