"""Chooses one token per row. Greedy rows share one argmax; the others draw with a random stream of their own.

The random stream of a sequence depends only on the request's seed and the number of the choice, and number k
of the stream belongs to token k of the answer. So a seed gives the same text alone, in a batch, after a
preemption, and after a step that failed and was tried again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from fovea.engine.sample.batch import draw, has_filter, row_index
from fovea.engine.sample.logits import adjust, choose, distribution, needs_adjusting, repair
from fovea.engine.sample.seen import SeenTokens
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import SampledToken

LOWEST_LOGPROB = -9999.0
"""Logprob of a token that the model considers impossible, as in OpenAI's API: JSON has no -inf."""


class _Stream:
    """The random numbers of one sequence."""

    def __init__(self, seed: int | None, choice: int) -> None:
        self._random = random.Random(None if seed is None else f"{seed}:{choice}")
        self._drawn = 0
        self._latest = 0.0

    def number(self, index: int) -> float:
        """Return the number in [0, 1) of token `index` of the answer.

        The index grows from call to call, or stays if a step is tried again.
        """
        while self._drawn <= index:
            self._latest = self._random.random()
            self._drawn += 1
        return self._latest


class Sampler:
    """Chooses the next tokens of sequences and keeps their random streams. For one thread.

    eos_ids: token ids that end an answer; min_tokens forbids them.
    batched: draw many rows at once on the device, and wait only once per step for its tokens. For CUDA. On a
        CPU there is nothing to wait for, and a row that is drawn by itself is rounded equally in every batch.
    """

    def __init__(self, eos_ids: frozenset[int], *, batched: bool = False) -> None:
        self._eos_ids = eos_ids
        self._batched = batched
        self._streams: dict[str, _Stream] = {}
        self._seen: dict[str, SeenTokens] = {}

    def add(self, seq: Sequence, choice: int) -> None:
        """Start the random stream of a sequence, which is choice number `choice` of its request."""
        self._streams[seq.id] = _Stream(seq.sampling.seed, choice)

    def remove(self, seq: Sequence) -> None:
        self._streams.pop(seq.id, None)
        self._seen.pop(seq.id, None)

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken | Exception]:
        """Choose the next token of each sequence. logits: (len(sequences), vocabulary) float32.

        An exception in place of a token says why none could be chosen. It concerns that sequence alone.
        """
        best = logits.argmax(-1)
        points: dict[int, float] = {}
        if self._batched:
            points = self._points(sequences)
            tokens, sure = self._draw(logits, best, sequences, points)
        else:
            tokens, sure = best.tolist(), [True] * len(sequences)
        picks: list[SampledToken | Exception] = []
        for i, seq in enumerate(sequences):
            try:
                picks.append(self._pick(logits[i], tokens[i], seq, done=i in points and sure[i]))
            except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                picks.append(error)
        return picks

    def _points(self, sequences: Seq[Sequence]) -> dict[int, float]:
        """Random numbers for the rows to draw on the device, by row: those without penalties and logprobs."""
        return {
            i: self._point(seq)
            for i, seq in enumerate(sequences)
            if not seq.sampling.greedy
            and not seq.sampling.logprobs
            and not needs_adjusting(seq.sampling, self._forbidden(seq))
        }

    def _point(self, seq: Sequence) -> float:
        """The random number of the sequence's next token."""
        return self._streams[seq.id].number(len(seq.output_ids))

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

    def _pick(self, row: Tensor, best: int, seq: Sequence, *, done: bool) -> SampledToken:
        """Choose the token of one row.

        best: the most likely token; with `done`, the token that was drawn on the device.
        """
        params, forbidden = seq.sampling, self._forbidden(seq)
        adjusts = needs_adjusting(params, forbidden)
        if done or (params.greedy and not adjusts and not params.logprobs):
            return SampledToken(best)
        row = adjusted = repair(row)
        token = best
        if adjusts:
            seen = self._seen_tokens(seq, row) if params.repetition_penalty != 1.0 else None
            adjusted = adjust(row, params, seen, seq.output_ids, forbidden)
            token = int(adjusted.argmax())
        if not params.greedy:
            token = choose(*distribution(adjusted, params), self._point(seq))
        if not params.logprobs:
            return SampledToken(token)
        logprobs = torch.log_softmax(row, -1)
        values, ids = logprobs.topk(min(params.top_logprobs, len(row)))
        top = tuple(zip(ids.tolist(), values.clamp(min=LOWEST_LOGPROB).tolist(), strict=True))
        return SampledToken(token, max(LOWEST_LOGPROB, float(logprobs[token])), top)

    def _seen_tokens(self, seq: Sequence, row: Tensor) -> Tensor:
        """Distinct tokens of prompt and answer."""
        seen = self._seen.get(seq.id)
        if seen is None:
            seen = self._seen[seq.id] = SeenTokens(seq.prompt_ids, row.shape[0], row.device)
        return seen.update(seq.output_ids)

    def _forbidden(self, seq: Sequence) -> frozenset[int]:
        if len(seq.output_ids) >= seq.sampling.min_tokens:
            return frozenset()
        return self._eos_ids | frozenset(seq.sampling.stop_token_ids)
