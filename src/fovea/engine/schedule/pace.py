"""How much a step may do beside its decodes, so that those who read keep their rhythm.

A step is paid in seconds. What the decodes alone take is measured; a step that also computes part of a prompt or encodes
part of an image may last `pace` times as long, or until a given target. The rest of that time is shared between the
encoder, which stops at the first slice that ends after its share, and prompts, whose share is turned into tokens by the
measured seconds per token. Nothing here knows the machine: all figures are learnt, and forgotten slowly.

Without decodes nobody waits for a token, yet a step still ends after a while, so that new arrivals are heard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LISTEN_S = 0.2
"""A step without decodes may last about as long."""
FEWEST_TOKENS = 16
"""A chunk never is smaller: below that a step's fixed cost is all there is."""
KEEP = 0.8
"""What is kept of an average when a new figure comes in."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """tokens: of prompts. encode_s: seconds for the encoder, which does at least one slice."""

    tokens: int
    encode_s: float


class Pace:
    def __init__(self, pace: float, target_s: float, max_tokens: int) -> None:
        """pace: longest step in multiples of its decodes alone, 0 for no bound; target_s: absolute, 0 for none."""
        self.pace = pace
        self.target_s = target_s
        self.max_tokens = max_tokens
        self._decode_s: dict[int, float] = {}
        self._token_s: float | None = None

    def allowance(self, decodes: int, *, encoding: bool) -> Allowance:
        """What a step with that many decodes may do beside them; encoding: an image is waiting for its share."""
        if not decodes:
            return Allowance(self._tokens(LISTEN_S), LISTEN_S)
        alone = self.decode_s(decodes)
        if alone is None or (not self.pace and not self.target_s):
            return Allowance(self.max_tokens, math.inf)
        spare = self._bound(alone) - alone
        share = spare / 2 if encoding else spare
        return Allowance(self._tokens(share), spare - share)

    def decode_s(self, decodes: int) -> float | None:
        """Seconds of a step that only decodes, from the nearest batch that was measured; None: none was."""
        size = _size(decodes)
        known = min(self._decode_s, key=lambda s: (abs(s - size), s), default=None)
        return None if known is None else self._decode_s[known]

    def observe(self, decodes: int, tokens: int, seconds: float, encode_s: float) -> None:
        """A step that took `seconds`, `encode_s` of them in the encoder, with `tokens` of prompts."""
        if not tokens and not encode_s:
            if decodes:
                size = _size(decodes)
                self._decode_s[size] = _blend(self._decode_s.get(size), seconds)
        elif tokens >= FEWEST_TOKENS:
            alone = self.decode_s(decodes) or 0.0 if decodes else 0.0
            rest = max(seconds - encode_s - alone, 0.1 * seconds)
            self._token_s = _blend(self._token_s, rest / tokens)

    def _bound(self, alone: float) -> float:
        bounds = [self.pace * alone] if self.pace else []
        if self.target_s:
            bounds.append(self.target_s)
        return max(alone, min(bounds))

    def _tokens(self, seconds: float) -> int:
        if self._token_s is None:
            return self.max_tokens
        wanted = int(seconds / self._token_s) if self._token_s > 0 else self.max_tokens
        return max(FEWEST_TOKENS, min(self.max_tokens, wanted))


def _size(decodes: int) -> int:
    """Batches of about one size share a figure: 1, 2, 3-4, 5-8, ..."""
    return (decodes - 1).bit_length()


def _blend(old: float | None, new: float) -> float:
    return new if old is None else KEEP * old + (1 - KEEP) * new
