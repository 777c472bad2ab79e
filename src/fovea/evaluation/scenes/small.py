"""Questions about small details in large images: codes and items about as large as a visual token's cell."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes import questions
from fovea.evaluation.scenes.compose import palette, place_item, place_label, random_background, random_code
from fovea.evaluation.scenes.phrasing import boxes_around
from fovea.evaluation.scenes.questions import reading_of
from fovea.evaluation.scenes.scene import COLOUR_NAMES, SHAPES, Scene, Turn

Question = tuple[Scene, Turn, dict[str, int]]
"""A scene, a turn about it, and the facts of the sample."""

CAPITALS = (13, 18)
"""Height of a small code's capital letters, in pixels."""
SMALL_ITEM = (18.0, 34.0)
"""Side of a small item's bounding square, in pixels."""
CODE_LENGTH = (3, 6)
LARGE_SIZES: tuple[tuple[int, int], ...] = tuple(
    (width, height)
    for width in range(640, 1344 + 1, 32)
    for height in range(640, 1344 + 1, 32)
    if width * height <= 1344 * 896
)
"""Choices of (width, height), multiples of 32, from 640x640 to 1344x896 and 896x1344."""


def compose_small(
    rng: Random,
    width: int,
    height: int,
    *,
    labels: int | None = None,
    small: int | None = None,
    large: int | None = None,
) -> Scene:
    """A random scene for a large image.

    If all three numbers are 0, the scene gets one small item. If there are more items than cells without a
    label, some are left out, large ones first.

    labels: how many codes it has, 0 to 3; None: a random number, 0 to 2.
    small: how many small items; None: a random number, mostly a low one.
    large: how many items of ordinary size; None: a random number, mostly a low one.
    """
    labels = rng.choice((0, 0, 0, 1, 1, 2)) if labels is None else labels
    small = rng.choice((0, 1, 1, 2, 2, 3, 4, 6)) if small is None else small
    large = rng.choice((0, 0, 0, 1, 1, 2)) if large is None else large
    if not labels + small + large:
        small = 1
    background, dark = random_background(rng)
    rows = sorted(rng.sample(range(3), labels))
    codes = []
    for row in rows:
        code = random_code(rng, rng.randint(*CODE_LENGTH))
        codes.append(place_label(rng, width, height, row, dark, code, rng.randint(*CAPITALS)))
    free = [cell for cell in range(9) if cell // 3 not in rows]
    sizes = [*(round(rng.uniform(*SMALL_ITEM), 1) for _ in range(small)), *[None] * large][: len(free)]
    cells = rng.sample(free, len(sizes))
    colours, shapes = palette(rng, COLOUR_NAMES), palette(rng, SHAPES)
    items = [
        place_item(rng, width, height, cell, rng.choice(colours), rng.choice(shapes), size)
        for cell, size in zip(cells, sizes, strict=True)
    ]
    return Scene(width, height, background, (), tuple(codes)).with_items(tuple(items))


def small_text(rng: Random, width: int, height: int) -> Question:
    """A question about the text of a small code, in a scene with up to 4 items.

    Facts: "characters", their number, and "height", that of a capital letter in pixels.
    """
    while True:
        labels, small, large = rng.choice((1, 1, 2)), rng.choice((0, 0, 1, 2, 3)), rng.choice((0, 0, 1))
        scene = compose_small(rng, width, height, labels=labels, small=small, large=large)
        question = reading_of(rng, scene)
        if question is not None:
            turn, label = question
            return scene, turn, {"characters": len(label.text), "height": label.height}


def small_object(rng: Random, width: int, height: int) -> Question:
    """A question about the colour, shape or place of one of 1 to 5 small items, sometimes beside a large one.

    Facts: "size" of the item in pixels.
    """
    while True:
        small = rng.choice((1, 1, 2, 2, 3, 4, 5))
        scene = compose_small(rng, width, height, labels=0, small=small, large=rng.choice((0, 0, 1)))
        asker = rng.choice((questions.colour, questions.shape, questions.position))
        turn = asker(rng, scene)
        if turn is None:
            continue
        [item] = [item for item in scene.items if turn.focus == boxes_around(scene, item)]
        if item.size <= SMALL_ITEM[1]:
            return scene, turn, {"size": round(item.size)}
