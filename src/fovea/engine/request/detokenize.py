"""Turns tokens into text one by one, and holds back half characters and parts of stop strings.

A byte-level token may contain part of a character. `decode` writes that part as replacement characters at the
end. They are held back until the following tokens complete the character, but not beyond MOST_INCOMPLETE
tokens or the end of the answer. Everything before them is emitted.

Decoding starts a few tokens back, because some tokenizers write a token differently at the start of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8, so also the most tokens that one character takes."""
MOST_INCOMPLETE = 64
"""Most tokens held back as an incomplete character. After that, replacement characters are emitted.

It is also the most tokens without text that are kept at the beginning of an answer.
"""


class TextStream:
    """The text of one answer.

    decode: turns ids into text.
    stop: stop strings. The text from the first one on is never emitted.
    keep_stop: the first stop string itself is emitted.
    min_tokens: stop strings are searched only from this token on (1 = first); text before it is part of no
        match.
    before: tokens of another text, which the answer follows. Some tokenizers drop a space at the start of a
        text, so an answer that has to begin with one needs tokens before it.
    stopped: whether a stop string occurred.
    length: characters of the tokens so far, without an incomplete character at their end. It counts text that
        is held back for a stop string, and that of the stop string itself.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        keep_stop: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._stops = StopSearch(stop, keep=keep_stop)
        self._min_tokens = min_tokens
        self._count = 0
        # The window: tokens whose text is still needed. The text of its first `_emitted_ids` tokens was
        # emitted; the first `_emitted_chars` characters of the window's text were emitted.
        self._ids = list(before)
        self._emitted_ids = len(before)
        self._emitted_chars = len(decode(before)) if before else 0
        self.stopped = False
        self.length = 0

    @property
    def found_stop(self) -> str | None:
        """The stop string that ended the text; None: none has."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """Add one token. Returns the text that can be emitted now."""
        self._count += 1
        self._ids.append(token_id)
        window = self._decode(self._ids)
        complete = window.rstrip(REPLACEMENT)
        if len(complete) < len(window):
            text = complete[self._emitted_chars :]
            self._emitted_chars += len(text)
            if len(self._ids) - self._emitted_ids > MOST_INCOMPLETE:
                text += self._emit_invalid(window)
            return self._release(text)
        text = window[self._emitted_chars :]
        if text:
            self._slide(len(self._ids))
        elif window or len(self._ids) > MOST_INCOMPLETE:
            self._ids.pop()  # a token without text, such as a special token that is skipped
        return self._release(text)

    def finish(self) -> str:
        """End the answer. Returns the text that was held back for an incomplete character or stop string."""
        text = self._release(self._decode(self._ids)[self._emitted_chars :])
        return text if self.stopped else text + self._stops.finish()

    def _slide(self, emitted: int) -> None:
        """Drop the tokens emitted earlier; the others of the first `emitted` ones stay as context."""
        del self._ids[: self._emitted_ids]
        self._emitted_ids = emitted - self._emitted_ids
        self._emitted_chars = len(self._decode(self._ids[: self._emitted_ids]))

    def _emit_invalid(self, window: str) -> str:
        """Emit bytes that have long formed no character, except the last few, which may still become one."""
        for cut in range(len(self._ids) - 1, len(self._ids) - 1 - LONGEST_CHARACTER, -1):
            head = self._decode(self._ids[:cut])
            if head + self._decode(self._ids[cut:]) == window:
                text = head[self._emitted_chars :]
                del self._ids[:cut]
                self._emitted_ids = self._emitted_chars = 0
                return text
        return ""

    def _release(self, text: str) -> str:
        self.length += len(text)
        if self.stopped:
            return ""
        if self._count < self._min_tokens:
            return text
        text, self.stopped = self._stops.push(text)
        return text


class StopSearch:
    """The stop strings of one answer, and the end of its text that may be the beginning of one.

    keep: the emitted text includes the stop string.
    found: the stop string that has occurred; None: none has.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._keep = keep
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Returns the text that can be emitted now, and whether a stop string has occurred.

        Then the emitted text ends where the first stop string begins, or after it if it is kept.
        """
        whole = self._held + text
        found = [
            (len(self._held) + end - len(matcher.stop), len(self._held) + end, matcher.stop)
            for matcher in self._matchers
            if (end := matcher.find(text)) is not None
        ]
        if found:
            self._held = ""
            first = min(found)
            self.found = first[2]
            return whole[: first[1] if self._keep else first[0]], True
        emitted = len(whole) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = whole[emitted:]
        return whole[:emitted], False

    def finish(self) -> str:
        """Return the text that was held back, because no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """The search for one string by the method of Knuth, Morris and Pratt (1977).

    matched: number of characters at the end of the text with which the string begins, the largest one.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # For each beginning of the string, the length of its longest proper beginning that is also its end.
        # The list is as long as the longest match so far: a string costs nothing until text begins like it.
        self._borders = [0]

    def find(self, text: str) -> int | None:
        """Read more text. Returns the index in it after the first whole match; None: there is none yet."""
        stop, borders, matched = self.stop, self._borders, self.matched
        if not matched and stop[0] not in text:
            return None
        for index, char in enumerate(text):
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] != char:
                continue
            matched += 1
            if matched == len(stop):
                return index + 1
            if matched > len(borders):
                borders.append(self._next_border())
        self.matched = matched
        return None

    def _next_border(self) -> int:
        stop, borders = self.stop, self._borders
        char, length = stop[len(borders)], borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        return length + (stop[length] == char)
