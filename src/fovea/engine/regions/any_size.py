"""Encodes an image as views: one of the whole image at low resolution, and regions at their own resolutions.

It is for vision encoders that take pictures of any size. The view of the whole image is encoded first,
because the model looks at it with the question. Then the regions are chosen, and those that are
not in the region cache are encoded, in batches of one shape. If a batch leaves room in a slice, it also gets
views of that shape of images that come next. These are then in the cache when their turn comes.

A piece is a view of an image with its pixels and its name in the region cache. `RelevanceModel` has tensions,
the look, and the latest realizations, to explain answers and to reuse layouts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.cache.embeddings import RegionCache
from fovea.engine.reduce.base import unit_rows
from fovea.engine.reduce.methods import cells as grid_cells
from fovea.engine.reduce.methods import choose_by_bands, dpp_kernel
from fovea.engine.regions.relevance_model import RelevanceModel
from fovea.engine.vision.any_size import AnySizeTower
from fovea.engine.vision.built.engines import EncoderEngines
from fovea.engine.vision.built.manifest import Grid
from fovea.engine.vision.encoding import Slices, UpcomingImages, VisualFeatures, cuts, slice_rows
from fovea.engine.vision.processor.base import AnySizeProcessor, ProcessedImage, Reduction
from fovea.engine.vision.processor.pixels import resize
from fovea.engine.vision.processor.regions import read_survey
from fovea.engine.vision.qwen import StaticQwen
from fovea.engine.visual_budget.methods import METHODS
from fovea.relevance.pipeline import Realization, Survey
from fovea.relevance.policy import Allocation, Cells, attend, is_one_region, look_shape
from fovea.relevance.realizing import Shape, View, patch_fractions, whole

Pixels = NDArray[np.uint8]
MAX_NAMES = 8192
"""Number of recent views whose names are remembered, so that computing them again needs no pixels."""
Array = NDArray[np.float32]
LOOKAHEAD_IMAGES = 4
"""Most of the next images that are examined for views that fill up a batch.

