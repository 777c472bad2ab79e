"""Decides which of a request's images are encoded closely, and which as a glance, on one budget of tokens.

The idea is that of LiteVLM (arXiv 2506.07416), which picks camera views before the encoder, with a small
model that reads the question. Here the choice must be known before the prompt is laid out, so there is no
model. It depends on the words that name images, and then on the content of the images.

A *glance* is a view of an image with very few tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fovea.relevance.pipeline import Survey
from fovea.relevance.policy import score
from fovea.relevance.texture import Map

Turn = tuple[str, int]
"""The user's text of one turn, and the number of images in the conversation up to the end of that turn."""
_FLAGS = re.IGNORECASE | re.ASCII
"""ASCII keeps letters of other alphabets from matching: "fırst", with a dotless i, is not "first"."""
_LAST = -1
_ORDINALS = {
    word: place
    for place, word in enumerate(
        ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
        start=1,
    )
} | {"last": _LAST, "final": _LAST, "penultimate": _LAST - 1, "second to last": _LAST - 1}
_CARDINALS = {
    word: number
    for number, word in enumerate(
        ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), start=1
    )
}
_LETTERS = "ABCDEFGH"

_NOUN = r"(?:images?|imgs?|pictures?|pics?|photo(?:graph)?s?|views?|frames?|screenshots?|pages?|slides?)"
_ORDINAL_WORD = "|".join(word for word in _ORDINALS if " " not in word)
_ORDINAL = rf"(?:second[ -]to[ -]last|{_ORDINAL_WORD}|\d{{1,3}}(?:st|nd|rd|th))"
_NUMBER = rf"(?:\d{{1,3}}|{'|'.join(_CARDINALS)})"
_PLACE = rf"{_ORDINAL}(?:\s+{_NUMBER})?"
_LETTER = rf"(?-i:[{_LETTERS}])"
_AGAIN = rf"(?:{_NOUN}\s+)?"
_AND = r"\s*(?:,\s*and|,\s*or|,|&|\band|\bor|\bwith|\bto|\bfrom|\bthan|\bvs\.?|\bversus)\s*"
_ENDS = (
    r"(?=\s*(?:$|[.,;:!?)]|\w+\s+than\b|"
    r"(?:and|or|with|to|in|on|from|but|than|is|are|was|were|has|have|does|do|did|shows?)\b))"
)


def _listed(item: str, again: str = "") -> str:
    """A pattern of one to ten items with separators between them.

    Its quantifier is possessive (`{0,9}+`), so that it does not match only a part of a list: in "the first
    and the second word" it does not match "the first" alone.
    """
    return rf"{item}\b(?:{_AND}(?:the\s+)?{again}{item}\b){{0,9}}+"


_ORDERED = re.compile(rf"\b(?P<places>{_listed(_PLACE)})\s+(?:{_NOUN}|ones?)\b", _FLAGS)
_ALONE = re.compile(
    rf"\bthe\s+(?P<places>{_listed(_PLACE)}){_ENDS}|\b(?P<several>{_PLACE}{_AND}{_listed(_PLACE)}){_ENDS}",
    _FLAGS,
)
_NUMBERED = re.compile(
    rf"\b{_NOUN}\s*(?:\bno\b\.?|\bnumbers?\b|\bnr\b\.?|#)?\s*"
    rf"(?P<numbers>{_NUMBER}(?:(?:{_AND}|\s*[-–]\s*)(?:{_NOUN}\s+|\#\s*)?{_NUMBER}){{0,9}})\b",
    _FLAGS,
)
_RANGE = re.compile(rf"({_NUMBER})\s*(?:[-–]|\bto\b)\s*({_NUMBER})", _FLAGS)
_LETTERED = re.compile(rf"\b{_NOUN}\s+(?P<letters>{_listed(_LETTER, _AGAIN)})(?!['’])", _FLAGS)
_LABEL = re.compile(rf"{_NOUN} ?(?:#|no\.?)? ?(?:{_NUMBER}|{_LETTER}) ?:", _FLAGS)
_ALL = re.compile(r"\b(?:both|all|each|every|compar\w*|differ\w*|others?)\b", _FLAGS)


def named_images(words: str, count: int) -> frozenset[int]:
    """Indices of the images that the words name, from 0 to `count` - 1.

    If the words name no image but speak of all images ("compare", "both"), the result is all of them. A line
    that is only a label ("Image 2:") names none, because some prompts have such a line for every image.

    Only English is understood. Ordinals of other things ("the second word in the text") name no image, nor
    does a number beyond the last image. Negations are not understood: "ignore the first image" names it.
    """
    lines = (" ".join(line.split()) for line in words.splitlines())
    words = "\n".join(line for line in lines if line and not _LABEL.fullmatch(line))
    images = frozenset(place for place in _places(words, count) if 0 <= place < count)
    return images or (frozenset(range(count)) if _ALL.search(words) else frozenset())


def last_mentions(turns: Sequence[Turn], count: int) -> list[int]:
    """For each of `count` images, the index of the last turn that names it; -1: no turn does."""
    mentions = [-1] * count
    for turn, (words, images) in enumerate(turns):
        for place in named_images(words, images):
            mentions[place] = turn
    return mentions


def _places(words: str, count: int) -> Iterator[int]:
    for match in _ORDERED.finditer(words):
        yield from _ordinals(match["places"], count)
    for match in _ALONE.finditer(words):
        yield from _ordinals(match["places"] or match["several"], count)
    for match in _NUMBERED.finditer(words):
        yield from _numbers(match["numbers"], count)
    for match in _LETTERED.finditer(words):
        yield from (_LETTERS.index(letter) for letter in re.findall(rf"\b{_LETTER}\b", match["letters"]))


