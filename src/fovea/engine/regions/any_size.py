"""An image seen in parts: the whole at low resolution, and its regions each at a level of their own (`fovea.relevance`).

Works on towers that take any resolution. The whole comes first, because what the question is coupled to is read off it; then
regions are chosen, and those that no question asked for before are encoded, in batches of one shape. Where a batch leaves
room in a slice, views of that shape of other requests' images go along, and are there when their turn comes.
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
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import AnySizeProcessor, ProcessedImage, Reduction
from fovea.engine.vision.processor.surveys import read_survey
from fovea.engine.vision.qwen import QwenVisionTower
from fovea.engine.vision.slices import Slices, UpcomingImages, cuts, slice_rows
from fovea.engine.visual_budget.methods import METHODS
from fovea.relevance.balancing import Tensions
from fovea.relevance.pipeline import Realization, Survey
from fovea.relevance.policy import Allocation, attend, first_view
from fovea.relevance.realizing import Shape, View, patch_fractions, whole
from fovea.relevance.texture import Map, Mask

Array = NDArray[np.float32]
LOOKAHEAD_IMAGES = 4
"""Images that are looked at for views to go along, each for some milliseconds."""
MAX_BATCH_PATCHES = 4096
"""Patches of one pass at most, so that a batch of regions needs no more memory than a large image."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An image of which is known what question and picture say, and how the whole will be seen first."""

    image: ProcessedImage
    reduction: Reduction
    survey: Survey
    tensions: Tensions
    first: View