Each takes some milliseconds.
"""
MAX_BATCH_PATCHES = 4096
"""Most patches in one pass of the tower, so that a batch of views needs no more memory than a large image."""


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
        built: StaticQwen | None,
        engines: EncoderEngines,
    ) -> None:
        """tensor: turns an array into a tensor of the tower's type and device.

        token_bytes: bytes of the encoder's output per visual token.
        whole: encodes an image with all of its tokens.
        built, engines: the tower as it is built ahead of time, and the grids for which it was; None: it
            cannot be built.
        """
        self._built, self._engines = built, engines
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
        reduction = image.plan.reduction
        assert reduction is not None
        survey = read_survey(image, self._factor)
        realization, every = self._relevance.reuse_realization(reduction.key), None
        if realization is None:
            realization, every = yield from self._realize(image, reduction, survey, ahead)
        views = realization.allocation.layout.views
        if views[0].native:
            first = (yield from self._whole(image)) if every is None else every
            rest = yield from self._encode(self._pieces(image, realization, views[1:]), ahead)
            features = [first, *rest]
        else:
            features = yield from self._encode(self._pieces(image, realization, views), ahead)
        return _join(views, features, realization.allocation.layout.places())

    def _realize(
        self, image: ProcessedImage, reduction: Reduction, survey: Survey, ahead: UpcomingImages
    ) -> Slices[tuple[Realization, VisualFeatures | None]]:
        """Look at a small view of the image with the question, and decide which views are encoded.

        Returns the decision, and all tokens of the image if they were encoded for it.
        """
        shape = look_shape(survey.grid)
        asked = every = None
        if reduction.look is not None:
            if shape == survey.grid:
                view = every = yield from self._whole(image)
            else:
                piece = self._cutter.piece(image, survey.grid, View(whole(*survey.grid), shape, ()), 1.0)
                [view] = yield from self._encode([piece], ahead)
            asked = yield from self._relevance.look(reduction.look, view, shape)
        total = image.plan.tokens
        tensions = self._relevance.tensions(survey, reduction, asked)
        if is_one_region(survey.grid, tensions.compress):
            every = (yield from self._whole(image)) if every is None else every
            choose = partial(attend_with_diversity, compress=tensions.compress, embeds=every.embeds)
        else:
            choose = partial(attend, compress=tensions.compress)
        return self._relevance.realize(survey, reduction, total, tensions, asked, choose), every

    def _pieces(self, image: ProcessedImage, realization: Realization, views: Sequence[View]) -> list[Piece]:
        allocation = realization.allocation
        scores = dict(zip(allocation.regions, allocation.scores, strict=True))
        grid = allocation.layout.grid
        return [self._cutter.piece(image, grid, view, scores.get(view.region, 1.0)) for view in views]

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
        yield None
        for shape, by_name in missing.items():
            batchable = list(by_name.values())
            for members in cuts(len(batchable), MAX_BATCH_PATCHES // self._patches(shape)):
                batch = self._fill_batch(batchable[members], shape, ahead)
                features |= yield from self._encode_batch(batch, shape)
        return [features[piece.name] for piece in pieces]

    def _encode_batch(self, pieces: Sequence[Piece], shape: Shape) -> Slices[dict[str, VisualFeatures]]:
        """Encode pieces of one shape in one pass of the tower, and store them in the region cache."""
        merge, corners = self._tower.merge, self._tower.corners
        patches = [self._cutter.patches(piece) for piece in pieces]
        at = [patch_fractions(one.view, one.grid, merge, corners=corners) for one in pieces]
        names = [(piece.name, piece.relevance) for piece in pieces]
        del pieces  # so that the pixels of other images can be freed during this pass
        embeds, deepstack = yield from self._run(patches, (1, shape[0] * merge, shape[1] * merge), at)
        levels = [torch.split(level, shape[0] * shape[1]) for level in (embeds, *deepstack)]
        features = {}
        for (name, relevance), *parts in zip(names, *levels, strict=True):
            output = VisualFeatures(parts[0].clone(), tuple(part.clone() for part in parts[1:]))
            self.regions.put(name, output, output.nbytes, relevance)
            features[name] = output
        return features

    def _run(
        self, patches: list[NDArray[Any]], grid: Grid, at: list[NDArray[np.float32]]
    ) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Encode views of one grid: one after another if it was built ahead of time, else all at once."""
        segments = self._engines.find(grid, len(patches))
        if segments is None or self._built is None:
            tensor, size = self._tensor(np.concatenate(patches)), (len(patches), *grid[1:])
            patches.clear()  # so that the pixels are not in memory twice during the pass
            return (yield from self._tower.slices(tensor, size, np.concatenate(at)))
        outputs = []
        for part, places in zip(patches, at, strict=True):
            embeds, deepstack = yield from self._built.run(segments, self._tensor(part), grid, places)
            outputs.append((embeds, *deepstack))
        embeds, *levels = map(torch.cat, zip(*outputs, strict=True))
        return embeds, levels

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
        grid = read_survey(image, self._factor).grid
        realization = self._relevance.recent_realization(reduction.key)
        if realization is None:
            views: tuple[View, ...] = (View(whole(*grid), look_shape(grid), ()),)
            pieces = [self._cutter.piece(image, grid, view, 1.0) for view in views]
        else:
            views = realization.allocation.layout.views
            pieces = self._pieces(image, realization, views)
        return [
            piece
            for piece in pieces
            if piece.view.shape == shape
            and not (piece.view.native and piece.view.region == whole(*grid))
            and self.regions.peek(piece.name) is None
        ]


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


def attend_with_diversity(cells: Cells, total: int, *, compress: float, embeds: Tensor) -> Allocation:
    """Lay out an image by `policy.attend`, but choose tokens of a small image that differ from each other.

    A small image is one native view. Its tokens are chosen by their relevance and by how much they differ,
    because similar tokens carry the same information.

    total: tokens to keep.
    compress: the tension between compress and particularize, in [0, 1].
    embeds: tokens of the first view, (tokens, hidden).
    """
    allocation = attend(cells, total, compress)
    view = allocation.layout.views[0]
    if len(allocation.layout.views) > 1 or not view.native:
        return allocation
    quality = torch.from_numpy(1 + cells.relevance).flatten().to(embeds.device)
    rows = unit_rows(embeds) * quality[:, None]
    places = grid_cells(view.shape, rows.device)
    numbers = choose_by_bands(quality, total, lambda band: dpp_kernel(rows[band], places[band]))
    indices = tuple(sorted(numbers.tolist()))
    layout = replace(allocation.layout, views=(replace(view, token_indices=indices),))
    return replace(allocation, layout=layout)


def _join(
    views: Sequence[View], features: Sequence[VisualFeatures], places: NDArray[np.int64]
) -> VisualFeatures:
    """Concatenate the kept tokens of all views. places: rows and columns in the full grid, (tokens, 2)."""
    device = features[0].embeds.device
    kept_rows = [torch.tensor(view.token_indices, dtype=torch.long, device=device) for view in views]
    embeds = torch.cat([one.embeds[rows] for one, rows in zip(features, kept_rows, strict=True)])
    deepstack = tuple(
        torch.cat([one.deepstack[level][rows] for one, rows in zip(features, kept_rows, strict=True)])
        for level in range(len(features[0].deepstack))
    )
    created_at = min(one.created_at for one in features)
    return VisualFeatures(embeds, deepstack, created_at, torch.from_numpy(places.astype(np.int32)).to(device))