def _ordinals(text: str, count: int) -> Iterator[int]:
    """Indices of the images in a list of ordinals ("first and last"); "the last two" gives both."""
    for word, number in re.findall(rf"\b({_ORDINAL})(?:\s+({_NUMBER}))?\b", text, _FLAGS):
        plain, several = word.lower().replace("-", " "), _number(number) if number else 1
        place = _ORDINALS[plain] if plain in _ORDINALS else int(plain[:-2])
        if place > 0:
            yield from range(place - 1, min(count, place - 1 + several))
        else:
            yield from range(max(0, count + place - several + 1), count + place + 1)


def _numbers(text: str, count: int) -> Iterator[int]:
    """Indices of the images in a list of numbers ("1 and 3") or a range ("2 to 4", "2-4")."""
    for low, high in _RANGE.findall(text):
        yield from range(_number(low) - 1, min(count, _number(high)))
    yield from (_number(word) - 1 for word in re.findall(rf"\b{_NUMBER}\b", text, _FLAGS))


def _number(word: str) -> int:
    return _CARDINALS[word.lower()] if word.lower() in _CARDINALS else int(word)


GLANCES = 16, 4, 1
"""Sizes of a glance, in tokens at most. The largest is taken that leaves room for the images to encode
closely."""
GLANCE_SHARE = 0.25
"""Largest share of the budget for glances, if not even the best view fits beside glances of one token."""


@dataclass(frozen=True, slots=True)
class ViewScore:
    """How well an image fits the question.

    keywords: for each thing that the question's key words name, its amount in the image, divided by
        the amount that noise alone can give.
    content: how much the image contains at all, in [0, 1].
    """

    keywords: tuple[float, ...]
    content: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tokens that an image can have.

    full: all of its tokens.
    glances: its tokens as a glance of each size in `GLANCES`: not more than that size. The last is
        always 1.
    """

    full: int
    glances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ViewBudgets:
    """How a budget is divided among images.

    glance: index into `GLANCES` for all images that are not in `close`.
    close: the images to encode closely, by number, and the most tokens each may have.
    """

    glance: int
    close: Mapping[int, int]


def score_view(survey: Survey, question: str) -> ViewScore:
    """How well an image fits a question. A small thing in an empty image counts as much as a large one.

    The amounts are not scaled within one image: there, the most text-like part of an image without text would
    count as text.
    """
    keywords = tuple(_peak(values) / least for values, least in survey.keyword_amounts(question))
    return ViewScore(keywords, score(np.maximum(survey.propositional, survey.perspectival)))


def rank(mentions: Sequence[int], scores: Sequence[ViewScore], identities: Sequence[str]) -> list[int]:
    """Numbers of the images, best first.

    Images that a later turn names come first. Among those that the same turn names, or no turn, the order is:
    more of the things that the key words name, then more content, then the earlier image. Among images of the
    same turn, the second of two identical images comes after all different ones.

    mentions: the last turn that names each image; -1: none does. See `last_mentions`.
    scores: `score_view` of each image.
    identities: of each image; equal for identical images.
    """
    shares = _keyword_shares(scores)
    by_score = sorted(
        range(len(scores)), key=lambda view: (-mentions[view], -shares[view], -scores[view].content, view)
    )
    known: set[str] = set()
    duplicates = set()
    for view in by_score:
        if identities[view] in known:
            duplicates.add(view)
        known.add(identities[view])
    return sorted(by_score, key=lambda view: (-mentions[view], view in duplicates))


def _keyword_shares(scores: Sequence[ViewScore]) -> list[float]:
    """For each image, how much it contains of the things that the key words name, rounded to tenths.

    For each thing, the image's amount is divided by the highest amount in any image, so the image with the
    most of it gets 1. The results are added up. If noise alone could give the highest amount, the divisor is
    the amount of noise, so no image gets 1.
    """
    most = [max(1.0, *things) for things in zip(*(one.keywords for one in scores), strict=True)]
    return [
        round(sum(value / full for value, full in zip(one.keywords, most, strict=True)), 1) for one in scores
    ]


def _peak(values: Map) -> float:
    """Mean of the highest hundredth."""
    cells = np.sort(values.ravel())[::-1]
    return float(cells[: max(1, len(cells) // 100)].mean())


def allot(sizes: Sequence[Sizes], order: Sequence[int], close_count: int, total: int) -> ViewBudgets:
    """Divide `total` tokens among images.

    In their order, images get all of their tokens as long as the rest can still have glances. The first that
    does not fit gets the remainder.

    sizes: of each image.
    order: numbers of the images, best first.
    close_count: how many of the first images should fit, with smaller glances for the others if necessary. If
        they do not fit, the best image should.
    total: not more than all images have, and at least one for each.
    """
    glance = _glance(sizes, order, close_count, total)
    left = total - sum(size.glances[glance] for size in sizes)
    close = {}
    for view in order:
        least = sizes[view].glances[glance]
        close[view] = min(sizes[view].full, least + left)
        left -= sizes[view].full - least
        if left <= 0:
            break
    return ViewBudgets(glance, close)


def _glance(sizes: Sequence[Sizes], order: Sequence[int], close_count: int, total: int) -> int:
    """Index into `GLANCES` of the largest glance that leaves enough room."""
    choices = range(len(GLANCES))
    for count in (close_count, 1):
        close, others = order[:count], order[count:]
        full = sum(sizes[view].full for view in close)
        for glance in choices:
            if full + sum(sizes[view].glances[glance] for view in others) <= total:
                return glance
    for glance in choices:
        best, *rest = (sizes[view].glances[glance] for view in order)
        if sum(rest) <= GLANCE_SHARE * total and best + sum(rest) <= total:
            return glance
    return choices[-1]
