"""Filler answers of the right length: whole words of a vocabulary, one per token, chosen by a seed."""

from __future__ import annotations

import re
import zlib
from random import Random

from fovea.core.sampling import SamplingParams
from fovea.core.trace import geometric
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import Sequence

MEAN_TOKENS = 64
"""Mean length of an answer whose request names no length."""


class Filler:
    """Picks the next token of every answer, by a seed per unfinished sequence."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
        self._words = [token for token, text in texts.items() if re.fullmatch(" [a-z]{3,}", text)]
        self._end = min(tokenizer.eos_ids)
        self._seeds: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._seeds)

    def add(self, seq: Sequence, choice: int) -> None:
        """Choose a sequence's answer by its seed: the request's own, or else a digest of its prompt.

        Equal requests get equal answers. Choices of one request differ.
        """
        own = (
            seq.sampling.seed if seq.sampling.seed is not None else zlib.crc32(repr(seq.prompt_ids).encode())
        )
        self._seeds[seq.id] = zlib.crc32(f"{own} {choice}".encode())

    def remove(self, seq: Sequence) -> None:
        self._seeds.pop(seq.id, None)

    def token(self, seq: Sequence) -> int:
        """Return the next token: a word, or the end of the answer."""
        seed, number = self._seeds[seq.id], len(seq.output_ids)
        if number >= _length(seed, seq.sampling):
            return self._end
        return self._words[zlib.crc32(f"{seed} {number}".encode()) % len(self._words)]


def _length(seed: int, sampling: SamplingParams) -> int:
    """Return the number of words of an answer, drawn at random if the request names no length."""
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    return max(1, sampling.min_tokens, geometric(Random(seed), MEAN_TOKENS))
