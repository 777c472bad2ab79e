"""Batches of pages, or parts of pages, with several questions about each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from dense import Dense
from fovea.evaluation.documents import fields, questions
from fovea.evaluation.documents.page import Box, Page, Word
from fovea.evaluation.documents.scan import Affine, moved, moved_box
from fovea.evaluation.scenes.sample import Turn
from packing import Batch, Packer, PromptMedia, Sequence, Size, branches, collate
from pages.crops import Store, cut, place
from pages.glyphs import PATCH, dense, glyphs
from pages.start import ABOVE, ALSO_NAMED, BESIDE, LABEL_LETTERS, NAMED

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
LATER = (0, 1, 3)
"""The bytes of a value that are to be written with a look at its label, where the question names it."""
SMALL = ((320, 320), (384, 256), (512, 192), (256, 384), (448, 320), (448, 448), (576, 320))
KEY = re.compile(r'[{,]"[^"]*":')
"""What precedes a value in a JSON answer."""
VALUE = re.compile(r'"([^"]+)":"((?:[^"\\]|\\.)+)"')
"""A key of a JSON answer and its value, a string."""
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
        question_length = len(packer.text(turn.question)) + len(packer.assistant)
        look(sequence, packer, turn, indices, question_length, media, words)
    kept = [
        (index, group)
        for index, group in zip(sequence.target_indices, sequence.groups, strict=True)
        if index not in dictated
    ]
    sequence.target_indices, sequence.groups = [one for one, _ in kept], [one for _, one in kept]
    sequences.append(sequence)


def look(
    sequence: Sequence,
    packer: Packer,
    turn: Turn,
    indices: list[int],
    question_length: int,
    media: PromptMedia,
    words: tuple[Word, ...],
) -> None:
    """Note where an answer's values stand, their labels, and where the question names these.

    indices: of the tokens of the answer, a byte each.
    question_length: tokens from the start of the question to the answer.
    """
    columns, asked = media.grid[1], indices[0] - question_length
    numbers = {place: number for number, place in enumerate(media.places)} if media.places else None

    def token(word: Word) -> tuple[int, int] | None:
        """The visual token in which a word begins, and the patch."""
        column, row = int(word.starts[0] // PATCH), int(word.middle // PATCH)
        place = row // 2, column // 2
        number = place[0] * columns + place[1] if numbers is None else numbers.get(place)
        return None if number is None else (sequence.slots[number], row % 2 * 2 + column % 2)

    shown = [word for word in words if any(_covers(box, word) for box in turn.focus)]
    for start, value, key in values(turn.answer):
        first = next((word for word in shown if value.startswith(word.text) and word.text), None)
        there = first and token(first)
        if not first or not there:
            continue
        state = indices[len(turn.answer[:start].encode())] - 1
        sequence.points.append((state, *there))
        runs = labels(turn, first, words)
        for run in runs:
            label = token(run[0])
            if label and label[0] < there[0] and (key is None or not run[0].at):
                head = BESIDE[there[1] // 2] if beside(run[0], first) else ABOVE
                sequence.links.append((there[0], label[0], head))
                know(sequence, there[0], 1 + there[1] // 2, first_letters(packer, spelled(run)))
        if runs:  # nobody could tell it from the value alone
            know(sequence, there[0], 1 + there[1] // 2, first_letters(packer, meaning(first)))
        if key is None:
            named = {head: asked + at for head, at in in_question(turn.question, first, runs).items()}
        else:
            named = {NAMED: indices[len(turn.answer[:key].encode())] + LABEL_LETTERS - 1}
        if len(named) == 1:
            named = dict.fromkeys((NAMED, ALSO_NAMED), *named.values())
        later = [byte for byte in LATER if byte < len(value.encode())]
        sequence.asks += [(state + byte, at, head) for byte in later for head, at in named.items()]
        for at in named.values():
            asked_for = packer.tokenizer.decode(sequence.tokens[at - LABEL_LETTERS + 1 : at + 1])
            know(sequence, state, 0, first_letters(packer, asked_for.lower()))


def in_question(question: str, first: Word, runs: list[list[Word]]) -> dict[int, int]:
    """The bytes of a question that name a value's labels or its meaning, by the head that looks there."""
    named: dict[int, int] = {}
    for run in runs:
        if (at := named_at(question, spelled(run))) is not None:
            named.setdefault(NAMED if beside(run[0], first) else ALSO_NAMED, at)
    if not named and meaning(first) and (at := named_at(question, meaning(first))) is not None:
        named[NAMED] = at
    return named


