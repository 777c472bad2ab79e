"""Searches a growing text for stop strings, at a cost per character that does not depend on their lengths.

The engine's thread does this for every token of a request with stop strings. Comparing the end of the text
with every beginning of a long stop string would take milliseconds per token, for all clients.
"""

from __future__ import annotations

from collections.abc import Sequence


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
