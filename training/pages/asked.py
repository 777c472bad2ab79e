"""Batches of pages, or parts of pages, with several questions about each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from dense import Dense
from fovea.evaluation.documents import questions
from fovea.evaluation.documents.page import Page, Word
from fovea.evaluation.documents.scan import Affine, moved, moved_box
from fovea.evaluation.scenes.sample import Turn
from packing import Batch, Packer, PromptMedia, Sequence, Size, branches, collate
from pages.crops import Store, cut, place
from pages.glyphs import dense, glyphs
from pages.looks import Looks
from pages.state import LABEL_LETTERS

WHOLE: Affine = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""Shows a page as it is."""
BLOCK = 224
"""Tokens of the blocks that questions are packed in; a question with a longer answer is left out."""
WEIGHTS = {
    "field": 3.0,
    "cell": 3.0,
    "row": 1.0,
    "line": 3.0,
    "title": 0.5,
    "presence": 0.6,
    "bar": 2.0,
    "json": 6.0,
    "absent": 0.8,
}
"""How often each kind of question is chosen. An answer in JSON holds several values, and so teaches most."""
SMALL = ((320, 320), (384, 256), (512, 192), (256, 384), (448, 320), (448, 448), (576, 320))
KEY = re.compile(r'[{,]"[^"]*":')
"""What precedes a value in a JSON answer."""
TINY = ((128, 32), (192, 32), (256, 32), (192, 64), (256, 64), (320, 64), (384, 64), (256, 96), (320, 96))
TINY_BLOCK = 96
"""Sizes of parts with few words, and the tokens of their blocks."""
CHANCE_TO_COPY = 0.6
"""How often a small part is also to be copied out as a whole."""


def seen(page: Page, affine: Affine, size: Size) -> Page:
    """The page as far as a picture of `size` shows it: what is cut off has neither words nor a place."""
    width, height = size

    def inside(box: tuple[float, float, float, float]) -> bool:
        return box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height

    words: list[Word] = []
    partly: set[str] = set()
    for word in page.words:
        there = moved(word, affine)
        if inside(there.box):
            words.append(there)
        elif word.at:
            partly.add(word.at)
    places = {at: moved_box(box, affine) for at, box in page.places.items() if at not in partly}
    return replace(page, words=tuple(words), places=places)


def ask(rng: Random, page: Page, count: int, weights: dict[str, float] = WEIGHTS) -> list[Turn]:
    """Up to `count` different questions about what is shown."""
    turns: dict[str, Turn] = {}
    names = list(weights)
    for _ in range(3 * count):
        name = rng.choices(names, list(weights.values()))[0]
        turn = questions.KINDS[name](rng, page)
        if turn is not None:
            turns.setdefault(turn.question, turn)
        if len(turns) == count:
            break
    return list(turns.values())


def copied(rng: Random, page: Page) -> Turn | None:
    """All text of a small part, run by run in the order of the document."""
    if not page.words:
        return None
    text, before = "", None
    for word in page.words:
        same = before is not None and abs(before.middle - word.middle) < (word.box[3] - word.box[1]) * 0.3
        text += ("" if before is None else " " if same else "\n") + word.text
        before = word
    form = rng.choice(("Copy all text.", "Read everything.", "What is written here?"))
    return Turn(form, text, (text,), (page.words[0].box,)) if len(text.encode()) < BLOCK - 60 else None


