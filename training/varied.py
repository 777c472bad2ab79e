"""Draws batches of images that are encoded in parts: a view of the whole, and regions at resolutions of their
own.

The parts are chosen by `fovea.relevance`, as in the engine. The coupling to the question is not predicted,
but taken from the known focus of the questions. It is sometimes exact, sometimes noisy and sometimes missing,
so that the model learns from good and from bad choices. For small images, the tokens that differ most are
found with the weights in the assets folder.
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

from batches import fit_image, questions, random_system
from common import ASSETS
from dense import Dense, dense_targets, stack_dense
from fovea.engine.regions.any_size import attend_with_diversity
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.questions import reading
from fovea.evaluation.scenes.scene import Turn
from fovea.evaluation.scenes.small import compose_small
from fovea.relevance.balancing import Tensions, Ways, balance
from fovea.relevance.knowing import perspectival, propositional, readable_at
from fovea.relevance.policy import LARGE_IMAGE, Cells, attend, content_mask
from fovea.relevance.realizing import SIDE, Layout, View, patch_fractions
from fovea.relevance.texture import Map, texture
from model import Fovea
from packing import Batch, Packer, PromptMedia, Size, branches, collate

Tower = Callable[[np.ndarray], Tensor]
"""An image's pixels (height, width, 3) to its visual tokens, (tokens, hidden)."""
CELL, MERGE = 32, 2
"""Side of a token's cell in pixels, and patches per side of it."""


def tower() -> Tower:
    """The vision tower with the weights in the assets folder, in float32."""
    model = Fovea(json.loads((ASSETS / "config.json").read_text()))
    weights = {name: value.float() for name, value in load_file(ASSETS / "model.safetensors").items()}
    model.load_state_dict(weights, strict=False)

    def embeds(pixels: np.ndarray) -> Tensor:
        with torch.inference_mode():
            return model.encode(torch.tensor(pixels)[None, None])[0]

    return embeds


def random_share(rng: Random) -> float:
    """A random share of an image's tokens to keep."""
    return rng.uniform(0.15, 0.85)


def coupling(rng: Random, turns: list[Turn], size: Size, grid: Size) -> Map:
    """A map from the focus of the questions, (rows, columns) in [0, 1]: exact, noisy or all zero.

    size: width and height that the focus refers to.
    """
    rows, columns = grid
    values = np.zeros(grid, np.float32)
    if rng.random() < 0.2:
        return values
    sy, sx = rows / size[1], columns / size[0]
    for turn in turns:
        for left, top, right, bottom in turn.focus:
            down = slice(max(0, math.floor(top * sy)), max(1, math.ceil(bottom * sy)))
            across = slice(max(0, math.floor(left * sx)), max(1, math.ceil(right * sx)))
            values[down, across] = 1
    if rng.random() < 0.5:
        noise = np.random.default_rng(rng.randrange(2**31)).random(grid, dtype=np.float32)
        values = (1 - (share := rng.uniform(0.1, 0.6))) * values + share * noise
    return values


def random_layout(rng: Random, pixels: np.ndarray, participatory: Map, total: int, embeds: Tower) -> Layout:
    """A layout of `total` tokens with random tensions, and with random relevance in some of the cases."""
    channels = texture(pixels, CELL)
    ways = Ways(propositional(channels), perspectival(channels), participatory)
    tensions = Tensions(rng.random(), rng.uniform(0.6, 1.0), rng.uniform(0.4, 1.0))
    worth = balance(ways, tensions)
    content = content_mask(ways.propositional, ways.perspectival)
    chance = rng.random()
    if chance < 0.3:
        worth = shuffle(rng, worth)
    elif chance < 0.45:  # equal relevance: only the difference between tokens counts
        worth = np.ones_like(worth)
    cells = Cells(worth, content, participatory, readable_at(channels))
    if worth.size < LARGE_IMAGE and rng.random() < 0.7:
        return attend_with_diversity(cells, total, compress=tensions.compress, embeds=embeds(pixels)).layout
    return attend(cells, total, tensions.compress, rng.choice((SIDE, SIDE, SIDE, 9, 7))).layout


