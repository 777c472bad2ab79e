"""One token per row. Greedy rows share one argmax; others draw with a random stream of their own.

A request's stream depends on its seed and choice alone and advances once per token, so the same seed gives the same
text alone, in a batch, and after a preemption.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from fovea.engine.sample.batch import draw, filtered, index
from fovea.engine.sample.logits import adjust, distribution, needs_adjusting
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import SampledToken


class Sampler:
    def __init__(self, eos_ids: frozenset[int], *, batched: bool = False) -> None:
        """batched: draw for many rows at once, and ask the device for the tokens of a step together. For CUDA; on a CPU
        there is nothing to wait for, and a row by itself is rounded the same in any batch."""
        self._eos_ids = eos_ids
        self._batched = batched
        self._streams: dict[str, random.Random] = {}

    def add(self, seq: Sequence, choice: int) -> None:
        seed = seq.sampling.seed
        self._streams[seq.id] = random.Random(None if seed is None else f"{seed}:{choice}")

    def remove(self, seq: Sequence) -> None:
        self._streams.pop(seq.id, None)

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        """logits (len(sequences), vocabulary) float32."""
        best = logits.argmax(-1)
        drawn: dict[int, float] = {}
        if self._batched:
            drawn = self._points(sequences)
            tokens, sure = self._draw(logits, best, sequences, drawn)
        else:
            tokens, sure = best.tolist(), [True] * len(sequences)
        return [
            self._pick(logits[i], tokens[i], seq, drawn.get(i), done=i in drawn and sure[i])
            for i, seq in enumerate(sequences)
        ]

    def _points(self, sequences: Seq[Sequence]) -> dict[int, float]:
        """A number of its own stream for each row that is drawn on the device: nothing is asked of it but a token."""
        return {
            i: self._streams[seq.id].random()
            for i, seq in enumerate(sequences)
            if not seq.sampling.greedy
            and not seq.sampling.logprobs
            and not needs_adjusting(seq.sampling, self._forbidden(seq))
        }

    def _draw(
        self, logits: Tensor, best: Tensor, sequences: Seq[Sequence], points: dict[int, float]
    ) -> tuple[list[int], list[bool]]:
        """A token of each row, the most likely where nothing is drawn; and whether the draw had all candidates."""
        made = torch.stack((best, torch.ones_like(best)))
        for kind in (True, False):
            rows = [i for i in points if filtered(sequences[i].sampling) == kind]
            if rows:
                asked = [sequences[i].sampling for i in rows]
                chosen = logits if len(rows) == len(logits) else logits[index(rows, logits.device)]
                found = draw(chosen, asked, [points[i] for i in rows])
                made[:, index(rows, logits.device)] = torch.stack((found[0], found[1].long()))
        tokens, sure = made.tolist()
        return tokens, [bool(flag) for flag in sure]

    def _pick(
        self, row: Tensor, best: int, seq: Sequence, point: float | None, *, done: bool
    ) -> SampledToken:
        """best: the most likely token, or if `done` the one that was drawn. point: what the row's stream said already."""
        if done:
            return SampledToken(best)
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
            point = self._streams[seq.id].random() if point is None else point
            place = int(torch.searchsorted(bounds, point * float(bounds[-1]), right=True))
            token = int(ids[min(place, ids.shape[0] - 1)])
        if not params.logprobs:
            return SampledToken(token)
        logprobs = torch.log_softmax(row, -1)
        values, ids = logprobs.topk(params.top_logprobs) if params.top_logprobs else (row[:0], row[:0])
        top = tuple(zip(ids.int().tolist(), values.tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), top)

    def _forbidden(self, seq: Sequence) -> frozenset[int]:
        if len(seq.output_ids) >= seq.sampling.min_tokens:
            return frozenset()
        return self._eos_ids | frozenset(seq.sampling.stop_token_ids)
