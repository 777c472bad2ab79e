"""How much a step may do beside its decodes, so that those who read keep their rhythm.

A step is paid in seconds. What the decodes alone take is measured; a step that also computes part of a prompt or encodes
part of an image may last `pace` times as long, or until a given target. Prompts get what is left of that, or half of it
while an image is being encoded, turned into tokens by the measured seconds per token. The encoder gets what prompts
leave; it is the one that can stop at any slice. Where many wait for their first token and few read, the bound
grows with those who wait beyond the first: holding up one for seven is the smaller harm, and together they decode at
the price of one.
Nothing here knows the machine: all figures are learnt, and forgotten slowly.

Without decodes nobody waits for a token, yet a step still ends after a while, so that new arrivals are heard.
"""

from __future__ import annotations

import math

LISTEN_S = 0.2
"""A step without decodes may last about as long, and twice that for prompts: cut in chunks they take longer in all."""
FEWEST_TOKENS = 16
"""A chunk never is smaller: below that a step's fixed cost is all there is."""
FIRST_TOKENS = 128
"""The first chunk of all, from which is learnt what a token takes."""
FEW_READERS = 4
"""So many decode at about the price of one."""
CROWDING = 0.5
"""The bound grows slower than those who wait: two of them do not make a reader wait twice as long."""
KEEP = 0.8
"""What is kept of an average when a new figure comes in."""


class Pace:
    def __init__(self, pace: float, target_s: float, max_tokens: int) -> None:
        """pace: longest step in multiples of its decodes alone, 0 for no bound; target_s: absolute, 0 for none."""
        self.pace = pace
        self.target_s = target_s
        self.max_tokens = max_tokens
        self._decode_s: dict[int, float] = {}
        self._guess: float | None = None
        self._token_s: float | None = None

    def spare_s(self, decodes: int, others: int = 0) -> float:
        """Seconds that a step may take beside that many decodes whose rhythm counts; others: who waits for a first token."""
        if not decodes:
            return LISTEN_S
        alone = self.decode_s(decodes)
        if not self.pace and not self.target_s:
            return math.inf
        if alone is None:
            return self.target_s or LISTEN_S
        return self._bound(alone, (others - 1) / max(1.0, decodes / FEW_READERS)) - alone

    def prompt_tokens(self, decodes: int, others: int, *, encoding: bool) -> int:
        """Tokens of prompts for the next step; encoding: an image is waiting for its share."""
        spare = self.spare_s(decodes, others)
        if spare == math.inf:
            return self.max_tokens
        if self._token_s is None:
            return min(self.max_tokens, FIRST_TOKENS)
        if not decodes:
            spare = 2 * LISTEN_S
        seconds = spare / 2 if encoding and decodes else spare
        return max(FEWEST_TOKENS, min(self.max_tokens, int(seconds / self._token_s)))

    def encode_s(self, decodes: int, others: int, tokens: int) -> float:
        """Seconds for the encoder in a step that also computes so many tokens of prompts."""
        return max(0.0, self.spare_s(decodes, others) - self.prompt_s(tokens))

    def prompt_s(self, tokens: int) -> float:
        """About what so many tokens of prompts take."""
        return tokens * (self._token_s or 0.0)

    def decode_s(self, decodes: int) -> float | None:
        """Seconds of a step that only decodes, from the nearest batch that was measured; None: none was."""
        size = _size(decodes)
        known = min(self._decode_s, key=lambda s: (abs(s - size), s), default=None)
        return self._guess if known is None else self._decode_s[known]

    def observe(self, decodes: int, tokens: int, seconds: float, encode_s: float) -> None:
        """A step that took `seconds`, `encode_s` of them in the encoder, with `tokens` of prompts."""
        if decodes and not tokens and not encode_s:
            size = _size(decodes)
            self._decode_s[size] = _blend(self._decode_s.get(size), seconds)
        elif decodes:
            self._guess_from(tokens, seconds - encode_s)
        if tokens >= FEWEST_TOKENS:
            alone = self.decode_s(decodes) or 0.0 if decodes else 0.0
            rest = max(seconds - encode_s - alone, 0.1 * seconds)
            self._token_s = _blend(self._token_s, max(rest / tokens, 1e-9))

    def _guess_from(self, tokens: int, seconds: float) -> None:
        """Under load there may be no step that only decodes; what a mixed one leaves is at least what decodes take."""
        rest = seconds - self.prompt_s(tokens)
        if (not tokens or self._token_s is not None) and rest > seconds / 4:
            self._guess = rest if self._guess is None else min(self._guess, rest)

    def _bound(self, alone: float, crowd: float) -> float:
        bounds = [self.pace * math.pow(max(1.0, crowd), CROWDING) * alone] if self.pace else []
        if self.target_s:
            bounds.append(self.target_s)
        return max(alone, min(bounds))


def _size(decodes: int) -> int:
    """Batches of about one size share a figure: 1, 2, 3-4, 5-8, ..."""
    return (decodes - 1).bit_length()


def _blend(old: float | None, new: float) -> float:
    return new if old is None else KEEP * old + (1 - KEEP) * new
