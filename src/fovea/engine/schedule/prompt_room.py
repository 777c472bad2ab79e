"""The room that a step has for prompts: a number of tokens and a number of seconds."""

from __future__ import annotations

import math
from typing import NamedTuple

from fovea.engine.schedule.step_times import StepTimes

FEWEST_TOKENS = 16
"""The smallest chunk: below it, the fixed cost of a step dominates."""


class PromptTime(NamedTuple):
    """Seconds for the prompts of a step.

    seconds: sum of the seconds of all chunks.
    times: tells the seconds of a chunk.
    forced: the first chunk has FEWEST_TOKENS even if they take longer, so that prompts advance.
    """

    seconds: float
    times: StepTimes
    forced: bool = True


class PromptRoom:
    """The rest of the room while the step is planned.

    tokens: tokens of prompts that can still be computed.
    """

    def __init__(self, tokens: int, time: PromptTime | None = None) -> None:
        """tokens: most tokens of prompts. time: bounds their seconds; None: tokens are the only bound."""
        self.tokens = tokens
        self._time = time
        self._seconds = math.inf if time is None else time.seconds
        self._fewest = FEWEST_TOKENS if time is not None and time.forced else 0
        self._reserved, self._before = (0, 0.0), 0.0

    def reserve_half(self) -> bool:
        """Set half of the room aside. Returns False, and sets nothing aside, if half holds no chunk."""
        seconds = 0.0 if self._seconds == math.inf else self._seconds / 2
        fitting = self._time.times.prompt_tokens(0, seconds) if self._time and seconds else math.inf
        if min(fitting, self.tokens // 2) < FEWEST_TOKENS:
            return False
        self._reserved = self.tokens // 2, seconds
        self.tokens -= self._reserved[0]
        self._seconds -= seconds
        self._before = self._seconds
        return True

    def return_half(self, *, short: bool) -> None:
        """Give back what was set aside.

        short: the step shall end soon, because a client waits for its first token. So only as much time is
            left as was taken since `reserve_half`, and that of the smallest chunk.
        """
        taken = self._before - self._seconds
        self.tokens += self._reserved[0]
        self._seconds += self._reserved[1]
        if short and self._time is not None and self._time.forced and self._seconds < math.inf:
            self._seconds = min(self._seconds, taken)
            self._fewest = FEWEST_TOKENS

    def most(self, start: int, wanted: int) -> int:
        """Return the most tokens that a sequence may compute; fewer than FEWEST_TOKENS only at its end.

        start: number of its computed tokens. wanted: number of its missing ones, at least 1.
        """
        if self._time is None or self._seconds == math.inf:
            return max(0, self.tokens)  # a whole image may have taken more than there was
        fitting = max(self._time.times.prompt_tokens(start, self._seconds), self._fewest)
        return int(max(0, min(self.tokens, fitting))) if fitting >= min(wanted, FEWEST_TOKENS) else 0

    def take(self, start: int, count: int) -> None:
        """Take the room of a chunk. start: computed tokens of its sequence. count: tokens of the chunk."""
        self.tokens -= count
        self._fewest = max(0, self._fewest - count)
        if self._time is not None:
            self._seconds -= self._time.times.prompt_s(start, count)
