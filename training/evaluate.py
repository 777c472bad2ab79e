"""Exact match on held-out scenes while training: a whole answer predicted right, token by token.

With the right answer fed in, every token being the most likely one is the same as greedy decoding giving it.
"""

from __future__ import annotations

from random import Random

import torch

from batches import fitted
from fovea.evaluation.scenes.dataset import KINDS, content
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.vocabulary import HELD_OUT_SEED
from model import Fovea
from packing import Batch, Packer, Shown, collate, conversation
from several import group_times, grouped
from varied import tower, varied_batch

VIDEO = "video"
"""The kind `motion` with its frames as a video, two a second."""
PARTS = "parts"
"""Images seen in parts, at any share of their tokens."""
PART_SIZES = ((192, 192), (256, 192), (448, 448), (896, 672), (1344, 896))
SIZES = ((192, 192), (160, 224), (256, 160))


def held_out(
    packer: Packer,
    count: int,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    kinds: tuple[str, ...] = (*KINDS, VIDEO),
) -> dict[str, list[Batch]]:
    """By kind, batches of `count` samples in all; counts above 5 are left out; reading is 4 characters of 20 px."""
    found: dict[str, list[Batch]] = {}
    for kind in kinds:
        by_shape: dict[tuple[int, int, int], tuple[list, list]] = {}
        made, index = 0, 0
        while made < count:
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
            made += 1
            grid = (size[1] // 32, size[0] // 32)
            sequences, pictures = by_shape.setdefault((*size, len(scenes)), ([], []))
            shown = (
                Shown(grid, len(scenes)) if kind != VIDEO else Shown(grid, 0, group_times(len(scenes), 2.0))
            )
            drawn = [fitted(draw(scene), size) for scene in scenes]
            sequences.append(conversation(packer, list(turns), shown, None, False))
            pictures.append(grouped(drawn) if kind == VIDEO else drawn)
        found[kind] = [collate(*both) for both in by_shape.values()]
    embeds = tower()
    found[PARTS] = [
        varied_batch(Random(f"{HELD_OUT_SEED}/train/{index}/{PARTS}"), packer, size, 4, 1, embeds)
        for index, size in enumerate(PART_SIZES * (count // 16))
    ]
    return found


def exact_match(model: Fovea, batches: list[Batch], device: torch.device) -> float:
    """Share of turns whose every answer token is the most likely one."""
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
