"""The pace: how much a step may do beside its decodes, so that running streams keep their rhythm.

The budget of a step is time. The time of the decodes alone is measured. A step that also computes part of a
prompt or encodes part of an image may last `pace` times as long, or as long as a given target. The rest of
that time goes to prompts, or half of it while an image is being encoded; the measured seconds per token turn
it into a number of tokens. The encoder gets the time that prompts leave, because it can stop after any slice.

When many requests wait for their first token and few streams decode, the bound grows with the number of
waiting requests beyond the first. To delay one stream for the sake of seven requests does less harm, and
afterwards all of them decode in a batch at about the cost of one.

No property of the machine is built in: all figures are moving averages of measurements.

Without decodes no stream waits for a token. Such a step is still limited, so that new requests are scheduled
soon.
"""

from __future__ import annotations

import math

IDLE_STEP_S = 0.2
"""Longest step without decodes, in seconds; twice that for prompts: short chunks take longer in all."""
FEWEST_TOKENS = 16
"""The smallest chunk: below it, the fixed cost of a step dominates."""
FIRST_TOKENS = 128
"""Size of the first chunk, which measures the seconds per token."""
FREE_BATCH = 4
"""This many sequences decode at about the cost of one."""
CROWDING = 0.5
"""Exponent below 1: the bound grows more slowly than the number of waiting requests."""
OLD_WEIGHT = 0.8
"""Weight of the old value in a moving average; the new measurement gets the rest."""


class Pace:
    """The time that a step may take beside its decodes, learnt from the durations of earlier steps."""

    def __init__(self, pace: float, target_s: float, max_tokens: int) -> None:
        """Create a pace without measurements.

        pace: longest step, as a multiple of the time of its decodes alone; 0 for no bound.
        target_s: longest step in seconds; 0 for no bound.
        max_tokens: most prompt tokens of a step.
        """
        self.pace = pace
        self.target_s = target_s
        self.max_tokens = max_tokens
        self._decode_s: dict[int, float] = {}
        self._guess: float | None = None
        self._token_s: float | None = None

    def spare_s(self, decodes: int, others: int = 0) -> float:
        """Seconds that a step may take in addition to its decodes.

        decodes: number of decodes whose rhythm counts.
        others: number of requests that wait for their first token.
        """
        if not decodes:
            return IDLE_STEP_S
        alone = self.decode_s(decodes)
        if not self.pace and not self.target_s:
            return math.inf
        if alone is None:
            return self.target_s or IDLE_STEP_S
        return self._bound(alone, (others - 1) / max(1.0, decodes / FREE_BATCH)) - alone

    def prompt_tokens(self, decodes: int, others: int, *, encoding: bool) -> int:
        """Number of prompt tokens for the next step. encoding: an image is to be encoded in the same step."""
        spare = self.spare_s(decodes, others)
        if spare == math.inf:
            return self.max_tokens
        if self._token_s is None:
            return min(self.max_tokens, FIRST_TOKENS)
        if not decodes:
            spare = 2 * IDLE_STEP_S
        seconds = spare / 2 if encoding and decodes else spare
        return max(FEWEST_TOKENS, min(self.max_tokens, int(seconds / self._token_s)))

    def encode_s(self, decodes: int, others: int, tokens: int) -> float:
        """Seconds for the encoder in a step that also computes `tokens` prompt tokens."""
        return max(0.0, self.spare_s(decodes, others) - self.prompt_s(tokens))

    def prompt_s(self, tokens: int) -> float:
        """Estimated seconds for `tokens` prompt tokens; 0 before anything is measured."""
        return tokens * (self._token_s or 0.0)

    def decode_s(self, decodes: int) -> float | None:
        """Seconds of a step that only decodes, from the measured batch size that is nearest.

        Falls back to an estimate from mixed steps; None if there is no measurement at all.
        """
        size = _size(decodes)
        nearest = min(self._decode_s, key=lambda s: (abs(s - size), s), default=None)
        return self._guess if nearest is None else self._decode_s[nearest]

    def observe(self, decodes: int, tokens: int, seconds: float, encode_s: float) -> None:
        """Record a step with `decodes` decodes and `tokens` prompt tokens.

        seconds: duration of the step.
        encode_s: part of the duration that the encoder took.
        """
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
        """Estimate the time of decodes from a mixed step: under load, perhaps no step only decodes.

        The time that is left without the prompt tokens is at least the time of the decodes.
        """
        rest = seconds - self.prompt_s(tokens)
        if (not tokens or self._token_s is not None) and rest > seconds / 4:
            self._guess = rest if self._guess is None else min(self._guess, rest)

    def _bound(self, alone: float, crowd: float) -> float:
        bounds = [self.pace * math.pow(max(1.0, crowd), CROWDING) * alone] if self.pace else []
        if self.target_s:
            bounds.append(self.target_s)
        return max(alone, min(bounds))


def _size(decodes: int) -> int:
    """The size class of a batch; one measurement serves each class: 1, 2, 3-4, 5-8, ..."""
    return (decodes - 1).bit_length()


def _blend(old: float | None, new: float) -> float:
    return new if old is None else OLD_WEIGHT * old + (1 - OLD_WEIGHT) * new
