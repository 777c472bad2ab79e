"""Tokens to text as they come, never half a character, never a stop string.

A byte-level token may hold part of a character. `decode` shows that as a replacement character at the end, so text is
held back while the decoded tail ends in one. Decoding starts a few tokens back, because some tokenizers write a token
differently at the start of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 6


class TextStream:
    """The text of one answer. `stopped` once a stop string was found; what follows it is never shown."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """One more token; returns the text that can be shown now."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        incomplete = now.endswith(REPLACEMENT) and len(self._ids) - self._shown < LONGEST_CHARACTER
        if incomplete or len(now) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """The answer is over: what was held back for a character or a stop string that never came."""
        before = self._decode(self._ids[self._context : self._shown])
        rest = self._decode(self._ids[self._context :])[len(before) :]
        text = self._release(rest)
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
