"""Questions about held-out pages, on which fovea-page is measured during its training."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from evaluate import matches
from fovea.evaluation.documents import questions, store
from fovea.evaluation.scenes.sample import Turn
from model import Fovea
from packing import Batch, Packer, Sequence
from pages.asked import WHOLE, add, seen, together, whole_media
from pages.config import PAGES
from pages.glyphs import dense, glyphs

HELD = "held"
"""The stored folder, beside that of training pages, with pages of held-out templates and fonts."""


@dataclass(frozen=True)
class HeldOut:
    """A page with its questions. kinds: the kind of question of each turn, by its number in the sequence."""

    batch: Batch
    kinds: dict[int, str]


def held_out_pages(packer: Packer, count: int = 60, largest: int = 1_000_000) -> list[HeldOut]:
    """Pages of at most `largest` pixels, with about `count` questions of every kind in all."""
    pages = PAGES.with_name(PAGES.name + "-" + HELD)
    made: list[HeldOut] = []
    for number, record in enumerate(store.records(pages)):
        page = store.read(pages, record)
        size = (page.image.size[0] // 32 * 32, page.image.size[1] // 32 * 32)
        if size[0] * size[1] > largest or number >= count // 2:
            continue
        shown = seen(page, WHOLE, size)
        asked: dict[str, tuple[Turn, str]] = {}
        for kind, make in questions.KINDS.items():
            rng = Random(f"test/{number}/{kind}")
            for turn in filter(None, (make(rng, shown) for _ in range(3))):
                asked.setdefault(turn.question, (turn, kind))
        if not asked:
            continue
        sequences: list[Sequence] = []
        add(sequences, packer, [turn for turn, _ in asked.values()], whole_media(size), shown.words)
        pixels = np.asarray(page.image)[: size[1], : size[0]]
        batch = together(sequences, [[pixels]], [dense(glyphs(page.words), WHOLE, size)])
        kinds = {number: asked[turn.question][1] for number, turn in sequences[0].turns.items()}
        made.append(HeldOut(batch, kinds))
    return made


def exact(model: Fovea, pages: list[HeldOut], device: torch.device) -> dict[str, float]:
    """The share of questions of each kind that are answered without a wrong letter, each letter after the
    right ones before it."""
    right: dict[str, list[bool]] = {kind: [] for kind in questions.KINDS}
    for page in pages:
        for (_, number), hit in matches(model, page.batch, device).items():
            right[page.kinds[number]].append(hit)
    return {kind: round(sum(some) / len(some), 3) for kind, some in right.items() if some}
