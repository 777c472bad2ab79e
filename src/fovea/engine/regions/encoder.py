"""Encodes an image as its plan says: all of its tokens, some of them, or some of its regions.

If tokens are left out of the encoder's output, the whole output stays in the cache under its own key. So
another question, method or ratio needs no encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fovea.core.measure import stage
from fovea.engine.cache.embeddings import EmbeddingCache, RegionCache
from fovea.engine.models.base import VisionLanguageModel, value_tensor
from fovea.engine.models.look_heads import Head
from fovea.engine.reduce.base import ReductionInput
from fovea.engine.reduce.methods import reducer
from fovea.engine.regions.any_size import AnySizeRegionEncoder
from fovea.engine.regions.relevance_model import RelevanceModel
from fovea.engine.vision.encoding import Slices, Tiler, UpcomingImages, VisualFeatures
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage, Reduction
from fovea.engine.vision.processor.regions import read_survey, tiling
from fovea.engine.visual_budget.methods import METHODS
from fovea.relevance.policy import Tiling, attend_tiles, kept_tokens, needed_tiles


class VisualEncoder:
    """The encoder of one model, with all reductions.

    relevance: the model's relevance, and its latest results.
    regions: the cache of encoded regions.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        processor: ImageProcessor,
        outputs: EmbeddingCache[VisualFeatures],
        regions: RegionCache[VisualFeatures],
        *,
        heads: Sequence[Head] | None = None,
    ) -> None:
        """outputs: the encoder-output cache, for whole outputs.

        heads: the heads that look for what a question is about; None: those of `look.usual_heads`.
        """
        self._model = model
        self._capabilities = processor.capabilities
        self._outputs = outputs
        self.relevance = RelevanceModel(model, heads)
        self.regions = regions
        self._region_encoder = self._make_region_encoder()

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        """Encode an image, slice by slice. ahead: next images, whose regions may fill up a batch."""
        reduction = image.plan.reduction
        if reduction is None:
            return self._model.encode_slices(image)
        if METHODS[reduction.method].by_region:
            assert self._region_encoder is not None
            return self._region_encoder.slices(image, ahead)
        return self._encode_reduced(image, reduction)

    def _make_region_encoder(self) -> RegionEncoder | None:
        model, processor = self._model, self._capabilities.any_size
        tower, tiler = model.any_size_tower(), model.tiler()
        if tower is not None and processor is not None:
            return AnySizeRegionEncoder(
                tower,
                processor,
                self.relevance,
                lambda array: value_tensor(array).to(model.device, model.dtype),
                self.regions,
                model.visual_token_bytes,
                self._encode_whole,
                model.static_encoder(),
                model.engines,
            )
        return None if tiler is None else TileRegionEncoder(tiler, self.relevance)

    def _encode_reduced(self, image: ProcessedImage, reduction: Reduction) -> Slices[VisualFeatures]:
        """Encode the whole image, then leave out tokens."""
        plain = self._without_reduction(image)
        whole = yield from self._encode_whole(image)
        grid = self._token_grid(plain.plan.grid, reduction.full_tokens)
        with stage("reduce"):
            inputs = self._reduction_input(plain, whole, grid, reduction)
            tokens = reducer(reduction.method).reduce(inputs, image.plan.tokens)
        index = tokens.index
        places = (
            torch.stack((index // grid[1], index % grid[1]), dim=1) if self._model.merge else index[:, None]
        )
        return VisualFeatures(
            tokens.embeds,
            tuple(map(tokens.gather, whole.deepstack)),
            created_at=whole.created_at,
            places=places.to(torch.int32),
        )

    def _encode_whole(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        """All tokens of an image with a reduction: from the cache, or encoded now and stored there."""
        reduction = image.plan.reduction
        assert reduction is not None
        if reduction.whole_key in self._outputs:
            whole = self._outputs.get(reduction.whole_key)
        else:
            whole = yield from self._model.encode_slices(self._without_reduction(image))
        self._outputs.keep(reduction.whole_key, whole, whole.nbytes, whole.created_at)
        yield None
        return whole

    def _without_reduction(self, image: ProcessedImage) -> ProcessedImage:
        """The image with the plan and arrays that it has without a reduction."""
        reduction = image.plan.reduction
        assert reduction is not None
        if self._capabilities.regions is not None:
            return self._capabilities.regions.whole(image)
        return replace(image, plan=replace(image.plan, tokens=reduction.full_tokens, reduction=None))

    def _token_grid(self, grid: tuple[int, int, int], full: int) -> tuple[int, int]:
        """Rows and columns of visual tokens. For models without M-RoPE, all tokens are in one row.

        grid: the plan's. full: tokens of the image.
        """
        merge = self._model.merge
        return (grid[1] // merge, grid[2] // merge) if merge else (1, full)

    def _reduction_input(
        self, image: ProcessedImage, whole: VisualFeatures, grid: tuple[int, int], reduction: Reduction
    ) -> ReductionInput:
        """The inputs that the reduction's method needs."""
        needs = METHODS[reduction.method].needs
        inputs = ReductionInput(whole.embeds, grid, reduction.whole_key)
        if "query" in needs and reduction.word_ids:
            inputs = replace(inputs, query=word_embeddings(self._model, reduction.word_ids))
        if "attention" in needs or "keys" in needs:
            from fovea.engine.reduce.probe import encoder_taps

            tower = self._model.any_size_tower()
            assert tower is not None
            taps = encoder_taps(tower, self._model.array_tensor(image), image.plan.grid)
            inputs = replace(inputs, attention=taps.attention, keys=taps.keys)
        if "probe" in needs:
            from fovea.engine.reduce.probe import run_probe

            # Without a question, one image token follows the image, and its attention counts.
            assert self._model.image_token_id is not None
            words = reduction.word_ids or (self._model.image_token_id,)
            inputs = replace(inputs, probe=run_probe(self._model, (), whole, words, grid))
        return inputs


class TileRegionEncoder:
    """Encodes images region by region, for models with tiles: a region is a tile.

    The whole is encoded first, because the model looks at it with the question. Tiles that
    keep no token are not encoded.
    """

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
        asked = None
        if reduction.look is not None:
            view = yield from self._relevance.look(reduction.look, VisualFeatures(base), (1, len(base)))
            asked = None if view is None else view[0, len(base) - side**2 :].reshape(side, side)
        realization = self._relevance.realize(
            survey,
            reduction,
            plan.tokens,
            self._relevance.tensions(survey, reduction, asked),
            asked,
            lambda cells, total: attend_tiles(cells, total, tiles),
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


class RegionEncoder(Protocol):
    """Encodes an image region by region."""

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        """Encode an image, slice by slice. ahead: next images, whose regions may fill up a batch."""
        ...


def word_embeddings(model: VisionLanguageModel, ids: Sequence[int]) -> Tensor:
    """The decoder's input embeddings of token ids, (Q, D)."""
    rows: Tensor = model.decoder.embed_tokens(torch.tensor(ids, device=model.device))
    return rows