def picture(
    rng: Random, pages: Store, page: Page, size: Size, affine: Affine
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """The picture of a part of a page, if pages are drawn, and its dense targets."""
    pixels = [cut(rng, page, size, affine)] if pages.drawn else []
    return pixels, dense(glyphs(page.words), affine, size)


def small_batch(rng: Random, packer: Packer, pages: Store, area: int, asked: int) -> Batch:
    """Parts of one size, of `area` pixels together."""
    size = rng.choice(SMALL)
    sequences, pictures, targets = [], [], []
    wanted = max(1, area // (size[0] * size[1]))
    tries = 0
    while len(sequences) < wanted:
        page = pages.page(rng)
        for _ in range(3):
            tries += 1
            affine = place(rng, page, size)
            shown = seen(page, affine, size)
            turns = ask(rng, shown, asked)
            if rng.random() < CHANCE_TO_COPY and (whole := copied(rng, shown)) is not None:
                turns.append(whole)
            if not turns or len(sequences) == wanted:
                continue
            pixels, target = picture(rng, pages, page, size, affine)
            add(sequences, packer, turns, whole_media(size), shown.words)
            pictures.append(pixels)
            targets.append(target)
    return together(sequences, pictures, targets)


def line_batch(rng: Random, packer: Packer, pages: Store, count: int) -> Batch:
    """`count` tiny parts with few words, to be copied out: what a token shows is learnt from these first."""
    size = rng.choice(TINY)
    sequences: list[Sequence] = []
    pictures: list[list[np.ndarray]] = []
    targets: list[Dense] = []
    while len(sequences) < count:
        page = pages.page(rng)
        for _ in range(6):
            affine = unbroken(rng, page, size)
            shown = seen(page, affine, size)
            whole = copied(rng, shown)
            if whole is None or len(whole.answer.encode()) > TINY_BLOCK - 40 or len(sequences) == count:
                continue
            pixels, target = picture(rng, pages, page, size, affine)
            add(sequences, packer, [whole], whole_media(size), shown.words, TINY_BLOCK)
            pictures.append(pixels)
            targets.append(target)
    return together(sequences, pictures, targets, TINY_BLOCK)


def unbroken(rng: Random, page: Page, size: Size, tries: int = 10) -> Affine:
    """A random part of a page that shows some words and cuts through few."""
    boxes = np.array([word.box for word in page.words])
    corners = boxes[:, [0, 1, 2, 1, 0, 3, 2, 3]].reshape(-1, 4, 2)

    def broken(affine: Affine) -> int:
        a, b, c, d, e, f = affine
        there = corners @ np.array(((a, d), (b, e))) + (c, f)
        low, high = there.min(1), there.max(1)
        inside = (low >= 0).all(1) & (high <= size).all(1)
        touching = (low < size).all(1) & (high > 0).all(1)
        return int(touching.sum() - inside.sum()) if inside.any() else 99

    return min((place(rng, page, size) for _ in range(tries)), key=broken)


def page_batch(rng: Random, packer: Packer, pages: Store, area: int, asked: int) -> Batch:
    """One whole page of at most `area` pixels, moved and tilted a little in a part of the cases."""

    def move(page: Page, size: Size) -> Affine:
        if rng.random() >= 0.4:
            return WHOLE
        if rng.random() < 0.5:
            return place(rng, page, size)
        return (1.0, 0.0, rng.uniform(-8, 8), 0.0, 1.0, rng.uniform(-8, 8))

    page, size, affine, shown, turns = whole_page(rng, pages, area, asked, move)
    pixels, target = picture(rng, pages, page, size, affine)
    sequences: list[Sequence] = []
    add(sequences, packer, turns, whole_media(size), shown.words)
    return together(sequences, [pixels], [target])


def whole_page(
    rng: Random, pages: Store, area: int, asked: int, move: Callable[[Page, Size], Affine]
) -> tuple[Page, Size, Affine, Page, list[Turn]]:
    """A page of at most `area` pixels about which something can be asked.

    Returns it, the size of its picture, how `move` moved it, what the picture shows, and the questions.
    """
    while True:
        page = pages.page(rng)
        width, height = page.image.size
        if width * height > area:
            continue
        size = (width // 32 * 32, height // 32 * 32)
        affine = move(page, size)
        shown = seen(page, affine, size)
        turns = ask(rng, shown, asked)
        if turns:
            return page, size, affine, shown, turns


def whole_media(size: Size) -> PromptMedia:
    """One picture of `size` with all of its tokens."""
    return PromptMedia((size[1] // 32, size[0] // 32))


def add(
    sequences: list[Sequence],
    packer: Packer,
    turns: list[Turn],
    media: PromptMedia,
    words: tuple[Word, ...] = (),
    block: int = BLOCK,
) -> None:
    """Append the sequence of one picture.

    The keys of JSON answers, which a grammar dictates, are no targets.

    words: what is shown, from which `points` and `links` are found.
    """
    sequence = branches(packer, turns, media, None, block)
    answers: dict[int, list[int]] = {}
    for index, group in zip(sequence.target_indices, sequence.groups, strict=True):
        answers.setdefault(group, []).append(index)
    dictated: set[int] = set()
    for group, indices in answers.items():
        text = packer.tokenizer.decode([sequence.tokens[index] for index in indices])
        if text.startswith("{"):
            spans = [
                (len(text[: m.start()].encode()), len(text[: m.end()].encode())) for m in KEY.finditer(text)
            ]
            dictated |= {indices[at] for start, end in spans for at in range(start, end)}
        turn = sequence.turns[group]
        Looks(sequence, packer, turn, indices, media).note(words)
    kept = [
        (index, group)
        for index, group in zip(sequence.target_indices, sequence.groups, strict=True)
        if index not in dictated
    ]
    sequence.target_indices, sequence.groups = [one for one, _ in kept], [one for _, one in kept]
    sequences.append(sequence)


def together(
    sequences: list[Sequence], pictures: list[list[np.ndarray]], targets: list[Dense], block: int = BLOCK
) -> Batch:
    batch = collate(sequences, pictures)
    batch["block"] = np.array(block, np.int64)
    for name, width in (
        ("points", 4),
        ("links", 4),
        ("asks", 4),
        ("labels", 3 + LABEL_LETTERS),
        ("places", 4),
    ):
        rows = [(row, *one) for row, sequence in enumerate(sequences) for one in getattr(sequence, name)]
        batch[name] = np.array(rows, np.int64).reshape(-1, width)
    copies = [(row, *one) for row, sequence in enumerate(sequences) for one in sequence.copies]
    for layer in range(2):
        some = [(row, *one) for row, at, *one in copies if at == layer]
        batch[f"copies{layer}"] = np.array(some, np.int64).reshape(-1, 4)
    return batch | {name: np.concatenate([one[name] for one in targets]) for name in targets[0]}
