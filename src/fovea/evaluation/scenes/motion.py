"""Short sequences of frames in which one object moves along a row or a column."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.phrasing import turn
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Item, Scene
from fovea.evaluation.scenes.vocabulary import DIRECTIONS, sentence

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
