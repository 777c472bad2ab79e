"""The amounts of work in a step, on which its duration depends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fovea.engine.schedule.plan import StepPlan
from fovea.engine.sequence import Sequence


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

    @classmethod
    def of(cls, plan: StepPlan) -> Composition:
        """Return the composition of a plan. Call it before `Stepper.apply`, which changes the sequences."""
        decodes = context = tokens = chunks = pairs = 0
        for item in plan.work:
            if item.seq.decoding:
                decodes += item.count
                context += item.count * item.stop
            else:
                tokens += item.count
                chunks += 1
                pairs += pairs_of(item.start, item.count)
        return cls(decodes, context, tokens, chunks, pairs)

    @classmethod
    def of_decodes(cls, sequences: Iterable[Sequence]) -> Composition:
        """Return the composition of a step that only decodes, without drafts. Others do not count."""
        lengths = [seq.length for seq in sequences if seq.decoding]
        return cls(len(lengths), sum(lengths))

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
