"""Chooses one token per row. Greedy rows share one argmax; the others draw with a random stream of their own.

A sequence with drafts has several rows, and gets the tokens up to the first that differs from its draft, this
one included.

A sequence with a grammar only gets tokens that the grammar allows. Tokens that the grammar leaves no choice
about become its next drafts, so that one step computes all of them.

The random stream of a sequence depends only on the request's seed and the number of the choice, and number k
of the stream belongs to token k of the answer. So a seed gives the same text alone, in a batch, after a
preemption, and after a step that failed and was tried again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from fovea.core.sampling import LOWEST_LOGPROB
from fovea.engine.grammar.compiler import Grammar
from fovea.engine.grammar.guide import Guides
from fovea.engine.sample.batch import draw, has_filter, row_index
from fovea.engine.sample.logits import adjust, choose, distribution, needs_adjusting, repair
from fovea.engine.sample.masks import RowMask, RowMasks
from fovea.engine.sample.seen import SeenTokens
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import SampledToken, StepResult

Row = tuple[Sequence, int]
"""A row of logits: its sequence, and the number of drafts between the answer and the row's token."""


class _Stream:
    """The random numbers of one sequence."""

    def __init__(self, seed: int | None, choice: int) -> None:
        self._random = random.Random(None if seed is None else f"{seed}:{choice}")
        self._numbers: list[float] = []

    def number(self, index: int) -> float:
        """Return the number in [0, 1) of token `index` of the answer.

        Numbers are kept: a step that is tried again, and a token after a refused draft, need them again.
        """
        while len(self._numbers) <= index:
            self._numbers.append(self._random.random())
        return self._numbers[index]


