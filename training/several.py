"""Batches that show more than one picture: pairs, frames as images, and videos.

A video is groups of two frames, an odd last one twice; one pass of the vision tower sees a group as one picture.
"""

from __future__ import annotations

from random import Random

import numpy as np

from batches import fitted, questions, some_system
from dense import Dense, dense_targets, stacked
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.motion import ask_motion, motion_scenes
from fovea.evaluation.scenes.pairs import ask_pair, pair_scenes
from fovea.evaluation.scenes.sample import Turn
from packing import Batch, Packer, Shown, Size, branches, collate, conversation

FRAMES = (2, 3, 3, 3, 4, 4, 4, 5, 6, 8)


def group_times(frames: int, rate: float) -> tuple[float, ...]:
    """Seconds of the middle of each group, for `rate` frames per second."""
    return tuple((at / rate + min(at + 1, frames - 1) / rate) / 2 for at in range(0, frames, 2))


def grouped(frames: list[np.ndarray]) -> list[np.ndarray]:
    """Frames to groups (2, height, width, 3)."""
    return [np.stack((frames[at], frames[min(at + 1, len(frames) - 1)])) for at in range(0, len(frames), 2)]


def _group_dense(frames: list[Dense]) -> list[Dense]:
    """What is in either frame of a group, without counts, as what moved is seen twice; and `moved`: (tokens, 4) 1 where
    an item's centre is in the first frame only, 2 where in the second only."""
    made = []
    for at in range(0, len(frames), 2):
        first, second = frames[at], frames[min(at + 1, len(frames) - 1)]
        both = {name: np.where(first[name] > 0, first[name], second[name]) for name in first}
        both["counts"] = np.full_like(first["counts"], -1)
        one, other = first["centres"], second["centres"]
        both["moved"] = np.where(one == other, 0, np.where(one > 0, 1, 2))
        made.append(both)
    return made


def _with_before(dense: list[Dense]) -> list[Dense]:
    """Adds `before`: (tokens, 4) the centres of the picture before; -1 for the first."""
    blank = np.full_like(dense[0]["centres"], -1)
    centres = [blank, *(one["centres"] for one in dense)]
    return [one | {"before": before} for one, before in zip(dense, centres, strict=False)]


def _rate(rng: Random) -> float:
    """Frames per second: mostly that of frames without a rhythm of their own."""
    return 2.0 if rng.random() < 0.6 else rng.uniform(0.4, 6.0)


def pair_batch(rng: Random, packer: Packer, size: Size, count: int) -> Batch:
    """Two images each."""
    width, height = size
    system = some_system(rng)
    shown = Shown((height // 32, width // 32), images=2)
    sequences, pictures, dense = [], [], []
    for _ in range(count):
        one, two, told = pair_scenes(rng, width, height)
        turns = _distinct([ask_pair(rng, one, two, told) for _ in range(6)])
        sequences.append(branches(packer, turns, shown, system))
        pictures.append([fitted(draw(scene), size) for scene in (one, two)])
        dense += _with_before([dense_targets(scene, size) for scene in (one, two)])
    return collate(sequences, pictures) | stacked(dense)


def motion_batch(rng: Random, packer: Packer, size: Size, count: int, video: bool) -> Batch:
    """Frames of a motion, as images or as a video; a batch has one number of frames."""
    width, height = size
    frames = rng.choice(FRAMES) if video else rng.choice((3, 4))
    grid, system = (height // 32, width // 32), some_system(rng)
    shown = Shown(grid, 0, group_times(frames, _rate(rng))) if video else Shown(grid, frames)
    sequences, pictures, dense = [], [], []
    for _ in range(count):
        scenes, mover, direction = motion_scenes(rng, width, height, frames)
        turns = _distinct([ask_motion(rng, mover, direction) for _ in range(5)])
        drawn = [fitted(draw(scene), size) for scene in scenes]
        found = [dense_targets(scene, size) for scene in scenes]
        sequences.append(branches(packer, turns, shown, system))
        pictures.append(grouped(drawn) if video else drawn)
        dense += _with_before(_group_dense(found) if video else found)
    return collate(sequences, pictures) | stacked(dense)


def still_batch(rng: Random, packer: Packer, size: Size, count: int, asked: int) -> Batch:
    """Short videos in which nothing moves, with the questions about single images; sometimes the question is first."""
    width, height = size
    frames, system = rng.choice((1, 2, 3, 4)), some_system(rng)
    shown = Shown((height // 32, width // 32), 0, group_times(frames, _rate(rng)))
    talk = rng.random() < 0.25
    sequences, pictures, dense = [], [], []
    while len(sequences) < count:
        scene = compose(rng, width, height, labels=rng.choice((0, 0, 0, 1, 1, 2)))
        turns = questions(rng, scene, 4 if talk else asked)
        if not turns:
            continue
        if talk:
            sequences.append(conversation(packer, turns, shown, system, rng.random() < 0.4))
        else:
            sequences.append(branches(packer, turns, shown, system))
        pictures.append(grouped([fitted(draw(scene), size)] * frames))
        dense += [dense_targets(scene, size)] * len(shown.times)
    return collate(sequences, pictures) | stacked(dense)


def _distinct(turns: list[Turn]) -> list[Turn]:
    return list({turn.question: turn for turn in turns}.values())
