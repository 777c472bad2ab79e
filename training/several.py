"""Draws batches with more than one picture: pairs, frames as images, and videos.

The frames of a video are grouped by two; an odd last frame is used twice. The vision tower encodes a group as
one picture.
"""

from __future__ import annotations

from random import Random

import numpy as np

from batches import fit_image, questions, random_system
from dense import Dense, dense_targets, stack_dense
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.scene import Turn
from fovea.evaluation.scenes.several_images import ask_motion, ask_pair, motion_scenes, pair_scenes
from packing import Batch, Packer, PromptMedia, Size, branches, collate, conversation

FRAMES = (2, 3, 3, 3, 4, 4, 4, 5, 6, 8)


def group_times(frames: int, rate: float) -> tuple[float, ...]:
    """The time of the middle of each group in seconds. rate: frames per second."""
    return tuple((at / rate + min(at + 1, frames - 1) / rate) / 2 for at in range(0, frames, 2))


def group_frames(frames: list[np.ndarray]) -> list[np.ndarray]:
    """Group frames by two: arrays (2, height, width, 3)."""
    return [np.stack((frames[at], frames[min(at + 1, len(frames) - 1)])) for at in range(0, len(frames), 2)]


def _group_dense(frames: list[Dense]) -> list[Dense]:
    """The dense targets of groups of frames: the content of either frame, and `moved`.

    Counts are left out, because an item that moved would count twice.

    moved: (tokens, 4), 1 where an item's centre is in the first frame only, 2 where it is in the second only.
    """
    groups = []
    for at in range(0, len(frames), 2):
        first, second = frames[at], frames[min(at + 1, len(frames) - 1)]
        both = {name: np.where(first[name] > 0, first[name], second[name]) for name in first}
        both["counts"] = np.full_like(first["counts"], -1)
        one, other = first["centres"], second["centres"]
        both["moved"] = np.where(one == other, 0, np.where(one > 0, 1, 2))
        groups.append(both)
    return groups


def _with_before(dense: list[Dense]) -> list[Dense]:
    """Add `before`, (tokens, 4): the centres of the previous picture; -1 for the first picture."""
    blank = np.full_like(dense[0]["centres"], -1)
    centres = [blank, *(one["centres"] for one in dense)]
    return [one | {"before": before} for one, before in zip(dense, centres, strict=False)]


def _rate(rng: Random) -> float:
    """A random rate in frames per second. It is mostly 2, the rate of frames that come without times."""
    return 2.0 if rng.random() < 0.6 else rng.uniform(0.4, 6.0)


def pair_batch(rng: Random, packer: Packer, size: Size, count: int) -> Batch:
    """`count` pairs of images with questions about both."""
    width, height = size
    system = random_system(rng)
    media = PromptMedia((height // 32, width // 32), images=2)
    sequences, pictures, dense = [], [], []
    for _ in range(count):
        one, two, change = pair_scenes(rng, width, height)
        turns = _distinct([ask_pair(rng, one, two, change) for _ in range(6)])
        sequences.append(branches(packer, turns, media, system))
        pictures.append([fit_image(draw(scene), size) for scene in (one, two)])
        dense += _with_before([dense_targets(scene, size) for scene in (one, two)])
    return collate(sequences, pictures) | stack_dense(dense)


def motion_batch(rng: Random, packer: Packer, size: Size, count: int, video: bool) -> Batch:
    """`count` motions, as images or as a video. All of a batch have the same number of frames."""
    width, height = size
    frames = rng.choice(FRAMES) if video else rng.choice((3, 4))
    grid, system = (height // 32, width // 32), random_system(rng)
    media = PromptMedia(grid, 0, group_times(frames, _rate(rng))) if video else PromptMedia(grid, frames)
    sequences, pictures, dense = [], [], []
    for _ in range(count):
        scenes, mover, direction = motion_scenes(rng, width, height, frames)
        turns = _distinct([ask_motion(rng, mover, direction) for _ in range(5)])
        images = [fit_image(draw(scene), size) for scene in scenes]
        targets = [dense_targets(scene, size) for scene in scenes]
        sequences.append(branches(packer, turns, media, system))
        pictures.append(group_frames(images) if video else images)
        dense += _with_before(_group_dense(targets) if video else targets)
    return collate(sequences, pictures) | stack_dense(dense)


def still_batch(rng: Random, packer: Packer, size: Size, count: int, per_image: int) -> Batch:
    """Short videos in which nothing moves, with questions as about single images.

    per_image: questions about each. Some videos have a conversation instead, whose first question may precede
        the video.
    """
    width, height = size
    frames, system = rng.choice((1, 2, 3, 4)), random_system(rng)
    media = PromptMedia((height // 32, width // 32), 0, group_times(frames, _rate(rng)))
    talk = rng.random() < 0.25
    sequences, pictures, dense = [], [], []
    while len(sequences) < count:
        scene = compose(rng, width, height, labels=rng.choice((0, 0, 0, 1, 1, 2)))
        turns = questions(rng, scene, 4 if talk else per_image)
        if not turns:
            continue
        if talk:
            sequences.append(conversation(packer, turns, media, system, rng.random() < 0.4))
        else:
            sequences.append(branches(packer, turns, media, system))
        pictures.append(group_frames([fit_image(draw(scene), size)] * frames))
        dense += [dense_targets(scene, size)] * len(media.times)
    return collate(sequences, pictures) | stack_dense(dense)


def _distinct(turns: list[Turn]) -> list[Turn]:
    return list({turn.question: turn for turn in turns}.values())
