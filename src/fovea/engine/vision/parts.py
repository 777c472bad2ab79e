"""An image seen in parts: the whole at low resolution, and its regions each at a level of their own (`fovea.relevance`).

Works on towers that take any resolution. The whole comes first, because what the question is coupled to is read off it; then
regions are chosen, and those that no question asked for before are encoded, in batches of one shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.cache.regions import RegionCache
from fovea.engine.reduce.base import unit_rows
from fovea.engine.reduce.dpp import greedy
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.judge import Judge
from fovea.engine.vision.processor.base import ProcessedImage, Reduction
from fovea.engine.vision.processor.parts import surveyed
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.qwen import QwenVisionTower
from fovea.engine.vision.slices import Slices, cuts
from fovea.relevance.pipeline import Realized
from fovea.relevance.policy import Attended, Mask, attend, first_view
from fovea.relevance.realizing import Layout, Shape, View, patch_fractions, whole
from fovea.relevance.regions import Region
from fovea.relevance.texture import Map

Array = NDArray[np.float32]
LEAST_QUALITY = 0.1
"""Of a cell that is not relevant at all: it stays if nothing else is like it."""
TOGETHER = 4096
"""Patches of one pass at most, so that a batch of regions needs no more memory than a large image."""


class PartsEncoder:
    """For towers that take pictures of any size. What is kept of a view are all tokens of its shape, in reading order."""

    def __init__(
        self,
        tower: QwenVisionTower,
        processor: QwenProcessor,
        judge: Judge,
        tensor: Callable[[Array], Tensor],
        regions: RegionCache[VisualFeatures],
    ) -> None:
        """tensor: an array as one of the tower's type and place."""
        self._tower = tower
        self._processor = processor
        self._judge = judge
        self._tensor = tensor
        self.regions = regions

    def slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        """Visual tokens of an image whose plan says `relevance`, with their places."""
        plan, reduction = image.plan, image.plan.reduction
        assert reduction is not None
        survey = surveyed(image, self._processor.factor)
        pixels = image.arrays["rgb"]
        grid = survey.grid
        tensions = self._judge.tensions(survey, reduction, plan.tokens)
        shape = first_view(grid, plan.tokens, tensions.compress)
        first = View(whole(*grid), shape, ())
        [begun] = yield from self._encode(pixels, reduction, grid, [first], [1.0])
        realized = self._judge.realize(
            survey,
            reduction,
            plan.tokens,
            tensions,
            (shape, begun.embeds),
            lambda worth, held, total: attend_differing(worth, held, total, tensions.compress, begun.embeds),
        )
        views = realized.attended.layout.views
        if (views[0].region, views[0].shape) != (first.region, shape):
            raise RuntimeError(f"the whole was seen at {shape}, and is laid out at {views[0].shape}")
        worth = [_relevance(realized, view) for view in views[1:]]
        rest = yield from self._encode(pixels, reduction, grid, views[1:], worth)
        return _joined(views, [begun, *rest], realized.attended.layout.places())

    def _encode(
        self,
        pixels: NDArray[np.uint8],
        reduction: Reduction,
        grid: Shape,
        views: Sequence[View],
        worth: Sequence[float],
    ) -> Slices[list[VisualFeatures]]:
        """Views in their order: what is kept, and what is encoded now, of one shape after the other."""
        found: dict[int, VisualFeatures] = {}
        missing: list[tuple[int, str, NDArray[np.uint8]]] = []
        for number, view in enumerate(views):
            cut = self._cut(pixels, view.region, view.shape)
            key = self._name(cut, view.region, view.shape, grid, reduction)
            kept = self.regions.get(key, worth[number])
            if kept is not None:
                found[number] = kept
            else:
                missing.append((number, key, cut))
        yield
        merge = self._tower.config.merge
        for batch in Layout(grid, tuple(views[number] for number, _, _ in missing)).batches:
            shape = batch.shape
            for members in cuts(len(batch.members), TOGETHER // (shape[0] * shape[1] * merge**2)):
                some = [missing[member] for member in batch.members[members]]
                patches = np.concatenate([self._processor.patches(cut) for _, _, cut in some])
                at = [patch_fractions(views[number], grid, merge) for number, _, _ in some]
                size = len(some), shape[0] * merge, shape[1] * merge
                embeds, deepstack = yield from self._tower.slices(
                    self._tensor(patches), size, np.concatenate(at)
                )
                levels = [torch.split(level, shape[0] * shape[1]) for level in (embeds, *deepstack)]
                for (number, key, _), *parts in zip(some, *levels, strict=True):
                    made = VisualFeatures(parts[0].clone(), tuple(part.clone() for part in parts[1:]))
                    self.regions.put(key, made, made.nbytes, worth[number])
                    found[number] = made
        return [found[number] for number in range(len(views))]

    def _cut(self, pixels: NDArray[np.uint8], region: Region, shape: Shape) -> NDArray[np.uint8]:
        side = self._processor.factor
        part = pixels[
            region.row * side : (region.row + region.rows) * side,
            region.column * side : (region.column + region.columns) * side,
        ]
        if shape == (region.rows, region.columns):
            return np.ascontiguousarray(part)
        picture = PIL.Image.fromarray(np.ascontiguousarray(part))
        return np.asarray(picture.resize((shape[1] * side, shape[0] * side), self._processor.resample))

    def _name(
        self,
        cut: NDArray[np.uint8],
        region: Region,
        shape: Shape,
        grid: Shape,
        reduction: Reduction,
    ) -> str:
        """A tenant's regions are its own. Where a tower has learned positions, a region's place is part of what it is."""
        digest = hashlib.sha256(reduction.salt.encode() + b"\x00")
        digest.update(cut.data)
        where = "" if self._tower.placeless else f"{region} of {grid}"
        return f"{digest.hexdigest()} {shape} {where}"


def attend_differing(worth: Map, held: Mask, total: int, compress: float, embeds: Tensor) -> Attended:
    """`fovea.relevance.policy.attend` for a first view whose tokens, (tokens, hidden), are known: a small image that is seen
    in part keeps what is relevant and differs, as of several alike one says what they all say."""
    found = attend(worth, held, total, compress)
    view = found.layout.views[0]
    if len(found.layout.views) > 1 or not view.native:
        return found
    quality = torch.from_numpy(LEAST_QUALITY + worth).flatten().to(embeds.device)
    rows = unit_rows(embeds) * quality[:, None]
    kept = tuple(sorted(greedy(rows @ rows.T, total).tolist()))
    return replace(found, layout=replace(found.layout, views=(replace(view, kept=kept),)))


def _relevance(realized: Realized, view: View) -> float:
    return realized.attended.scores[realized.attended.regions.index(view.region)]


def _joined(
    views: Sequence[View], encoded: Sequence[VisualFeatures], places: NDArray[np.int64]
) -> VisualFeatures:
    device = encoded[0].embeds.device
    kept = [torch.tensor(view.kept, device=device) for view in views]
    embeds = torch.cat([one.embeds[rows] for one, rows in zip(encoded, kept, strict=True)])
    deepstack = tuple(
        torch.cat([one.deepstack[level][rows] for one, rows in zip(encoded, kept, strict=True)])
        for level in range(len(encoded[0].deepstack))
    )
    made = min(one.made for one in encoded)
    return VisualFeatures(embeds, deepstack, made, torch.from_numpy(places.astype(np.int32)).to(device))
