"""Encodes an image as views: one of the whole image at low resolution, and regions at their own resolutions.

It is for vision encoders that take pictures of any size. The view of the whole image is encoded first,
because the coupling with the question is computed from it. Then the regions are chosen, and those that are
not in the region cache are encoded, in batches of one shape. If a batch leaves room in a slice, it also gets
views of that shape of images that come next. These are then in the cache when their turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.cache.regions import RegionCache
from fovea.engine.reduce.base import unit_rows
from fovea.engine.reduce.dpp import cells, choose_by_bands, dpp_kernel
from fovea.engine.regions.pieces import Cutter, Piece
from fovea.engine.regions.relevance_model import RelevanceModel
from fovea.engine.vision.any_size import AnySizeTower
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import AnySizeProcessor, ProcessedImage, Reduction
from fovea.engine.vision.processor.surveys import read_survey
from fovea.engine.vision.slices import Slices, UpcomingImages, cuts, slice_rows
from fovea.engine.visual_budget.methods import METHODS
from fovea.relevance.balancing import Tensions
from fovea.relevance.pipeline import Realization, Survey
from fovea.relevance.policy import Allocation, attend, first_view
from fovea.relevance.realizing import Shape, View, patch_fractions, whole
from fovea.relevance.texture import Map, Mask

Array = NDArray[np.float32]
LOOKAHEAD_IMAGES = 4
"""At most so many of the next images are examined for views that fill up a batch.

