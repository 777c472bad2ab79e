"""Perplexity of a model on a text: how well it predicts each token from those before it.

The text is cut into pieces of equal length, and each piece is a prompt of its own. So a token is predicted
from the tokens of its piece alone, as in the usual tables of perplexity. Perplexities of models with
different vocabularies cannot be compared; bits per byte can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fovea.core.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The result on one text.

    tokens: number of tokens that were predicted. The first one of a piece has nothing before it, unless the
        model's prompts begin with a token of their own.
    nats: sum of their negative log-probabilities.
    bytes: bytes of the whole text in UTF-8.
    """

    tokens: int
    nats: float
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte that an ideal code by this model takes, first tokens of pieces left out."""
        return self.nats / math.log(2) / self.bytes

    @classmethod
    def of(cls, scored: Iterable[Sequence[TokenLogprob | None]], size: int) -> Perplexity:
        """Add up the log-probabilities of all pieces.

        scored: for each piece one entry per token, None for the first. size: bytes of the text.
        """
        logprobs = [
            entry.logprob
            for piece in scored
            for entry in piece
            if entry is not None and entry.logprob is not None
        ]
        return cls(len(logprobs), -math.fsum(logprobs), size)


def pieces(ids: Sequence[int], start: Sequence[int], window: int) -> Iterator[tuple[int, ...]]:
    """Cut a text into prompts of at most `window` tokens.

    ids: all tokens of the text. start: the tokens with which every prompt of the model begins.
    A last piece of which no token would be predicted is left out.
    """
    step = window - len(start)
    for first in range(0, len(ids), step):
        piece = (*start, *ids[first : first + step])
        if len(piece) > 1:
            yield piece
