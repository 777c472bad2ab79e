"""Teaches the text layers to answer from the letters of a page, without its picture: the tower costs most.

    python -m pages.letters --run runs/page --minutes 60
    python -m pages.letters --run runs/page --minutes 60 --resume
    python -m pages.letters --run runs/page --minutes 60 --begun --keep

The letters are given as visual tokens by `spelling`, as a tower that mostly reads well would give them. So
the text layers learn to find and to copy while the tower still learns to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from fovea.evaluation.documents.page import Page
from fovea.evaluation.documents.scan import Affine
from loop import Workers, options
from packing import Batch, Packer, PromptMedia, Sequence, Size
from pages.asked import WHOLE, add, picture, together, whole_page
from pages.config import tokenizer
from pages.crops import Store, place
from pages.glyphs import NOTHING
from pages.kept import TEXT, begin, keep
from pages.spelling import Reading, vectors
from pages.start import build_in, fix
from pages.trainer import Settings, Trainer, answer_losses, produce

NOISE = 0.2
"""The share of letters that are read badly, as `Spelling` takes it."""


class Spelled(Reading):
    """The model with letters instead of a tower's output."""

    def __init__(self) -> None:
        super().__init__()
        self.model["visual"].requires_grad_(False)
        known = vectors()
        packer = Packer(tokenizer())
        before = [before[-3:][::-1] for before in (packer.assistant, packer.text('":"'))]
        fix(self.model["language_model"])
        build_in(self, known, known[torch.tensor(before)], (packer.vision_start, packer.start))

    def visual(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        return self.spelling(batch["text"], batch["flag"], NOISE if self.training else 0.0), []


@dataclass
class LetterSettings(Settings):
    """The command-line options of a run: those of `pages.train`, of which `dense` and `parts` have no effect.

    whole: pixels of a step's whole pages, of which only tokens with letters and some others are given.
    begun: begin with the text layers in the repository. keep: write the averaged weights there at the end.
    """

    threads: int = 1
    lines: int = 16
    small: int = 0
    whole: int = 0
    largest: int = 1_900_000
    begun: bool = False
    keep: bool = False


def draw(rng: Random, packer: Packer, pages: Store, settings: LetterSettings) -> list[Batch]:
    """The batches of a step that only this training has."""
    batches, left = [], settings.whole
    while left > 0:
        batch, area = sparse_batch(rng, packer, pages, settings.largest, 2 * settings.asked)
        batches.append(batch)
        left -= area
    return batches


def sparse_batch(rng: Random, packer: Packer, pages: Store, area: int, asked: int) -> tuple[Batch, int]:
    """One page of at most `area` pixels, of which only tokens with letters and a few others are given."""

    def move(page: Page, size: Size) -> Affine:
        return WHOLE if rng.random() < 0.5 else place(rng, page, size)

    page, size, affine, shown, turns = whole_page(rng, pages, area, asked, move)
    _, target = picture(rng, pages, page, size, affine)
    chance = np.random.default_rng(rng.randrange(2**31)).random(len(target["text"]))
    kept = (target["text"][:, :, 0] > NOTHING).any(1) | (chance < rng.random() ** 3)
    places = tuple(divmod(int(index), size[0] // 32) for index in np.flatnonzero(kept))
    sequences: list[Sequence] = []
    add(sequences, packer, turns, PromptMedia((size[1] // 32, size[0] // 32), places=places), shown.words)
    batch = together(sequences, [[]], [{name: values[kept] for name, values in target.items()}])
    return batch, size[0] * size[1]


class Speller(Trainer):
    """The text layers, in training."""

    name = "letters"

    losses = staticmethod(answer_losses)


def main() -> None:
    settings = options(__doc__, LetterSettings)
    torch.manual_seed(settings.seed)
    model = Spelled()
    if settings.begun:
        begin(model, TEXT)
    speller = Speller(settings, model)
    with Workers(produce, settings, speller.step, "letters", draw, False) as queue:
        speller.train(queue)
    if settings.keep:
        keep(speller, TEXT)


if __name__ == "__main__":
    main()
