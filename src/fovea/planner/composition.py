"""The amounts of work in a step, on which its duration depends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Composition:
    """The amounts of work in a step.

    decodes: tokens of sequences that decode, drafts included.
    decode_context: sum of the tokens that each of these attends to.
    prompt_tokens: tokens of prompts.
    chunks: number of sequences to which these belong.
    pairs: pairs of a prompt token and a token that it attends to, summed over the chunks.
    """

    decodes: int = 0
    decode_context: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    pairs: int = 0

    @property
    def mean(self) -> Composition:
        """One decode with the mean context of the decodes."""
        return Composition(1, self.decode_context // max(1, self.decodes))

    @property
    def amounts(self) -> tuple[float, ...]:
        """1 for the step itself, then the fields in their order: the factors of the costs of a step."""
        return 1, self.decodes, self.decode_context, self.prompt_tokens, self.chunks, self.pairs

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prompt_tokens)


def pairs_of(start: int, count: int) -> int:
    """Return the pairs of `count` prompt tokens after `start` computed ones, and the tokens before them."""
    return count * start + count * (count + 1) // 2
