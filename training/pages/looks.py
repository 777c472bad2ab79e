"""Where heads of fovea-page should look to answer a question about a page, and what tokens should know."""

from __future__ import annotations

import re

from fovea.evaluation.documents import fields
from fovea.evaluation.documents.page import Box, Word
from fovea.evaluation.scenes.sample import Turn
from packing import Packer, PromptMedia, Sequence
from pages.glyphs import PATCH, REACH, same_run
from pages.start import (
    ABOVE,
    ALSO_NAMED,
    ALSO_NAMED_END,
    BESIDE,
    NAMED,
    NAMED_END,
    QUOTED,
    REGISTERS,
)
from pages.state import ALONG, ALSO_NAMED_AT, BEGUN, LABEL_AT, LABEL_LETTERS, NAMED_AT, QUOTED_AT

VALUE = re.compile(r'"([^"]+)":"((?:[^"\\]|\\.)+)"')
"""A key of a JSON answer and its value, a string."""
REGISTER = {at: number for number, (_, at) in enumerate(REGISTERS)}
COPIERS, EMPTY = 4 * (REACH - 1), 0
"""The number of heads that copy, in two layers, and the empty token."""
LATER = (0, 1, 3)
"""The bytes of a value that are to be written with a look at its label, where the question names it."""
ENDS = {NAMED: NAMED_END, ALSO_NAMED: ALSO_NAMED_END}
"""The heads that look at the end of a name, by those that look at its first letters."""
QUOTE = re.compile(r'"([^"]*)"')
"""What a question quotes from the page."""