class Sampler:
    """Chooses the next tokens of sequences and keeps their random streams. For one thread.

    eos_ids: token ids that end an answer; min_tokens forbids them.
    batched: draw many rows at once on the device, and wait only once per step for its tokens. For CUDA. On a
        CPU there is nothing to wait for, and a row that is drawn by itself is rounded equally in every batch.
    most_drafts: most forced tokens that one step computes as drafts; 0: each takes a step of its own.
    """

    def __init__(self, eos_ids: frozenset[int], *, batched: bool = False, most_drafts: int = 0) -> None:
        self._eos_ids = eos_ids
        self._batched = batched
        self._most_drafts = most_drafts
        self._streams: dict[str, _Stream] = {}
        self._seen: dict[str, SeenTokens] = {}
        self._guides = Guides()
        self._bad_words: dict[str, list[list[int]]] = {}

    def add(
        self,
        seq: Sequence,
        choice: int,
        grammar: Grammar | None = None,
        bad_words: Seq[Seq[int]] = (),
        after: tuple[int, ...] = (),
    ) -> list[int]:
        """Start the random stream of a sequence, which is choice number `choice` of its request.

        Returns the tokens with which the grammar forces the answer to begin, as drafts.

        grammar: what the answer must follow.
        bad_words: tokens that must not occur one after the other.
        after: the grammar begins behind these tokens; (): with the answer.
        """
        self._streams[seq.id] = _Stream(seq.sampling.seed, choice)
        if bad_words:
            self._bad_words[seq.id] = [list(word) for word in bad_words]
        if grammar is None:
            return []
        self._guides.add(seq.id, grammar, after)
        return self._guides.forced(seq.id)[: self._most_drafts]

    def remove(self, seq: Sequence) -> None:
        self._streams.pop(seq.id, None)
        self._seen.pop(seq.id, None)
        self._guides.remove(seq.id)
        self._bad_words.pop(seq.id, None)

    def sample(self, logits: Tensor, rows: Seq[Row], result: StepResult) -> None:
        """Choose the next tokens of each sequence, and write them into `result`.

        The token after a draft is only chosen if the draft is equal to the token that was chosen in its
        place. So the tokens are those that single steps would choose: drafts only save steps.

        logits: (len(rows), vocabulary) float32. Those of sequences with a grammar are changed.
        rows: sequence of each row, and number of drafts before it; in any order.
        result: gets the tokens, or the error why none could be chosen; it concerns that sequence alone. It
            also gets the next drafts.
        """
        masks = RowMasks.of(self._guides.masks(rows, logits.shape[1], result.failures), logits)
        best = logits.argmax(-1)
        points: dict[int, float] = {}
        if self._batched:
            points = self._points(rows)
            tokens, sure = self._draw(logits, best, rows, points)
        else:
            tokens, sure = best.tolist(), [True] * len(rows)
        picks: dict[str, list[SampledToken]] = {}
        for i in sorted(range(len(rows)), key=lambda i: rows[i][1]):
            seq, drafts = rows[i]
            chosen = picks.setdefault(seq.id, [])
            if seq.id in result.failures or not _is_reached(seq, drafts, chosen):
                continue
            try:
                done = i in points and sure[i]
                chosen.append(self._pick(logits[i], tokens[i], seq, drafts, masks.get(i), done=done))
            except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                result.failures[seq.id] = error
        if self._guides:
            self._look_ahead({seq.id: seq for seq, _ in rows}, picks, result)
        result.sampled.update({name: chosen for name, chosen in picks.items() if name not in result.failures})

    def _look_ahead(
        self, sequences: dict[str, Sequence], picks: dict[str, list[SampledToken]], result: StepResult
    ) -> None:
        """Cut each answer with a grammar where it is complete; note which tokens must follow the others."""
        for name, chosen in picks.items():
            if name not in self._guides or name in result.failures:
                continue
            try:
                complete = self._guides.read(sequences[name], [pick.token for pick in chosen])
                if complete is not None:
                    chosen[complete - 1 :] = [replace(chosen[complete - 1], final=True)]
                elif self._most_drafts:
                    result.drafts[name] = self._guides.forced(name)[: self._most_drafts]
            except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                result.failures[name] = error

    def _points(self, rows: Seq[Row]) -> dict[int, float]:
        """Random numbers for the rows to draw on the device, by row: those without penalties and logprobs."""
        return {
            i: self._point(seq, drafts)
            for i, (seq, drafts) in enumerate(rows)
            if not seq.sampling.greedy
            and not seq.sampling.logprobs
            and not needs_adjusting(seq.sampling, self._forbidden(seq, drafts))
        }

    def _point(self, seq: Sequence, drafts: int) -> float:
        """The random number of the token after the answer and so many drafts."""
        return self._streams[seq.id].number(len(seq.output_ids) + drafts)

    def _draw(
        self, logits: Tensor, best: Tensor, rows: Seq[Row], points: dict[int, float]
    ) -> tuple[list[int], list[bool]]:
        """Draw the rows that have a point.

        Returns a token of each row, and whether its candidates were complete.

        best: (rows,), the most likely tokens, which rows without a point get.
        """
        table = torch.stack((best, torch.ones_like(best)))
        for with_filter in (True, False):
            drawn_rows = [i for i in points if has_filter(rows[i][0].sampling) == with_filter]
            if drawn_rows:
                index = row_index(drawn_rows, logits.device)
                subset = logits if len(drawn_rows) == len(logits) else logits[index]
                params = [rows[i][0].sampling for i in drawn_rows]
                drawn, complete = draw(subset, params, [points[i] for i in drawn_rows])
                table[:, index] = torch.stack((drawn, complete.long()))
        tokens, sure = table.tolist()
        return tokens, [bool(flag) for flag in sure]

    def _pick(
        self, row: Tensor, best: int, seq: Sequence, drafts: int, mask: RowMask | None, *, done: bool
    ) -> SampledToken:
        """Choose the token of one row, which follows the answer and its first `drafts` drafts.

        best: the most likely token; with `done`, the token that was drawn on the device.
        """
        params, forbidden = seq.sampling, self._forbidden(seq, drafts)
        adjusts = needs_adjusting(params, forbidden)
        simple = done or (params.greedy and not adjusts and not params.logprobs)
        if simple and (mask is None or mask.allows(best)):
            return SampledToken(best)
        row = adjusted = repair(row if mask is None else mask.row)
        token = best
        if adjusts:
            output = seq.output_ids + seq.drafts[:drafts]
            seen = self._seen_tokens(seq, output, row) if params.repetition_penalty != 1.0 else None
            adjusted = adjust(row, params, seen, output, forbidden)
        if mask is not None:
            adjusted = mask.apply(adjusted)
        if adjusts or mask is not None:
            token = int(adjusted.argmax())
        if not params.greedy:
            token = choose(*distribution(adjusted, params), self._point(seq, drafts))
        if not params.logprobs:
            return SampledToken(token)
        logprobs = torch.log_softmax(row, -1)
        values, ids = logprobs.topk(min(params.top_logprobs, len(row)))
        top = tuple(zip(ids.tolist(), values.clamp(min=LOWEST_LOGPROB).tolist(), strict=True))
        return SampledToken(token, max(LOWEST_LOGPROB, float(logprobs[token])), top)

    def _seen_tokens(self, seq: Sequence, output: list[int], row: Tensor) -> Tensor:
        """Distinct tokens of prompt and answer."""
        seen = self._seen.get(seq.id)
        if seen is None:
            seen = self._seen[seq.id] = SeenTokens(seq.prompt_ids, row.shape[0], row.device)
        return seen.update(output)

    def _forbidden(self, seq: Sequence, drafts: int) -> frozenset[int]:
        ends: frozenset[int] = frozenset()
        if len(seq.output_ids) + drafts < seq.sampling.min_tokens:
            ends = self._eos_ids | frozenset(seq.sampling.stop_token_ids)
        words = self._bad_words.get(seq.id)
        if not words:
            return ends
        output = seq.output_ids + seq.drafts[:drafts]
        return ends | {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]}


def _is_reached(seq: Sequence, drafts: int, chosen: list[SampledToken]) -> bool:
    """Whether the tokens that were chosen so far are the first `drafts` drafts."""
    return len(chosen) == drafts and (not drafts or chosen[-1].token == seq.drafts[drafts - 1])
