"""Measures exact match on held-out scenes during training: the share of answers that are predicted
completely.

The right answer is the model's input. If each of its tokens is the most likely one there, then greedy
decoding gives exactly this answer.
"""

from __future__ import annotations

from random import Random

import torch

from batches import fit_image, offer
from fovea.evaluation.scenes.dataset import KINDS, TASK_KINDS, content
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.scene import HELD_OUT_SEED
from fovea.evaluation.scenes.structured import TOOLS
from model import Fovea
from packing import Batch, Packer, PromptMedia, collate, conversation
from several import group_frames, group_times
from varied import tower, varied_batch

VIDEO = "video"
"""The kind `motion` with its frames as a video of two frames a second."""
PARTS = "parts"
"""Images encoded in parts, with a random share of their tokens."""
PART_SIZES = ((192, 192), (256, 192), (448, 448), (896, 672), (1344, 896))
SIZES = ((192, 192), (160, 224), (256, 160))


def held_out_batches(
    packer: Packer,
    count: int,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    kinds: tuple[str, ...] = (*KINDS, *TASK_KINDS, VIDEO),
) -> dict[str, list[Batch]]:
    """Held-out batches by kind, with `count` samples of each kind together.

    Counts above 5 are left out. Texts to read have 4 characters, with capital letters of 20 pixels or more.
    """
    batches: dict[str, list[Batch]] = {}
    for kind in kinds:
        by_shape: dict[tuple[int, int, int], tuple[list, list]] = {}
        samples, index = 0, 0
        while samples < count:
            index += 1
            rng = Random(f"{HELD_OUT_SEED}/train/{index}/{kind}")
            size = sizes[index % len(sizes)]
            scenes, turns, facts = content("motion" if kind == VIDEO else kind, rng, size)
            easy = (
                facts.get("count", 0) <= 5
                and facts.get("characters", 4) == 4
                and facts.get("height", 20) >= 20
            )
            if not easy:
                continue
            samples += 1
            grid = (size[1] // 32, size[0] // 32)
            sequences, pictures = by_shape.setdefault((*size, len(scenes)), ([], []))
            media = (
                PromptMedia(grid, len(scenes))
                if kind != VIDEO
                else PromptMedia(grid, 0, group_times(len(scenes), 2.0))
            )
            frames = [fit_image(draw(scene), size) for scene in scenes]
            system = offer(list(TOOLS), None) if kind == "tool" else None
            sequences.append(conversation(packer, list(turns), media, system, False))
            pictures.append(group_frames(frames) if kind == VIDEO else frames)
        batches[kind] = [collate(*both) for both in by_shape.values()]
    embeds = tower()
    batches[PARTS] = [
        varied_batch(Random(f"{HELD_OUT_SEED}/train/{index}/{PARTS}"), packer, size, 4, 1, embeds)
        for index, size in enumerate(PART_SIZES * (count // 16))
    ]
    return batches


def exact_match(model: Fovea, batches: list[Batch], device: torch.device) -> float:
    """The share of turns in which each token of the answer is the most likely one, rounded to 3 digits."""
    right = total = 0
    for batch in batches:
        tensors = {key: torch.from_numpy(value).to(device) for key, value in batch.items()}
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            states, _, _ = model.hidden(tensors)
            row, column, token, group = tensors["targets"].unbind(1)
            hit = model.logits(states[row, column]).argmax(-1) == token
        key = row * 64 + group
        for one in key.unique():
            right += bool(hit[key == one].all())
            total += 1
    return round(right / max(1, total), 3)
