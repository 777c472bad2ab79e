"""Tokens to text as they come, never half a character, never a stop string.

A byte-level token may hold part of a character. `decode` shows that as replacement characters at the end, so those are
held back until what follows settles them, and everything before them is shown. Decoding starts a few tokens back,
because some tokenizers write a token differently at the start of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
PATIENCE = 64


class TextStream:
    """The text of one answer. `stopped` once a stop string was found; what follows it is never shown.

    Stop strings are looked for from token `min_tokens` on; text before it is no part of any match.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._count = 0
        # The window: tokens whose text is still needed. The first `_shown` of them, `_given` characters, were shown.
        self._ids: list[int] = []
        self._shown = 0
        self._given = 0
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """One more token; returns the text that can be shown now."""
        self._count += 1
        self._ids.append(token_id)
        now = self._decode(self._ids)
        settled = now.rstrip(REPLACEMENT)
        if len(settled) < len(now):
            text = settled[self._given :]
            self._given += len(text)
            if len(self._ids) - self._shown > PATIENCE:
                text += self._give_up(now)
            return self._release(text)
        text = now[self._given :]
        if text:
            self._slide(len(self._ids))
        elif now:
            self._ids.pop()  # a token without text, such as a special one that is skipped
        return self._release(text)

    def finish(self) -> str:
        """The answer is over: what was held back for a character or a stop string that never came."""
        text = self._release(self._decode(self._ids)[self._given :])
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _slide(self, shown: int) -> None:
        """The first `shown` tokens are shown; those that were before this one are not needed any more."""
        del self._ids[: self._shown]
        self._shown = shown - self._shown
        self._given = len(self._decode(self._ids[: self._shown]))

    def _give_up(self, now: str) -> str:
        """Bytes that are no text, for long: show them as such, but for the last few, which may be a character yet."""
        for cut in range(len(self._ids) - 1, len(self._ids) - 1 - LONGEST_CHARACTER, -1):
            head = self._decode(self._ids[:cut])
            if head + self._decode(self._ids[cut:]) == now:
                text = head[self._given :]
                del self._ids[:cut]
                self._shown = self._given = 0
                return text
        return ""

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        if self._count < self._min_tokens:
            return text
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
