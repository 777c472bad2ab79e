"""Pages of which the model gets only some tokens, encoded region by region as in `fovea.relevance`.

The places of the questions' evidence stand for the model's coupling, exactly or with noise. A question is
left out if a part of its evidence is not shown at native resolution: nobody could answer it.
"""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray

from dense import Dense
from fovea.evaluation.scenes.sample import Turn
from fovea.relevance.balancing import Balancer, Tensions, Ways
from fovea.relevance.knowing import perspectival, propositional
from fovea.relevance.policy import attend, content_mask, keep_native
from fovea.relevance.realizing import Layout
from fovea.relevance.regions import SIDE
from fovea.relevance.texture import Map, Mask, texture
from packing import Batch, Packer, PromptMedia, Sequence, Size
from pages.asked import WHOLE, add, ask, seen, together
from pages.crops import Store, cut
from pages.glyphs import Glyphs, dense, glyphs
from varied import CELL, coupling, gather_views, random_share, shuffle

ASKED = 10
SHEETS = 0.3
"""How often a page is a sheet of several documents."""


def parts_batch(rng: Random, packer: Packer, pages: Store, area: int) -> Batch:
    """One page of at most `area` pixels, of which some tokens are kept."""
    while True:
        page = pages.sheet(rng) if rng.random() < SHEETS else pages.page(rng)
        width, height = page.image.size
        size = width // CELL * CELL, height // CELL * CELL
        grid = size[1] // CELL, size[0] // CELL
        if size[0] * size[1] > area or grid[0] * grid[1] < 40:
            continue
        shown = seen(page, WHOLE, size)
        pixels = cut(rng, page, size, WHOLE)
        # A layout is made for a few questions; then all are asked that it can answer.
        wanted = ask(rng, shown, rng.choice((1, 1, 2, 4)))
        total = max(4, round(grid[0] * grid[1] * random_share(rng)))
        layout = random_layout(rng, pixels, coupling(rng, wanted, size, grid), total)
        held = layout.native_cells()
        turns = [turn for turn in (*wanted, *ask(rng, shown, ASKED)) if answerable(turn, held)]
        if not turns:
            continue
        sequences: list[Sequence] = []
        places = tuple(map(tuple, layout.places().tolist()))
        add(sequences, packer, turns, PromptMedia(grid, places=places), shown.words)
        batch = together(sequences, [[]], [view_targets(glyphs(page.words), layout)])
        return batch | gather_views([layout], [pixels])


def random_layout(rng: Random, pixels: NDArray[np.uint8], participatory: Map, total: int) -> Layout:
    """A layout of `total` tokens: by the engine's division, or all regions at native resolution with the
    most relevant of their tokens."""
    channels = texture(pixels, CELL)
    ways = Ways(propositional(channels), perspectival(channels), participatory)
    tensions = Tensions(rng.random() ** 2, rng.uniform(0.6, 1.0), rng.uniform(0.4, 1.0))
    worth = Balancer().balance(ways, tensions)
    if rng.random() < 0.3:
        worth = shuffle(rng, worth)
    content = content_mask(ways.propositional, ways.perspectival)
    if rng.random() < 0.5:
        return keep_native(worth, content, total).layout
    return attend(worth, content, total, tensions.compress, side=rng.choice((SIDE, SIDE, 9))).layout


def answerable(turn: Turn, held: Mask) -> bool:
    """Whether all of a question's evidence is in the held cells. Without evidence, any part will do."""
    for left, top, right, bottom in turn.focus:
        middle = int((top + bottom) / 2 // CELL)
        across = slice(int(left // CELL), int(max(left, right - 1) // CELL) + 1)
        if not held[middle, across].all():
            return False
    return bool(turn.focus) or held.mean() > 0.5


def view_targets(characters: Glyphs, layout: Layout) -> Dense:
    """The dense targets of a layout's tokens: of each region alone, and none below native resolution."""
    targets: list[Dense] = []
    for view in layout.views:
        size: Size = (view.shape[1] * CELL, view.shape[0] * CELL)
        shift = (1.0, 0.0, -CELL * view.region.column, 0.0, 1.0, -CELL * view.region.row)
        target = dense(characters, shift, size)
        kept = {name: values[list(view.token_indices)] for name, values in target.items()}
        if not view.native:
            kept = {name: np.full_like(values, -1) for name, values in kept.items()}
        targets.append(kept)
    return {name: np.concatenate([one[name] for one in targets]) for name in targets[0]}
