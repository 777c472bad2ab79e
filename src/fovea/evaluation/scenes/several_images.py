"""Questions about several images: pairs that differ, and frames in which one object moves."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from fovea.evaluation.scenes.compose import compose, place_item
from fovea.evaluation.scenes.phrasing import turn
from fovea.evaluation.scenes.scene import (
    COLOUR_NAMES,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Item,
    Scene,
    Turn,
    plural,
    sentence,
)

Pair = tuple[tuple[Scene, Scene], Turn]


def _more(rng: Random, one: Scene, two: Scene) -> Turn:
    """A question about which image has more objects, or more of one shape. The answer may be "neither"."""
    shape = rng.choice((None, rng.choice(SHAPES), rng.choice([i.shape for i in one.items + two.items])))
    first, second = len(one.matching(shape=shape)), len(two.matching(shape=shape))
    noun = plural(shape or "object")
    question = f"Which image has more {noun}?"
    if first == second:
        return turn(rng, question, "neither", f"both images have {first} {noun}")
    word = "first" if first > second else "second"
    return turn(rng, question, word, f"the {word} image has more {noun}")


def _recoloured(rng: Random, item: Item) -> Item:
    shade = rng.choice([name for name in COLOUR_NAMES if name != item.colour])
    return replace(item, colour=shade, rgb=COLOURS[shade])


def _change(rng: Random, scene: Scene) -> tuple[Scene, str]:
    """The scene with one change, and a sentence that describes the change, without the full stop."""
    item = rng.choice(scene.items)
    others = tuple(other for other in scene.items if other is not item)
    empty = [cell for cell in range(9) if scene.in_cell(cell) is None]
    kind = rng.randrange(3)
    if kind == 0:
        other = _recoloured(rng, item)
        change = f"the {item.shape} in the {item.place} changed from {item.colour} to {other.colour}"
        return scene.with_items((*others, other)), change
    if kind == 1 or not empty:
        return scene.with_items(others), f"the {item.name} in the {item.place} is gone"
    new = place_item(
        rng, scene.width, scene.height, rng.choice(empty), rng.choice(COLOUR_NAMES), rng.choice(SHAPES)
    )
    return scene.with_items((*scene.items, new)), f"a new {new.name} is in the {new.place}"


def _difference(rng: Random, change: str) -> Turn:
    """A question about whether two images differ, or how. change: describes it; empty for equal images."""
    if rng.random() < 0.5:
        forms = ("What differs between the two images?", "What changed from the first image to the second?")
        answer = sentence(change or "nothing changed")
        return Turn(rng.choice(forms), answer, (answer,))
    question = rng.choice(("Are the two images the same?", "Are both images equal?"))
    word, full = ("no", "no, they are different") if change else ("yes", "yes, they are the same")
    return turn(rng, question, word, full)


def pair_scenes(rng: Random, width: int, height: int) -> tuple[Scene, Scene, str | None]:
    """Two scenes of one size, and the change between them: None if unrelated, empty if equal."""
    scene = compose(rng, width, height, items=rng.randint(1, 6))
    kind = rng.randrange(5)
    if kind < 2:
        return scene, compose(rng, width, height, items=rng.randint(1, 6)), None
    if kind == 2:
        return scene, scene, ""
    return scene, *_change(rng, scene)


def ask_pair(rng: Random, one: Scene, two: Scene, change: str | None) -> Turn:
    """A question about two scenes. one, two, change: from `pair_scenes`."""
    if change is None or (change and rng.random() < 0.2):
        return _more(rng, one, two)
    return _difference(rng, change)


def compare(rng: Random, width: int, height: int) -> Pair:
    """Two scenes of that size, and a question about both."""
    one, two, change = pair_scenes(rng, width, height)
    return (one, two), ask_pair(rng, one, two, change)


_STEP = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def _frames(scene: Scene, mover: Item, direction: str, count: int) -> tuple[Scene, ...]:
    """`count` frames, in which the mover crosses the image along its row or column in equal steps."""
    across, down = _STEP[direction]
    wide, high = scene.width / 3, scene.height / 3
    frames = []
    for step in range(count):
        share = 2 * step / (count - 1) - 1
        x = wide * (1.5 + across * share) if across else mover.x
        y = high * (1.5 + down * share) if down else mover.y
        cell = 3 * min(2, int(y // high)) + min(2, int(x // wide))
        moved = replace(mover, x=round(x, 1), y=round(y, 1), cell=cell)
        frames.append(scene.with_items((*(i for i in scene.items if i is not mover), moved)))
    return tuple(frames)


def motion_scenes(rng: Random, width: int, height: int, count: int) -> tuple[tuple[Scene, ...], Item, str]:
    """`count` frames in order, the item that moves, and its direction."""
    direction = rng.choice(DIRECTIONS)
    while True:
        scene = compose(rng, width, height, items=rng.randint(1, 5))
        mover = rng.choice(scene.items)
        lane = [
            i
            for i in scene.items
            if (i.row == mover.row if _STEP[direction][0] else i.column == mover.column)
        ]
        if len(lane) == 1 and len(scene.matching(mover.colour, mover.shape)) == 1:
            return _frames(scene, mover, direction, count), mover, direction


def ask_motion(rng: Random, mover: Item, direction: str) -> Turn:
    """A question about the item that moved, about its direction, or about both."""
    full = f"the {mover.name} moved {direction}"
    kind = rng.randrange(3)
    if kind == 0:
        answer = sentence(full)
        return Turn("What moved, and which way?", answer, (answer,))
    if kind == 1:
        return turn(rng, f"Which way did the {mover.name} move?", direction, full)
    return turn(rng, "Which object moved?", mover.name, f"the {mover.name} moved", ("Answer briefly.",))


def motion(rng: Random, width: int, height: int) -> tuple[tuple[Scene, ...], Turn]:
    """3 or 4 frames in order, and a question about the motion."""
    frames, mover, direction = motion_scenes(rng, width, height, rng.choice((3, 4)))
    return frames, ask_motion(rng, mover, direction)
