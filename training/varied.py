"""Batches in which images are seen in parts: a thumbnail and regions at levels of detail of their own, or without blank cells.

What is shown is chosen as the engine does it, by `fovea.relevance`, except that what the question is coupled to is known:
the focus of the questions, now sharp, now vague, now missing, so that the model learns from good and from bad choices. Which
tokens of a small image differ is said by the weights in the assets: those that training began with, or soon will have been.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from batches import fitted, questions, some_system
from common import ASSETS
from dense import Dense, dense_targets, stacked
from fovea.engine.regions.any_size import attend_differing
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.reading import reading
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.small import compose_small
from fovea.relevance.balancing import Balancer, Tensions, Ways
from fovea.relevance.knowing import perspectival, propositional
from fovea.relevance.policy import LARGE_IMAGE, attend, content_mask
from fovea.relevance.realizing import Layout, View, patch_fractions
from fovea.relevance.regions import SIDE
from fovea.relevance.texture import Map, texture
from model import Fovea
from packing import Batch, Packer, Shown, Size, branches, collate

Tower = Callable[[np.ndarray], Tensor]
"""An image's pixels (height, width, 3) to its visual tokens, (tokens, hidden)."""
CELL, MERGE = 32, 2
POLICIES = ("thresholds", "thresholds", "power", "sharp")


def tower() -> Tower:
    """Of the weights in the assets, in float32."""
    model = Fovea(json.loads((ASSETS / "config.json").read_text()))
    weights = {name: value.float() for name, value in load_file(ASSETS / "model.safetensors").items()}
    model.load_state_dict(weights, strict=False)

    def embeds(pixels: np.ndarray) -> Tensor:
        with torch.inference_mode():
            return model.encode(torch.tensor(pixels)[None, None])[0]

    return embeds


def some_ratio(rng: Random) -> float:
    """Of the tokens."""
    return rng.uniform(0.15, 0.85)


def coupling(rng: Random, turns: list[Turn], scene: Scene, grid: Size) -> Map:
    """What the question asks for, as somebody might know it who has seen a thumbnail; (rows, columns) in [0, 1]."""
    rows, columns = grid
    found = np.zeros(grid, np.float32)
    if rng.random() < 0.2:
        return found
    sy, sx = rows / scene.height, columns / scene.width
    for turn in turns:
        for left, top, right, bottom in turn.focus:
            down = slice(max(0, math.floor(top * sy)), max(1, math.ceil(bottom * sy)))
            across = slice(max(0, math.floor(left * sx)), max(1, math.ceil(right * sx)))
            found[down, across] = 1
    if rng.random() < 0.5:
        noise = np.random.default_rng(rng.randrange(2**31)).random(grid, dtype=np.float32)
        found = (1 - (share := rng.uniform(0.1, 0.6))) * found + share * noise
    return found


def some_layout(rng: Random, pixels: np.ndarray, known: Map, total: int, embeds: Tower) -> Layout:
    seen = texture(pixels, CELL)
    ways = Ways(propositional(seen), perspectival(seen), known)
    tensions = Tensions(rng.random(), rng.uniform(0.6, 1.0), rng.uniform(0.4, 1.0))
    worth = Balancer().balance(ways, tensions)
    chance = rng.random()
    if chance < 0.3:
        worth = shuffled(rng, worth)
    elif chance < 0.45:  # all as relevant: what differs
        worth = np.ones_like(worth)
    if worth.size < LARGE_IMAGE and rng.random() < 0.7:
        return attend_differing(worth, content_mask(ways), total, tensions.compress, embeds(pixels)).layout
    side = rng.choice((SIDE, SIDE, SIDE, 9, 7))
    return attend(worth, content_mask(ways), total, tensions.compress, rng.choice(POLICIES), side).layout


def shuffled(rng: Random, worth: Map) -> Map:
    """Relevance with chance in it, so that any cell may be missing: the more relevant stays more often."""
    draw = np.random.default_rng(rng.randrange(2**31)).gumbel(size=worth.shape)
    mixed = np.log(worth + 0.05) + rng.choice((0.5, 1.0, 2.0)) * draw
    return ((mixed - mixed.min()) / max(float(np.ptp(mixed)), 1e-6)).astype(np.float32)