class AnySizeRegionEncoder:
    """For towers that take pictures of any size. What is kept of a view are all tokens of its shape, in reading order."""

    def __init__(
        self,
        tower: QwenVisionTower,
        processor: AnySizeProcessor,
        relevance: RelevanceModel,
        tensor: Callable[[Array], Tensor],
        regions: RegionCache[VisualFeatures],
        token_bytes: int,
        whole: Callable[[ProcessedImage], Slices[VisualFeatures]],
    ) -> None:
        """tensor: an array as one of the tower's type and place. token_bytes: of the encoder's output, per visual token.
        whole: an image with all of its tokens."""
        self._tower = tower
        self._weight = tower.patch_embed.proj.weight
        self._factor = processor.factor
        self._cutter = Cutter(processor, crop_invariant=tower.crop_invariant)
        self._relevance = relevance
        self._tensor = tensor
        self._token_bytes = token_bytes
        self._whole = whole
        self.regions = regions

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        """Visual tokens of an image whose plan says `relevance`, with their places."""
        begun = self._begin(image)
        if begun.first.native:
            first = yield from self._whole(image)
        else:
            piece = self._cutter.piece(image, begun.survey.grid, begun.first, 1.0)
            [first] = yield from self._encode([piece], ahead)
        realized = self._realize(begun, first)
        views = realized.allocation.layout.views
        if views[0].shape != begun.first.shape:
            raise RuntimeError(
                f"the whole was seen at {begun.first.shape}, and is laid out at {views[0].shape}"
            )
        rest = yield from self._encode(self._regions(begun, realized), ahead)
        return _joined(views, [first, *rest], realized.allocation.layout.places())

    def _begin(self, image: ProcessedImage) -> _Begun:
        """What is known before the encoder has seen anything."""
        plan, reduction = image.plan, image.plan.reduction
        assert reduction is not None
        survey = read_survey(image, self._factor)
        tensions = self._relevance.tensions(survey, reduction, plan.tokens)
        shape = first_view(survey.grid, plan.tokens, tensions.compress)
        return _Begun(image, reduction, survey, tensions, View(whole(*survey.grid), shape, ()))

    def _realize(self, begun: _Begun, first: VisualFeatures) -> Realization:
        """Of what was looked at already, for others' sake or earlier, it is known what follows."""
        known = self._relevance.reuse_realization(begun.reduction.key)
        return known or self._relevance.realize(
            begun.survey,
            begun.reduction,
            begun.image.plan.tokens,
            begun.tensions,
            (begun.first.shape, first.embeds),
            lambda worth, held, total: attend_with_diversity(
                worth, held, total, begun.tensions.compress, first.embeds
            ),
        )

    def _regions(self, begun: _Begun, realized: Realization, shape: Shape | None = None) -> list[Piece]:
        """shape: those alone that are seen at it; None: all."""
        attended = realized.allocation
        scores = dict(zip(attended.regions, attended.scores, strict=True))
        return [
            self._cutter.piece(begun.image, begun.survey.grid, view, scores[view.region])
            for view in attended.layout.views[1:]
            if shape in (None, view.shape)
        ]

    def _encode(self, pieces: Sequence[Piece], ahead: UpcomingImages) -> Slices[list[VisualFeatures]]:
        """In their order: what is kept, and what is encoded now, of one shape after the other."""
        found: dict[str, VisualFeatures] = {}
        missing: dict[Shape, dict[str, Piece]] = {}
        for piece in pieces:
            kept = self.regions.get(piece.name, piece.worth)
            if kept is None:
                missing.setdefault(piece.view.shape, {})[piece.name] = piece
            else:
                found[piece.name] = kept
        yield
        for shape, named in missing.items():
            some = list(named.values())
            for members in cuts(len(some), MAX_BATCH_PATCHES // self._patches(shape)):
                batch = self._filled(some[members], shape, ahead)
                found |= yield from self._together(batch, shape)
        return [found[piece.name] for piece in pieces]

    def _together(self, pieces: Sequence[Piece], shape: Shape) -> Slices[dict[str, VisualFeatures]]:
        """One pass of the tower over views of one shape, which are kept."""
        merge = self._tower.config.merge
        patches = np.concatenate([self._cutter.patches(piece) for piece in pieces])
        at = np.concatenate([patch_fractions(piece.view, piece.grid, merge) for piece in pieces])
        size = len(pieces), shape[0] * merge, shape[1] * merge
        names = [(piece.name, piece.worth) for piece in pieces]
        del pieces  # others' pixels are theirs to let go of, however long this takes
        embeds, deepstack = yield from self._tower.slices(self._tensor(patches), size, at)
        levels = [torch.split(level, shape[0] * shape[1]) for level in (embeds, *deepstack)]
        found = {}
        for (name, worth), *parts in zip(names, *levels, strict=True):
            made = VisualFeatures(parts[0].clone(), tuple(part.clone() for part in parts[1:]))
            self.regions.put(name, made, made.nbytes, worth)
            found[name] = made
        return found

    def _patches(self, shape: Shape) -> int:
        return shape[0] * shape[1] * self._tower.config.merge**2

    def _filled(self, pieces: Sequence[Piece], shape: Shape, ahead: UpcomingImages) -> list[Piece]:
        """These, and views of that shape of images that come next, as many as a slice still has place for: they find them kept.

        As many images count as will find room in half of the cache, so that nothing leaves it before its turn.
        """
        room = min(MAX_BATCH_PATCHES, slice_rows(self._weight)) // self._patches(shape)
        batch = {piece.name: piece for piece in pieces}
        left = self.regions.capacity // (2 * self._token_bytes)
        for image in islice(ahead() if len(batch) < room else (), LOOKAHEAD_IMAGES):
            left -= image.plan.tokens
            if left < 0 or len(batch) >= room:
                break
            try:
                for piece in self._wanted(image, shape)[: room - len(batch)]:
                    self._cutter.cut(piece)
                    batch.setdefault(piece.name, piece)
            except Exception:  # noqa: BLE001 - whatever it is, it is that image's, and its own turn will tell
                continue
        return list(batch.values())

    def _wanted(self, image: ProcessedImage, shape: Shape) -> list[Piece]:
        """What would have to be encoded next of an image that is seen in parts, if at that shape."""
        reduction = image.plan.reduction
        if reduction is None or not METHODS[reduction.method].by_region:
            return []
        begun = self._begin(image)
        if begun.first.native:
            return []
        name = self._cutter.known(image, begun.first)
        first = None if name is None else self.regions.peek(name)
        if first is None:
            same = begun.first.shape == shape
            wanted = [self._cutter.piece(image, begun.survey.grid, begun.first, 1.0)] if same else []
        else:
            wanted = self._regions(begun, self._realize(begun, first), shape)
        return [piece for piece in wanted if self.regions.peek(piece.name) is None]


def attend_with_diversity(worth: Map, held: Mask, total: int, compress: float, embeds: Tensor) -> Allocation:
    """`fovea.relevance.policy.attend` for a first view whose tokens, (tokens, hidden), are known: of a small image is kept
    what is relevant and differs, as of several alike one says what its neighbours say."""
    found = attend(worth, held, total, compress)
    view = found.layout.views[0]
    if len(found.layout.views) > 1 or not view.native:
        return found
    quality = torch.from_numpy(1 + worth).flatten().to(embeds.device)
    rows = unit_rows(embeds) * quality[:, None]
    places = cells(view.shape, rows.device)
    chosen = choose_by_bands(quality, total, lambda band: dpp_kernel(rows[band], places[band]))
    indices = tuple(sorted(chosen.tolist()))
    return replace(found, layout=replace(found.layout, views=(replace(view, token_indices=indices),)))


def _joined(
    views: Sequence[View], encoded: Sequence[VisualFeatures], places: NDArray[np.int64]
) -> VisualFeatures:
    device = encoded[0].embeds.device
    kept = [torch.tensor(view.token_indices, device=device) for view in views]
    embeds = torch.cat([one.embeds[rows] for one, rows in zip(encoded, kept, strict=True)])
    deepstack = tuple(
        torch.cat([one.deepstack[level][rows] for one, rows in zip(encoded, kept, strict=True)])
        for level in range(len(encoded[0].deepstack))
    )
    made = min(one.created_at for one in encoded)
    return VisualFeatures(embeds, deepstack, made, torch.from_numpy(places.astype(np.int32)).to(device))