Each takes some milliseconds.
"""
MAX_BATCH_PATCHES = 4096
"""Most patches in one pass of the tower, so that a batch of views needs no more memory than a large image."""


@dataclass(frozen=True, slots=True)
class _SurveyedImage:
    """An image with its survey, its tensions and its first view, before anything is encoded.

    first: the view of the whole image.
    """

    image: ProcessedImage
    reduction: Reduction
    survey: Survey
    tensions: Tensions
    first: View


class AnySizeRegionEncoder:
    """Encodes images region by region, for towers that take pictures of any size.

    regions: the region cache. An entry has all tokens of a view, in reading order.
    """

    def __init__(
        self,
        tower: AnySizeTower,
        processor: AnySizeProcessor,
        relevance: RelevanceModel,
        tensor: Callable[[Array], Tensor],
        regions: RegionCache[VisualFeatures],
        token_bytes: int,
        whole: Callable[[ProcessedImage], Slices[VisualFeatures]],
    ) -> None:
        """tensor: turns an array into a tensor of the tower's type and device.

        token_bytes: bytes of the encoder's output per visual token.
        whole: encodes an image with all of its tokens.
        """
        self._tower = tower
        self._factor = processor.factor
        self._cutter = Cutter(processor, crop_invariant=tower.crop_invariant)
        self._relevance = relevance
        self._tensor = tensor
        self._token_bytes = token_bytes
        self._whole = whole
        self.regions = regions

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        """Encode an image whose plan has the method `relevance`.

        Returns its visual tokens, with their places.

        ahead: images whose views may fill up a batch.
        """
        surveyed = self._prepare(image)
        if surveyed.first.native:
            first = yield from self._whole(image)
        else:
            piece = self._cutter.piece(image, surveyed.survey.grid, surveyed.first, 1.0)
            [first] = yield from self._encode([piece], ahead)
        realization = self._realize(surveyed, first)
        views = realization.allocation.layout.views
        if views[0].shape != surveyed.first.shape:
            raise RuntimeError(
                f"the view of the whole was encoded at {surveyed.first.shape}, but the layout has "
                f"{views[0].shape}"
            )
        rest = yield from self._encode(self._region_pieces(surveyed, realization), ahead)
        return _join(views, [first, *rest], realization.allocation.layout.places())

    def _prepare(self, image: ProcessedImage) -> _SurveyedImage:
        """Compute what needs no encoder output: survey, tensions and first view."""
        plan, reduction = image.plan, image.plan.reduction
        assert reduction is not None
        survey = read_survey(image, self._factor)
        tensions = self._relevance.tensions(survey, reduction, plan.tokens)
        shape = first_view(survey.grid, plan.tokens, tensions.compress)
        return _SurveyedImage(image, reduction, survey, tensions, View(whole(*survey.grid), shape, ()))

    def _realize(self, surveyed: _SurveyedImage, first: VisualFeatures) -> Realization:
        """Reuse the layout if this image was already realized with this key. Otherwise realize it."""
        earlier = self._relevance.reuse_realization(surveyed.reduction.key)
        return earlier or self._relevance.realize(
            surveyed.survey,
            surveyed.reduction,
            surveyed.image.plan.tokens,
            surveyed.tensions,
            self._relevance.couple(surveyed.survey, surveyed.reduction, surveyed.first.shape, first.embeds),
            lambda relevance, content, total: attend_with_diversity(
                relevance, content, total, surveyed.tensions.compress, first.embeds
            ),
        )

    def _region_pieces(
        self, surveyed: _SurveyedImage, realization: Realization, shape: Shape | None = None
    ) -> list[Piece]:
        """The pieces of all chosen regions. shape: only those that are encoded at this shape; None: all."""
        allocation = realization.allocation
        scores = dict(zip(allocation.regions, allocation.scores, strict=True))
        return [
            self._cutter.piece(surveyed.image, surveyed.survey.grid, view, scores[view.region])
            for view in allocation.layout.views[1:]
            if shape in (None, view.shape)
        ]

    def _encode(self, pieces: Sequence[Piece], ahead: UpcomingImages) -> Slices[list[VisualFeatures]]:
        """Features of the pieces, in their order: from the cache, or encoded now, one shape at a time."""
        features: dict[str, VisualFeatures] = {}
        missing: dict[Shape, dict[str, Piece]] = {}
        for piece in pieces:
            entry = self.regions.get(piece.name, piece.relevance)
            if entry is None:
                missing.setdefault(piece.view.shape, {})[piece.name] = piece
            else:
                features[piece.name] = entry
        yield
        for shape, by_name in missing.items():
            batchable = list(by_name.values())
            for members in cuts(len(batchable), MAX_BATCH_PATCHES // self._patches(shape)):
                batch = self._fill_batch(batchable[members], shape, ahead)
                features |= yield from self._encode_batch(batch, shape)
        return [features[piece.name] for piece in pieces]

    def _encode_batch(self, pieces: Sequence[Piece], shape: Shape) -> Slices[dict[str, VisualFeatures]]:
        """Encode pieces of one shape in one pass of the tower, and store them in the region cache."""
        merge = self._tower.merge
        patches = np.concatenate([self._cutter.patches(piece) for piece in pieces])
        corners = self._tower.corners
        at = np.concatenate([patch_fractions(one.view, one.grid, merge, corners=corners) for one in pieces])
        size = len(pieces), shape[0] * merge, shape[1] * merge
        names = [(piece.name, piece.relevance) for piece in pieces]
        del pieces  # so that the pixels of other images can be freed during this pass
        embeds, deepstack = yield from self._tower.slices(self._tensor(patches), size, at)
        levels = [torch.split(level, shape[0] * shape[1]) for level in (embeds, *deepstack)]
        features = {}
        for (name, relevance), *parts in zip(names, *levels, strict=True):
            output = VisualFeatures(parts[0].clone(), tuple(part.clone() for part in parts[1:]))
            self.regions.put(name, output, output.nbytes, relevance)
            features[name] = output
        return features

    def _patches(self, shape: Shape) -> int:
        return shape[0] * shape[1] * self._tower.merge**2

    def _fill_batch(self, pieces: Sequence[Piece], shape: Shape, ahead: UpcomingImages) -> list[Piece]:
        """The pieces, and views of this shape of the next images, as many as a slice still has room for.

        Only as many images count as fit into half of the region cache, so that nothing is evicted before its
        turn.
        """
        room = min(MAX_BATCH_PATCHES, slice_rows(self._tower.patch_weight)) // self._patches(shape)
        batch = {piece.name: piece for piece in pieces}
        left = self.regions.capacity // (2 * self._token_bytes)
        for image in islice(ahead() if len(batch) < room else (), LOOKAHEAD_IMAGES):
            left -= image.plan.tokens
            if left < 0 or len(batch) >= room:
                break
            try:
                for piece in self._next_pieces(image, shape)[: room - len(batch)]:
                    self._cutter.cut(piece)
                    batch.setdefault(piece.name, piece)
            except Exception:  # noqa: BLE001 - the image's own turn will report its error
                continue
        return list(batch.values())

    def _next_pieces(self, image: ProcessedImage, shape: Shape) -> list[Piece]:
        """The pieces of an image that are encoded next, if they have this shape and are not in the cache."""
        reduction = image.plan.reduction
        if reduction is None or not METHODS[reduction.method].by_region:
            return []
        surveyed = self._prepare(image)
        if surveyed.first.native:
            return []
        name = self._cutter.cached_name(image, surveyed.first)
        first = None if name is None else self.regions.peek(name)
        if first is None:
            fits = surveyed.first.shape == shape
            pieces = [self._cutter.piece(image, surveyed.survey.grid, surveyed.first, 1.0)] if fits else []
        else:
            pieces = self._region_pieces(surveyed, self._realize(surveyed, first), shape)
        return [piece for piece in pieces if self.regions.peek(piece.name) is None]


def attend_with_diversity(
    relevance: Map, content: Mask, total: int, compress: float, embeds: Tensor
) -> Allocation:
    """Lay out an image by `policy.attend`, but choose tokens of a small image that differ from each other.

    A small image is one native view. Its tokens are chosen by their relevance and by how much they differ,
    because similar tokens carry the same information.

    relevance, content: of each cell, (rows, columns).
    total: tokens to keep.
    compress: the tension between compress and particularize, in [0, 1].
    embeds: tokens of the first view, (tokens, hidden).
    """
    allocation = attend(relevance, content, total, compress)
    view = allocation.layout.views[0]
    if len(allocation.layout.views) > 1 or not view.native:
        return allocation
    quality = torch.from_numpy(1 + relevance).flatten().to(embeds.device)
    rows = unit_rows(embeds) * quality[:, None]
    places = cells(view.shape, rows.device)
    numbers = choose_by_bands(quality, total, lambda band: dpp_kernel(rows[band], places[band]))
    indices = tuple(sorted(numbers.tolist()))
    layout = replace(allocation.layout, views=(replace(view, token_indices=indices),))
    return replace(allocation, layout=layout)


def _join(
    views: Sequence[View], features: Sequence[VisualFeatures], places: NDArray[np.int64]
) -> VisualFeatures:
    """Concatenate the kept tokens of all views. places: rows and columns in the full grid, (tokens, 2)."""
    device = features[0].embeds.device
    kept_rows = [torch.tensor(view.token_indices, device=device) for view in views]
    embeds = torch.cat([one.embeds[rows] for one, rows in zip(features, kept_rows, strict=True)])
    deepstack = tuple(
        torch.cat([one.deepstack[level][rows] for one, rows in zip(features, kept_rows, strict=True)])
        for level in range(len(features[0].deepstack))
    )
    created_at = min(one.created_at for one in features)
    return VisualFeatures(embeds, deepstack, created_at, torch.from_numpy(places.astype(np.int32)).to(device))