def view_pixels(pixels: np.ndarray, view: View) -> np.ndarray:
    """A view of an image whose sides are multiples of CELL, resized as the engine does."""
    region, (rows, columns) = view.region, view.shape
    part = pixels[
        region.row * CELL : (region.row + region.rows) * CELL,
        region.column * CELL : (region.column + region.columns) * CELL,
    ]
    if view.native:
        return part
    size = columns * CELL, rows * CELL
    return np.asarray(Image.fromarray(part).resize(size, Image.Resampling.BICUBIC))


def view_targets(dense: Dense, layout: Layout) -> Dense:
    """Of the tokens that are shown at full resolution; -1, not asked for, of the others."""
    found = {}
    places = layout.places()
    native = np.concatenate([np.full(view.tokens, view.native) for view in layout.views])
    rows = places[:, 0] * layout.grid[1] + places[:, 1]
    for name, values in dense.items():
        taken = values[rows].copy()
        if name != "counts" or len(layout.views) == 1:
            taken[~native] = -1
        else:  # a region knows nothing of what the others hold
            taken[:] = -1
        found[name] = taken
    return found


def gathered(layouts: list[Layout], images: list[np.ndarray]) -> dict[str, np.ndarray]:
    """views0, views1, ...: pictures of one size each, at0, at1, ... where their patches are; order: of all their tokens one
    after the other, those that are shown, image by image."""
    groups: dict[Size, list[tuple[int, int]]] = {}
    for number, layout in enumerate(layouts):
        for index, view in enumerate(layout.views):
            groups.setdefault(view.shape, []).append((number, index))
    made: dict[str, np.ndarray] = {}
    starts: dict[tuple[int, int], int] = {}
    at = 0
    for group, (shape, members) in enumerate(groups.items()):
        pictures, fractions = [], []
        for number, index in members:
            view = layouts[number].views[index]
            pictures.append(view_pixels(images[number], view))
            fractions.append(patch_fractions(view, layouts[number].grid, MERGE))
            starts[number, index] = at
            at += shape[0] * shape[1]
        made |= {f"views{group}": np.stack(pictures), f"at{group}": np.stack(fractions)}
    order = [
        starts[number, index] + token
        for number, layout in enumerate(layouts)
        for index, view in enumerate(layout.views)
        for token in view.token_indices
    ]
    return made | {"order": np.array(order, np.int64)}


def varied_batch(rng: Random, packer: Packer, size: Size, count: int, asked: int, embeds: Tower) -> Batch:
    """`count` single images of one size, each seen in its own parts, all with the same number of tokens."""
    width, height = size
    grid = height // CELL, width // CELL
    total = max(2, min(grid[0] * grid[1] - 1, round(grid[0] * grid[1] * some_ratio(rng))))
    system = some_system(rng)
    small = min(size) >= 448
    sequences, layouts, images, dense = [], [], [], []
    while len(sequences) < count:
        if small and rng.random() < 0.5:
            scene = compose_small(rng, width, height)
        else:
            scene = compose(rng, width, height, labels=rng.choice((0, 0, 0, 1, 1, 2)))
        turns = questions(rng, scene, rng.choice((1, 2, 3, asked)))
        if scene.labels and rng.random() < 0.5:
            turns = list({turn.question: turn for turn in (*turns, reading(rng, scene)) if turn}.values())
        if not turns:
            continue
        pixels = fitted(draw(scene), size)
        layout = some_layout(rng, pixels, coupling(rng, turns, scene, grid), total, embeds)
        shown = Shown(grid, places=tuple(map(tuple, layout.places().tolist())))
        sequences.append(branches(packer, turns, shown, system))
        layouts.append(layout)
        images.append(pixels)
        dense.append(view_targets(dense_targets(scene, size), layout))
    batch = collate(sequences, [[] for _ in sequences])
    return batch | gathered(layouts, images) | stacked(dense)
