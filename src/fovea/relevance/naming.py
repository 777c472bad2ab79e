"""Finds the images that a question names: "the second image", "pictures 1 and 3", "the last two photos".

Only English is understood, as in all key words of this package. Ordinals of other things ("the second word in
the text") name no image, nor does a number beyond the last image. Negations are not understood: "ignore the
first image" names the first image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
