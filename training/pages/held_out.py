"""Questions about held-out pages, on which fovea-page is measured during its training."""

from __future__ import annotations

from random import Random

import numpy as np

from fovea.evaluation.documents import questions, store
from packing import Batch, Packer
from pages.asked import WHOLE, add, seen, together, whole_media
from pages.config import PAGES
from pages.glyphs import dense, glyphs

HELD = "held"
"""The stored folder, beside that of training pages, with pages of held-out templates and fonts."""


def held_out_batches(packer: Packer, count: int = 60, largest: int = 1_000_000) -> dict[str, list[Batch]]:
    """Batches of one page each by kind of question, about `count` questions of every kind."""
    folder = PAGES.with_name(PAGES.name + "-" + HELD)
    batches: dict[str, list[Batch]] = {name: [] for name in questions.KINDS}
    for number, record in enumerate(store.records(folder)):
        page = store.read(folder, record)
        size = (page.image.size[0] // 32 * 32, page.image.size[1] // 32 * 32)
        if size[0] * size[1] > largest or number >= count // 2:
            continue
        shown = seen(page, WHOLE, size)
        pixels = np.asarray(page.image)[: size[1], : size[0]]
        target = dense(glyphs(page.words), WHOLE, size)
        for name, make in questions.KINDS.items():
            rng = Random(f"test/{number}/{name}")
            turns = {turn.question: turn for turn in (make(rng, shown) for _ in range(3)) if turn}
            if turns:
                sequences: list = []
                add(sequences, packer, list(turns.values()), whole_media(size), shown.words)
                batches[name].append(together(sequences, [[pixels]], [target]))
    return {name: some for name, some in batches.items() if some}