class Looks:
    """Notes of one question in a sequence: where the values of its answer stand, and their labels, and
    where the question names these."""

    def __init__(
        self, sequence: Sequence, packer: Packer, turn: Turn, indices: list[int], media: PromptMedia
    ) -> None:
        """indices: of the tokens of the answer, a byte each."""
        self.sequence, self.packer, self.turn, self.indices = sequence, packer, turn, indices
        self.asked = indices[0] - len(packer.text(turn.question)) - len(packer.assistant)
        self.columns = media.grid[1]
        self.numbers = {place: number for number, place in enumerate(media.places)} if media.places else None

    def note(self, words: tuple[Word, ...]) -> None:
        """Note all of it. words: all that are shown."""
        turn, sequence = self.turn, self.sequence
        self.quote(words)
        shown = [word for word in words if any(_covers(box, word) for box in turn.focus)]
        for start, value, key in values(turn.answer):
            first = next((word for word in shown if value.startswith(word.text) and word.text), None)
            there = first and self.token(first)
            if not first or not there:
                continue
            state = self.indices[len(turn.answer[:start].encode())] - 1
            sequence.points.append((state, *there))
            self.place(BEGUN, state, first)
            self.copy(state, value, words[words.index(first) :])
            runs = labels(turn, first, words)
            self.link(first, there, runs, key is None)
            if key is None:
                names, text, origin = in_question(turn.question, first, runs), turn.question, self.asked
            else:
                names, text, origin = {NAMED: key}, turn.answer, self.indices[0]
            if len(names) == 1:
                names = dict.fromkeys(ENDS, *names.values())
            self.name(state, value, names, text, origin)
            for head, (begin, end) in names.items():
                for run in runs:
                    if spelled(run) == text[begin:end].lower():
                        self.place(NAMED_AT if head == NAMED else ALSO_NAMED_AT, state, run[0])

    def quote(self, words: tuple[Word, ...]) -> None:
        """Note where the question ends what it quotes, and where that stands on the page."""
        if quote := QUOTE.search(self.turn.question):
            state = self.indices[0] - 1
            end = self.asked + len(self.turn.question[: quote.end(1)].encode())
            self.ask(state, self.turn.answer, end, QUOTED)
            if found := quoted(quote[1], words):
                self.place(QUOTED_AT, state, found[0 if self.turn.answer.startswith(quote[1]) else -1])

    def token(self, word: Word) -> tuple[int, int] | None:
        """The visual token in which a word begins, and the patch; None: that token is not given."""
        return self.token_at(word.starts[0], word.middle)

    def token_at(self, x: float, y: float) -> tuple[int, int] | None:
        """`token` of a point."""
        column, row = int(x // PATCH), int(y // PATCH)
        place = row // 2, column // 2
        number = place[0] * self.columns + place[1] if self.numbers is None else self.numbers.get(place)
        return None if number is None else (self.sequence.slots[number], row % 2 * 2 + column % 2)

    def copy(self, state: int, value: str, words: tuple[Word, ...]) -> None:
        """Note where the letters of a value are read.

        Each is read from patches in which up to three letters before it begin. Heads that would find nothing
        should look at the empty token; some of them are told, in turn.

        state: before the value. words: its words, and others after them.
        """
        letters = spread_out(words, len(value))
        firsts: dict[int, tuple[int, int]] = {}
        for number, (text, at) in enumerate(letters):
            if text == "\n" and value[number].isspace():
                firsts.clear()
                continue
            if text != value[number] or not text.isascii():
                break
            read: dict[tuple[int, int], int] = {}
            for begun, (token, patch) in firsts.items():
                if begun > number - REACH:
                    read[patch // 2, patch % 2 * (REACH - 1) + number - 1 - begun] = token
            heads = {divmod(one, COPIERS // 2): EMPTY for one in range(number % 4, COPIERS, 4)}
            self.sequence.copies += [
                (layer, state + number, at, head)
                for (layer, head), at in ((heads if number else {}) | read).items()
            ]
            there = self.token_at(*at)
            if there and number:
                self.sequence.places.append((state + number + 1, REGISTER[ALONG], there[0]))
            if there and text != " " and there not in firsts.values():
                firsts[number] = there

    def link(self, first: Word, there: tuple[int, int], runs: list[list[Word]], alone: bool) -> None:
        """Note the labels of a value, and what they mean.

        first, there: the value's first word, and where it stands. runs: the words of each label.
        alone: whether the value is the whole answer.
        """
        half = there[1] // 2
        for run in runs:
            label = self.token(run[0])
            if label and label[0] < there[0] and (alone or not run[0].at):
                head = BESIDE[half] if beside(run[0], first) else ABOVE
                self.sequence.links.append((there[0], label[0], head))
                at = LABEL_AT[half if head == BESIDE[half] else 2]
                self.sequence.places.append((there[0], REGISTER[at], label[0]))
                self.know(there[0], 1 + half, spelled(run))
        if runs:  # nobody could tell it from the value alone
            self.know(there[0], 1 + half, meaning(first))

    def name(self, state: int, value: str, names: dict[int, tuple[int, int]], text: str, origin: int) -> None:
        """Note where a value is named.

        state: before the value. names: where its names begin and end in `text`, by the head that looks there.
        origin: the token of the text's first byte.
        """
        for head, (begin, end) in names.items():
            first, after = (origin + len(text[:place].encode()) for place in (begin, end))
            self.ask(state, value, first + min(LABEL_LETTERS, after - first) - 1, head)
            self.ask(state, value, after, ENDS[head])
            self.know(state, 0, text[begin:end].lower())

    def ask(self, state: int, value: str, at: int, head: int) -> None:
        """Note that a head should look at the byte `at`, in some of the states from `state` on."""
        looking = [state + byte for byte in LATER if byte < len(value.encode())]
        self.sequence.asks += [(one, at, head) for one in looking]

    def place(self, at: int, state: int, word: Word) -> None:
        """Note that a state should know where a word stands. at: the first dimension of the place."""
        if there := self.token(word):
            self.sequence.places.append((state, REGISTER[at], there[0]))

    def know(self, token: int, place: int, label: str) -> None:
        """Note that a token should know the first letters of a label, if they are ASCII.

        place: a number of `state.KNOWN`.
        """
        letters = label[:LABEL_LETTERS]
        row = (token, place, *(self.packer.text(letters) if letters.isascii() else ()))
        if len(row) == 2 + LABEL_LETTERS and row not in self.sequence.labels:
            self.sequence.labels.append(row)


def in_question(question: str, first: Word, runs: list[list[Word]]) -> dict[int, tuple[int, int]]:
    """Where a question names a value's labels or its meaning, by the head that looks there."""
    named: dict[int, tuple[int, int]] = {}
    for run in runs:
        if at := named_at(question, spelled(run)):
            named.setdefault(NAMED if beside(run[0], first) else ALSO_NAMED, at)
    if not named and meaning(first) and (at := named_at(question, meaning(first))):
        named[NAMED] = at
    return named


def quoted(text: str, words: tuple[Word, ...]) -> list[Word]:
    """The words on the page that a question quotes; none if they are not there."""
    texts = text.split()
    for number in range(len(words) - len(texts) + 1 if texts else 0):
        found = list(words[number : number + len(texts)])
        if [word.text.rstrip(":") for word in found] == [one.rstrip(":") for one in texts]:
            return found
    return []


def spread_out(words: tuple[Word, ...], count: int) -> list[tuple[str, tuple[float, float]]]:
    """The first `count` letters of words, and where they begin. Between words are spaces, between runs
    of words line breaks."""
    letters: list[tuple[str, tuple[float, float]]] = []
    for before, word in zip((None, *words), words, strict=False):
        if before:
            letters.append((" " if same_run(before, word) else "\n", (before.box[2], before.middle)))
        letters += [(text, (x, word.middle)) for text, x in zip(word.text, word.starts, strict=True)]
        if len(letters) >= count:
            break
    return letters[:count]


def beside(label: Word, value: Word) -> bool:
    """Whether a label is in the line of its value."""
    return abs(label.middle - value.middle) < (value.box[3] - value.box[1]) / 2


def meaning(value: Word) -> str:
    """The name of a field, in small letters, of which this is the value; "" if it is none."""
    return fields.name_of(value.at.removeprefix("field:")).lower() if value.at.startswith("field:") else ""


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


def named_at(question: str, label: str) -> tuple[int, int] | None:
    """Where a question names a label, and where the name ends; None: the label is not named."""
    at = question.lower().find(label)
    return None if at < 0 else (at, at + len(label))


def spelled(label: list[Word]) -> str:
    """The text of a label, in small letters."""
    return " ".join(word.text for word in label).rstrip(":").lower()


def _covers(box: Box, word: Word) -> bool:
    x = (word.box[0] + word.box[2]) / 2
    return box[0] - 1 <= x <= box[2] + 1 and box[1] <= word.middle <= box[3]


def values(answer: str) -> list[tuple[int, str, tuple[int, int] | None]]:
    """Where each printed value of an answer begins, the value, and where its key's name begins and ends."""
    if not answer.startswith("{"):
        return [(0, answer, None)]
    return [(found.start(2), found[2], found.span(1)) for found in VALUE.finditer(answer)]
