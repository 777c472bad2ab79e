"""Chooses one token per row. Greedy rows share one argmax; the others draw with a random stream of their own.

The random stream of a sequence depends only on the request's seed and the number of the choice, and advances
once per token. So a seed gives the same text alone, in a batch, and after a preemption.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from fovea.engine.sample.batch import draw, has_filter, row_index
from fovea.engine.sample.logits import adjust, distribution, needs_adjusting
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import SampledToken


class Sampler:
    """Chooses the next tokens of sequences and keeps their random streams. For one thread.

    eos_ids: token ids that end an answer; min_tokens forbids them.
    batched: draw many rows at once on the device, and wait only once per step for its tokens. For CUDA. On a
        CPU there is nothing to wait for, and a row that is drawn by itself is rounded equally in every batch.
    """

    def __init__(self, eos_ids: frozenset[int], *, batched: bool = False) -> None:
        self._eos_ids = eos_ids
        self._batched = batched
        self._streams: dict[str, random.Random] = {}

    def add(self, seq: Sequence, choice: int) -> None:
        """Start the random stream of a sequence, which is choice number `choice` of its request."""
        seed = seq.sampling.seed
        self._streams[seq.id] = random.Random(None if seed is None else f"{seed}:{choice}")

    def remove(self, seq: Sequence) -> None:
        self._streams.pop(seq.id, None)

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        """Choose the next token of each sequence. logits: (len(sequences), vocabulary) float32."""
        best = logits.argmax(-1)
        points: dict[int, float] = {}
        if self._batched:
            points = self._points(sequences)
            tokens, sure = self._draw(logits, best, sequences, points)
        else:
            tokens, sure = best.tolist(), [True] * len(sequences)
        return [
            self._pick(logits[i], tokens[i], seq, points.get(i), done=i in points and sure[i])
            for i, seq in enumerate(sequences)
        ]

    def _points(self, sequences: Seq[Sequence]) -> dict[int, float]:
        """Random numbers for the rows to draw on the device, by row: those without penalties and logprobs."""
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
        """Draw the rows that have a point.

        Returns a token of each row, and whether its candidates were complete.

        best: (rows,), the most likely tokens, which rows without a point get.
        """
        table = torch.stack((best, torch.ones_like(best)))
        for with_filter in (True, False):
            rows = [i for i in points if has_filter(sequences[i].sampling) == with_filter]
            if rows:
                index = row_index(rows, logits.device)
                subset = logits if len(rows) == len(logits) else logits[index]
                params = [sequences[i].sampling for i in rows]
                drawn, complete = draw(subset, params, [points[i] for i in rows])
                table[:, index] = torch.stack((drawn, complete.long()))
        tokens, sure = table.tolist()
        return tokens, [bool(flag) for flag in sure]

    def _pick(
        self, row: Tensor, best: int, seq: Sequence, point: float | None, *, done: bool
    ) -> SampledToken:
        """Choose the token of one row.

        best: the most likely token; with `done`, the token that was drawn on the device.
        point: random number that was already taken from the row's stream; None: none was.
        """
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