def shuffle(rng: Random, worth: Map) -> Map:
    """Relevance mixed with chance. Any cell may then be left out, but a more relevant one less often."""
    draw = np.random.default_rng(rng.randrange(2**31)).gumbel(size=worth.shape)
    mixed = np.log(worth + 0.05) + rng.choice((0.5, 1.0, 2.0)) * draw
    return ((mixed - mixed.min()) / max(float(np.ptp(mixed)), 1e-6)).astype(np.float32)


def view_pixels(pixels: np.ndarray, view: View) -> np.ndarray:
    """The pixels of a view, resized like the engine does it. pixels: sides are multiples of CELL."""
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
    """The dense targets of a layout's tokens: -1 (not predicted) for tokens below the native resolution."""
    targets = {}
    places = layout.places()
    native = np.concatenate([np.full(view.tokens, view.native) for view in layout.views])
    rows = places[:, 0] * layout.grid[1] + places[:, 1]
    for name, values in dense.items():
        target = values[rows].copy()
        if name != "counts" or len(layout.views) == 1:
            target[~native] = -1
        else:  # the encoder of one region has no information about the others
            target[:] = -1
        targets[name] = target
    return targets


def gather_views(layouts: list[Layout], images: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The views of several layouts, grouped by shape, for `Fovea.encode_views`.

    views0, views1, ...: pixels of all views of one shape, (views, height, width, 3).
    at0, at1, ...: positions of their patches; see `patch_fractions`.
    order: the kept tokens, image by image, as indices into the tokens of all views one after the other.
    """
    groups: dict[Size, list[tuple[int, int]]] = {}
    for number, layout in enumerate(layouts):
        for index, view in enumerate(layout.views):
            groups.setdefault(view.shape, []).append((number, index))
    arrays: dict[str, np.ndarray] = {}
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
        arrays |= {f"views{group}": np.stack(pictures), f"at{group}": np.stack(fractions)}
    order = [
        starts[number, index] + token
        for number, layout in enumerate(layouts)
        for index, view in enumerate(layout.views)
        for token in view.token_indices
    ]
    return arrays | {"order": np.array(order, np.int64)}


def varied_batch(rng: Random, packer: Packer, size: Size, count: int, per_image: int, embeds: Tower) -> Batch:
    """`count` single images of one size, each with its own layout of the same number of tokens."""
    width, height = size
    grid = height // CELL, width // CELL
    total = max(2, min(grid[0] * grid[1] - 1, round(grid[0] * grid[1] * random_share(rng))))
    system = random_system(rng)
    small = min(size) >= 448
    sequences, layouts, images, dense = [], [], [], []
    while len(sequences) < count:
        if small and rng.random() < 0.5:
            scene = compose_small(rng, width, height)
        else:
            scene = compose(rng, width, height, labels=rng.choice((0, 0, 0, 1, 1, 2)))
        turns = questions(rng, scene, rng.choice((1, 2, 3, per_image)))
        if scene.labels and rng.random() < 0.5:
            turns = list({turn.question: turn for turn in (*turns, reading(rng, scene)) if turn}.values())
        if not turns:
            continue
        pixels = fit_image(draw(scene), size)
        layout = random_layout(
            rng, pixels, coupling(rng, turns, (scene.width, scene.height), grid), total, embeds
        )
        media = PromptMedia(grid, places=tuple(map(tuple, layout.places().tolist())))
        sequences.append(branches(packer, turns, media, system))
        layouts.append(layout)
        images.append(pixels)
        dense.append(view_targets(dense_targets(scene, size), layout))
    batch = collate(sequences, [[] for _ in sequences])
    return batch | gather_views(layouts, images) | stack_dense(dense)
