"""One token per row. Greedy rows share one argmax; others draw with a random stream of their own.

A request's stream depends on its seed and choice alone and advances once per token, so the same seed gives the same
text alone, in a batch, and after a preemption.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.engine.sample.logits import adjust, distribution, needs_adjusting
from fovea.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, and if asked for: its logprob before any adjustment, and the most likely alternatives (id, logprob)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._streams: dict[str, random.Random] = {}

    def add(self, seq: Sequence, choice: int) -> None:
        seed = seq.sampling.seed
        self._streams[seq.id] = random.Random(None if seed is None else f"{seed}:{choice}")

    def remove(self, seq: Sequence) -> None:
        self._streams.pop(seq.id, None)

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        """logits (len(sequences), vocabulary) float32."""
        best = logits.argmax(-1).tolist()
        return [self._pick(logits[i], best[i], seq) for i, seq in enumerate(sequences)]

    def _pick(self, row: Tensor, best: int, seq: Sequence) -> Sampled:
        params = seq.sampling
        forbidden = self._forbidden(seq)
        token = best
        if needs_adjusting(params, forbidden):
            adjusted = adjust(row, params, seq.prompt_ids, seq.output_ids, forbidden)
            token = int(adjusted.argmax())
        else:
            adjusted = row
        if not params.greedy:
            ids, probabilities = distribution(adjusted, params)
            bounds = probabilities.cumsum(0)
            point = self._streams[seq.id].random() * float(bounds[-1])
            index = int(torch.searchsorted(bounds, point, right=True))
            token = int(ids[min(index, ids.shape[0] - 1)])
        if not params.logprobs:
            return Sampled(token)
        logprobs = torch.log_softmax(row, -1)
        values, ids = logprobs.topk(params.top_logprobs) if params.top_logprobs else (row[:0], row[:0])
        top = tuple(zip(ids.int().tolist(), values.tolist(), strict=True))
        return Sampled(token, float(logprobs[token]), top)

    def _forbidden(self, seq: Sequence) -> frozenset[int]:
        if len(seq.output_ids) >= seq.sampling.min_tokens:
            return frozenset()
        return self._eos_ids | frozenset(seq.sampling.stop_token_ids)