def beside(label: Word, value: Word) -> bool:
    """Whether a label is in the line of its value."""
    return abs(label.middle - value.middle) < (value.box[3] - value.box[1]) / 2


def meaning(value: Word) -> str:
    """The name of a field, in small letters, of which this is the value; "" if it is none."""
    return fields.name_of(value.at.removeprefix("field:")).lower() if value.at.startswith("field:") else ""


def know(sequence: Sequence, token: int, place: int, letters: list[int]) -> None:
    """Note that a token should know a label. place: of `start.KNOWN`. letters: the first ones, as bytes."""
    row = (token, place, *letters)
    if len(letters) == LABEL_LETTERS and row not in sequence.labels:
        sequence.labels.append(row)


def first_letters(packer: Packer, text: str) -> list[int]:
    """The bytes of the first letters of a label; none if some of them are not ASCII."""
    letters = text[:LABEL_LETTERS]
    return packer.text(letters) if letters.isascii() else []


def labels(turn: Turn, first: Word, words: tuple[Word, ...]) -> list[list[Word]]:
    """The words of each label of a value. first: the value's first word. words: all that are shown."""
    runs = [[word for word in words if _covers(box, word)] for box in label_boxes(turn, first)]
    return [run for run in runs if run and run[0] is not first]


def label_boxes(turn: Turn, first: Word) -> tuple[Box, ...]:
    """The boxes of a value's labels. first: the value's first word.

    Of several values in one answer, each is followed by its label, if it has one.
    """
    if not turn.answer.startswith("{"):
        return turn.focus
    own = next(number for number, box in enumerate(turn.focus) if _covers(box, first))
    return turn.focus[own + 1 : own + 2]


def named_at(question: str, label: str) -> int | None:
    """The byte of a question that ends the first letters of a label; None: the label is not named."""
    at = question.lower().find(label)
    return None if at < 0 else len(question[:at].encode()) + min(LABEL_LETTERS, len(label.encode())) - 1


def spelled(label: list[Word]) -> str:
    """The text of a label, in small letters."""
    return " ".join(word.text for word in label).rstrip(":").lower()


def _covers(box: Box, word: Word) -> bool:
    x = (word.box[0] + word.box[2]) / 2
    return box[0] - 1 <= x <= box[2] + 1 and box[1] <= word.middle <= box[3]


def values(answer: str) -> list[tuple[int, str, int | None]]:
    """Where each printed value of an answer begins, the value, and where the name of its key begins."""
    if not answer.startswith("{"):
        return [(0, answer, None)]
    return [(found.start(2), found[2], found.start(1)) for found in VALUE.finditer(answer)]


def together(
    sequences: list[Sequence], pictures: list[list[np.ndarray]], targets: list[Dense], block: int = BLOCK
) -> Batch:
    batch = collate(sequences, pictures)
    batch["block"] = np.array(block, np.int64)
    for name, width in (("points", 4), ("links", 4), ("asks", 4), ("labels", 3 + LABEL_LETTERS)):
        rows = [(row, *one) for row, sequence in enumerate(sequences) for one in getattr(sequence, name)]
        batch[name] = np.array(rows, np.int64).reshape(-1, width)
    return batch | {name: np.concatenate([one[name] for one in targets]) for name in targets[0]}
