"""The parts of a page that an answer rests on: facts, and the labels and heads that tell what they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fovea.evaluation.documents.page import Box, Page, Word, bounds
from fovea.evaluation.scenes.sample import Turn


def turn(question: str, answer: str, page: Page, *ats: str, labels: Sequence[str] = ()) -> Turn:
    """A question for something that is printed. ats, labels: see `evidence`."""
    accepted = [answer]
    plain = re.sub(r"^(USD|EUR|CHF|[$€£])\s?|\s?(USD|EUR|CHF|[$€£])$", "", answer)
    if plain != answer:
        accepted.append(plain)
    return Turn(question, answer, tuple(accepted), evidence(page, ats, labels))


def evidence(page: Page, ats: Sequence[str], labels: Sequence[str] = ()) -> tuple[Box, ...]:
    """The boxes of facts, and of the labels printed nearest to the first of them."""
    boxes = [page.places[at] for at in ats if at in page.places]
    return (*boxes, *(box for label in labels for box in nearest(page, label, boxes[0])))


def nearest(page: Page, text: str, to: Box) -> tuple[Box, ...]:
    """The box of a text's printed occurrence that is nearest to a box; () if it is not on the page.

    Words that belong to a fact, such as a value, do not count. Case and a colon after the text are ignored.
    """
    wanted = [part.lower() for part in text.split()]
    found = []
    plain = [word for word in page.words if not word.at]
    for start in range(len(plain) - len(wanted) + 1):
        run = plain[start : start + len(wanted)]
        if [_plain(word) for word in run] == wanted:
            found.append(bounds([word.box for word in run]))
    return (min(found, key=lambda box: _distance(box, to)),) if found else ()


def _plain(word: Word) -> str:
    return word.text.rstrip(":").lower()


def _distance(one: Box, other: Box) -> float:
    """The gap between two boxes, across plus down."""
    across = max(one[0] - other[2], other[0] - one[2], 0)
    down = max(one[1] - other[3], other[1] - one[3], 0)
    return across + down
