"""Answers of no meaning and of the right length: whole words of a vocabulary, one per token, by seed."""

from __future__ import annotations

import re
import zlib
from random import Random

from fovea.core.sampling import SamplingParams
from fovea.core.workload import geometric
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import Sequence

MEAN_TOKENS = 64
"""Of answers whose request names no length."""


class Filler:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
        self._words = [token for token, text in texts.items() if re.fullmatch(" [a-z]{3,}", text)]

    def seed(self, prompt_ids: list[int], sampling: SamplingParams, choice: int) -> int:
        """Equal requests get equal answers, by the request's own seed where it has one; choices differ."""
        own = sampling.seed if sampling.seed is not None else zlib.crc32(repr(prompt_ids).encode())
        return zlib.crc32(f"{own} {choice}".encode())

    def length(self, seed: int, sampling: SamplingParams, room: int) -> int:
        """Tokens of an answer: what the request asks for, else drawn; never more than `room`."""
        if sampling.max_tokens is not None:
            return sampling.max_tokens
        return min(room, max(sampling.min_tokens, geometric(Random(seed), MEAN_TOKENS)))

    def token(self, seed: int, seq: Sequence) -> int:
        """The next one of `seq`, whose answer has that seed."""
        return self._words[zlib.crc32(f"{seed} {len(seq.output_ids)}".encode()) % len(self._words)]
