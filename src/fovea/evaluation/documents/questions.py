"""Questions about a page, with exact answers from the facts that it shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from random import Random

from fovea.evaluation.documents import vocabulary
from fovea.evaluation.documents.evidence import turn
from fovea.evaluation.documents.fields import absent, field
from fovea.evaluation.documents.page import Page, Word, bounds, lines_of
from fovea.evaluation.documents.structured import structured
from fovea.evaluation.scenes.sample import Turn

LONGEST = 64
"""Characters of the longest line that is asked for."""


def cell(rng: Random, page: Page) -> Turn | None:
    """One cell of a table, by the name of its row and its column."""
    found = _cells(page)
    if not found:
        return None
    t, r, c = rng.choice(found)
    table = page.content.tables[t]
    form = rng.choice(
        (
            'In the row "{}", what is the {}?',
            'What is the {1} of "{0}"?',
            'Row "{}", column "{}"?',
            'Which {1} has the {2} "{0}"?',
        )
    )
    question = form.format(table.rows[r][0], table.columns[c], table.noun)
    at = f"cell:{t}:{r}:{c}", f"cell:{t}:{r}:0"
    return turn(question, table.rows[r][c], page, *at, labels=(table.columns[c],))


def row(rng: Random, page: Page) -> Turn | None:
    """The name of the row that has a value which no other row of its column has."""
    choices = []
    for t, r, c in _cells(page):
        table = page.content.tables[t]
        if Counter(cells[c] for cells in table.rows)[table.rows[r][c]] == 1:
            choices.append((t, r, c))
    if not choices:
        return None
    t, r, c = rng.choice(choices)
    table = page.content.tables[t]
    form = rng.choice(('Which {} has the {} "{}"?', 'For which {} is the {} "{}"?'))
    question = form.format(table.noun, table.columns[c], table.rows[r][c])
    at = f"cell:{t}:{r}:0", f"cell:{t}:{r}:{c}"
    return turn(question, table.rows[r][0], page, *at, labels=(table.columns[c],))


def line(rng: Random, page: Page) -> Turn | None:
    """A line of running text, or what follows some words in it."""
    found = _lines(page)
    if not found:
        return None
    words = rng.choice(found)
    texts = [word.text for word in words]
    whole = " ".join(texts)
    box = bounds([word.box for word in words])
    if rng.random() < 0.5 and len(texts) > 3:
        start = rng.randrange(0, len(texts) - 2)
        count = rng.randint(1, min(3, len(texts) - start - 2))
        before = " ".join(texts[start : start + 2])
        if _all_text(page).count(before) != 1:
            return None
        after = " ".join(texts[start + 2 : start + 2 + count])
        noun = "word comes" if count == 1 else f"{count} words come"
        return Turn(f'Which {noun} after "{before}"?', after, (after,), (box,))
    begin = " ".join(texts[: min(2, len(texts))])
    if len(whole) > LONGEST or len(texts) < 2 or _all_text(page).count(begin) != 1:
        return None
    form = rng.choice(('Read the line that begins with "{}".', 'Copy the line that starts with "{}".'))
    return Turn(form.format(begin), whole, (whole,), (box,))


def title(rng: Random, page: Page) -> Turn | None:
    """The heading of the page."""
    form = rng.choice(("What is the title of the page?", "What is the heading?", "Read the title.", "Title?"))
    return turn(form, page.content.title, page, "title") if "title" in page.places else None


def presence(rng: Random, page: Page) -> Turn | None:
    """Whether a word is on the page."""
    words = [
        strip(word.text) for word in page.words if len(strip(word.text)) > 3 and strip(word.text).isalpha()
    ]
    if not words:
        return None
    lower = {word.lower() for word in words}
    if rng.random() < 0.5:
        asked, answer = rng.choice(words), "Yes"
    else:
        draw = rng.random()
        asked = (
            vocabulary.name(rng)
            if draw < 0.4
            else rng.choice(vocabulary.PRODUCTS if draw < 0.7 else vocabulary.WORDS)
        )
        if any(asked.lower() in word or word in asked.lower() for word in lower):
            return None
        answer = "No"
    focus = tuple(word.box for word in page.words if strip(word.text) == asked) if answer == "Yes" else ()
    form = rng.choice(('Is the word "{}" on the page?', 'Does the page contain "{}"?', 'Is "{}" there?'))
    return Turn(form.format(asked), answer, (answer,), focus)


def bar(rng: Random, page: Page) -> Turn | None:
    """The value of a bar, or the bar of a value."""
    choices = [
        (s, n)
        for s, series in enumerate(page.content.series)
        for n in range(len(series.values))
        if f"bar:{s}:{n}" in page.places
    ]
    if not choices:
        return None
    s, n = rng.choice(choices)
    values = page.content.series[s].values
    name, value = values[n]
    if rng.random() < 0.3 and Counter(text for _, text in values)[value] == 1:
        return turn(f'Which one has the value "{value}"?', name, page, f"bar:{s}:{n}")
    form = rng.choice(('What is the value of "{}"?', 'How high is "{}"?', "What is the value for {}?"))
    return turn(form.format(name), value, page, f"bar:{s}:{n}")


KINDS: dict[str, Callable[[Random, Page], Turn | None]] = {
    "field": field,
    "cell": cell,
    "row": row,
    "line": line,
    "title": title,
    "presence": presence,
    "bar": bar,
    "json": structured,
    "absent": absent,
}
"""The function that asks each kind of question; None where the page has nothing of that kind."""


def strip(text: str) -> str:
    """A word without the punctuation around it."""
    return re.sub(r"^\W+|\W+$", "", text)


def _cells(page: Page) -> list[tuple[int, int, int]]:
    return [
        (t, r, c)
        for t, table in enumerate(page.content.tables)
        for r in range(len(table.rows))
        for c in range(1, len(table.columns))
        if f"cell:{t}:{r}:{c}" in page.places and f"cell:{t}:{r}:0" in page.places
    ]


def _lines(page: Page) -> list[tuple[Word, ...]]:
    ats = dict.fromkeys(
        word.at for word in page.words if word.at.startswith("paragraph:") and word.at in page.places
    )
    return [words for at in ats for words in lines_of(page.words, at)]


def _all_text(page: Page) -> str:
    return " ".join(word.text for word in page.words)
