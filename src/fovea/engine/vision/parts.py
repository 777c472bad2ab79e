"""An image seen in parts: the whole at low resolution, and its regions each at a level of their own (`fovea.relevance`).

Works on towers that take any resolution. The whole comes first, because what the question is coupled to is read off it; then
regions are chosen, and those that no question asked for before are encoded, in batches of one shape.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.cache.regions import RegionCache
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import ProcessedImage, Reduction
from fovea.engine.vision.processor.parts import surveyed
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.qwen import QwenVisionTower
from fovea.engine.vision.slices import Slices
from fovea.relevance import coupling
from fovea.relevance.balancing import Balancer
from fovea.relevance.pipeline import Realized, Survey, realize
from fovea.relevance.realizing import Shape, View, patch_fractions, whole
from fovea.relevance.regions import Region
from fovea.relevance.texture import Map

Array = NDArray[np.float32]
REMEMBERED = 256
"""Images of which it is known what was seen where, the latest."""
TOGETHER = 4096
"""Patches of one pass at most, so that a batch of regions needs no more memory than a large image."""


class Words(Protocol):
    """What the decoder knows of the user's words."""

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """(Q,) to (Q, D)."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedView:
    """A view's tokens, in reading order, all of its shape. made: when, in seconds of `time.time`."""

    embeds: Tensor
    deepstack: tuple[Tensor, ...]
    made: float = field(default_factory=time.time)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.embeds, *self.deepstack))


class PartsEncoder:
    """head: weights of what was trained for this model's relevance, by name; None: nothing was."""

    def __init__(
        self,
        tower: QwenVisionTower,
        processor: QwenProcessor,
        words: Words,
        tensor: Callable[[Array], Tensor],
        *,
        regions: RegionCache[EncodedView],
        head: Mapping[str, Array] | None = None,
    ) -> None:
        """tensor: an array as one of the tower's type and place."""
        self._tower = tower
        self._processor = processor
        self._words = words
        self._tensor = tensor
        self._head = head
        self._balancer = Balancer(head)
        self.regions = regions
        self._seen: OrderedDict[str, Realized] = OrderedDict()

    def slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        """Visual tokens of an image whose plan says `relevance`, with their places."""
        plan, reduction = image.plan, image.plan.reduction
        assert reduction is not None
        survey = surveyed(image, self._processor.factor)
        pixels = image.arrays["rgb"]
        grid = survey.grid
        shape = survey.first_view(plan.tokens)
        begun = yield from self._encode(pixels, reduction, grid, [(whole(*grid), shape)], [1.0])
        realized = self._realize(survey, reduction, shape, begun[0], plan.tokens)
        self._remember(reduction, realized)
        views = realized.attended.layout.views
        wanted = [(view.region, view.shape) for view in views]
        worth = [1.0 if view.region == whole(*grid) else _relevance(realized, view) for view in views]
        if wanted[0] != (whole(*grid), shape):
            raise RuntimeError(f"the whole was seen at {shape}, and is laid out at {wanted[0][1]}")
        rest = yield from self._encode(pixels, reduction, grid, wanted[1:], worth[1:])
        return _joined(views, [begun[0], *rest], realized.attended.layout.places())

    def seen(self, key: str) -> Realized | None:
        """What was seen where of the image with that key, if that was lately. Thread-safe."""
        return self._seen.get(key)

    def _realize(
        self, survey: Survey, reduction: Reduction, shape: Shape, begun: EncodedView, total: int
    ) -> Realized:
        features = begun.embeds.float().cpu().numpy()
        query = image = None
        if reduction.words:
            words = self._words(reduction.words).float().cpu().numpy()
            participatory = self._coupled(survey, reduction, shape, features, words)
            query, image = coupling.normal(words).mean(0), coupling.normal(features).mean(0)
        else:
            participatory = survey.asked(reduction.question)
        return realize(
            survey, participatory, total,
            balancer=self._balancer, query=query, image=image, load=reduction.load,
        )  # fmt: skip

    def _coupled(
        self, survey: Survey, reduction: Reduction, shape: Shape, features: Array, words: Array
    ) -> Map:
        if self._head is not None:
            return coupling.spread(coupling.learned(self._head, features, words), shape, survey.grid)
        return coupling.unlearned(features, words, shape, survey.asked(reduction.question))

    def _remember(self, reduction: Reduction, realized: Realized) -> None:
        self._seen[reduction.key] = realized
        self._seen.move_to_end(reduction.key)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _encode(
        self,
        pixels: NDArray[np.uint8],
        reduction: Reduction,
        grid: Shape,
        views: Sequence[tuple[Region, Shape]],
        worth: Sequence[float],
    ) -> Slices[list[EncodedView]]:
        """Views in their order: what is kept, and what is encoded now, of one shape after the other."""
        found: dict[int, EncodedView] = {}
        missing: dict[Shape, list[tuple[int, str, NDArray[np.uint8]]]] = {}
        for number, (region, shape) in enumerate(views):
            cut = self._cut(pixels, region, shape)
            key = self._name(cut, region, shape, grid, reduction)
            kept = self.regions.get(key, worth[number])
            if kept is not None:
                found[number] = kept
            else:
                missing.setdefault(shape, []).append((number, key, cut))
        yield
        merge = self._tower.config.merge
        for shape, members in missing.items():
            at_once = max(1, TOGETHER // (shape[0] * shape[1] * merge**2))
            for start in range(0, len(members), at_once):
                some = members[start : start + at_once]
                patches = np.concatenate([self._processor.patches(cut) for _, _, cut in some])
                at = [patch_fractions(View(views[n][0], shape, ()), grid, merge) for n, _, _ in some]
                size = len(some), shape[0] * merge, shape[1] * merge
                embeds, deepstack = yield from self._tower.slices(
                    self._tensor(patches), size, np.concatenate(at)
                )
                levels = [torch.split(level, shape[0] * shape[1]) for level in (embeds, *deepstack)]
                for (number, key, _), *parts in zip(some, *levels, strict=True):
                    made = EncodedView(parts[0].clone(), tuple(part.clone() for part in parts[1:]))
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
        digest.update(np.ascontiguousarray(cut).data)
        where = "" if self._tower.placeless else f"{region} of {grid}"
        return f"{digest.hexdigest()} {shape} {where}"


def _relevance(realized: Realized, view: View) -> float:
    return realized.attended.scores[realized.attended.regions.index(view.region)]


def _joined(
    views: Sequence[View], encoded: Sequence[EncodedView], places: NDArray[np.int64]
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
