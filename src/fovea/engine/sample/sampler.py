"""Chooses one token per row. Greedy rows share one argmax; the others draw with a random stream of their own.

A sequence with drafts has several rows, and gets the tokens up to the first that differs from its draft, this
one included.

A sequence with a grammar only gets tokens that the grammar allows. Tokens that the grammar leaves no choice
about become its next drafts, so that one step computes all of them. If its guide is late, its logits or its
token are held back, and it gets the token between two later steps (`Sampler.late`).

The random stream of a sequence depends only on the request's seed and the number of the choice, and number k
of the stream belongs to token k of the answer. So a seed gives the same text alone, in a batch, after a
preemption, and after a step that failed and was tried again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.core.sampling import LOWEST_LOGPROB, SamplingParams
from fovea.engine.grammar.compiler import Grammar
from fovea.engine.grammar.guide import Ahead, Guides, Masks
from fovea.engine.job import SampledToken
from fovea.engine.sample.batch import Batch, BatchRow, Draw, TokenCounts, TokenLists, choose_draw, penalized
from fovea.engine.sample.logits import (
    RowMask,
    SeenTokens,
    adjust,
    apply_masks,
    choose,
    distribution,
    needs_adjusting,
    repair,
)
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence
from fovea.engine.step.executor import StepResult

Propose = Callable[[list[tuple[Sequence, list[int]]]], Mapping[str, Drafts]]
"""Returns drafts of answers that have just got some tokens, which the sequences do not know yet, by id."""
Row = tuple[Sequence, int]
"""A row of logits: its sequence, and the number of drafts between the answer and the row's token."""
NO_LISTS = TokenLists(SamplingParams(), 0)


class Sampler:
    """Chooses the next tokens of sequences and keeps their random streams. For one thread.

    eos_ids: token ids that end an answer; min_tokens forbids them.
    batched: choose all tokens of a step at once on the device, and wait once for them (`batch.Batch`). For
        CUDA. On a CPU there is nothing to wait for, and a row by itself is rounded equally in every batch.
    most_drafts: most forced tokens that one step computes as drafts; 0: each takes a step of its own.
    """

    def __init__(self, eos_ids: frozenset[int], *, batched: bool = False, most_drafts: int = 0) -> None:
        self._eos_ids = eos_ids
        self._batched = batched
        self._streams: dict[str, _Stream] = {}
        self._seen: dict[str, SeenTokens] = {}
        self._guides = Guides(most_drafts)
        self._held: dict[str, _Held] = {}
        self._bad_words: dict[str, list[list[int]]] = {}
        self._simple: set[str] = set()
        self._counts = TokenCounts()
        self._lists: dict[str, TokenLists] = {}

    def add(
        self,
        seq: Sequence,
        choice: int,
        grammar: Grammar | None = None,
        bad_words: Seq[Seq[int]] = (),
        after: tuple[int, ...] = (),
    ) -> Drafts:
        """Start the random stream of a sequence, which is choice number `choice` of its request.

        Returns the tokens with which the grammar forces the answer to begin, as drafts.

        grammar: what the answer must follow.
        bad_words: tokens that must not occur one after the other.
        after: the grammar begins after these tokens; (): with the answer.
        """
        params = seq.sampling
        self._streams[seq.id] = _Stream(params.seed, choice)
        if bad_words:
            self._bad_words[seq.id] = [list(word) for word in bad_words]
        elif params.greedy and not params.logprobs and not params.min_tokens and not needs_adjusting(params):
            self._simple.add(seq.id)
        if grammar is None:
            return NO_DRAFTS
        self._guides.add(seq.id, grammar, after)
        self._guides.wait([seq.id])
        ahead = self._guides.ahead(seq.id)
        return NO_DRAFTS if ahead is None else Drafts.certain(ahead.drafts.tokens[: self._guides.most_drafts])

    def remove(self, seq: Sequence) -> None:
        self._streams.pop(seq.id, None)
        self._seen.pop(seq.id, None)
        self._guides.remove(seq.id)
        self._held.pop(seq.id, None)
        self._bad_words.pop(seq.id, None)
        self._simple.discard(seq.id)
        self._counts.remove(seq.id)
        self._lists.pop(seq.id, None)

    def sample(self, logits: Tensor, rows: Seq[Row], result: StepResult) -> None:
        """Choose the next tokens of each sequence, and write them into `result`. See `launch`.

        result: gets the tokens, or the error why none could be chosen; it concerns that sequence alone. It
            also gets the next drafts.
        """
        self.launch(logits, rows).finish(result)

    def runs_ahead(self, seq: Sequence) -> bool:
        """Whether a token can be chosen before the host knows the one before it.

        Penalties, bad_words and grammars need to know it.
        """
        return not (penalized(seq.sampling) or seq.id in self._bad_words or seq.id in self._guides)

    def launch(
        self, logits: Tensor, rows: Seq[Row], *, ahead: bool = False, propose: Propose | None = None
    ) -> Pending:
        """Begin to choose the next tokens of each sequence. If batched, it does not wait for the device.

        The token after a draft is only chosen if the draft is equal to the token that was chosen in its
        place. So the tokens are those that single steps would choose: drafts only save steps.

        logits: (len(rows), vocabulary) float32. They must stay as they are until the end of `finish`, which
            changes those of sequences with a grammar if the sampler is not batched.
        rows: sequence of each row, and number of drafts before it; in any order.
        ahead: the host does not know the newest token of these answers yet. It will before `finish`. Only for
            sequences that `runs_ahead` names, and if the sampler is batched.
        propose: finds drafts of what follows the tokens; None: only grammars expect any.
        """
        # After a preemption, tokens before a held one are computed again.
        free = [i for i, (seq, _) in enumerate(rows) if seq.id not in self._held]
        failures: dict[str, Exception] = {}
        found, late = self._guides.masks([rows[i] for i in free], logits.shape[1], failures)
        masks = None if found is None else found._replace(rows=[free[row] for row in found.rows])
        skipped = late | self._held.keys()
        for i, (seq, drafts) in enumerate(rows):
            if seq.id in late and not drafts:
                self._held[seq.id] = _Held(seq, row=logits[i : i + 1].clone())
        counted = [(seq, drafts + 1) for seq, drafts in rows] if ahead else rows
        choice = self._start(logits, counted, masks, failures, skipped)
        return Pending(choice, partial(self._deliver, rows, choice, failures, skipped, propose))

    def late(self) -> StepResult | None:
        """Return the tokens that were held back and are ready now; None: there are none.

        Of a sequence that had drafts, only the token after the answer was kept.
        """
        if not self._held:
            return None
        result = StepResult()
        for name, held in list(self._held.items()):
            try:
                ahead = self._guides.ahead(name)
                if ahead is None:
                    continue
                if held.row is not None:
                    self._choose_held(held, ahead)
                    continue
                assert held.pick is not None
                result.sampled[name] = chosen = [held.pick]
                self._finish(name, chosen, ahead, result)
            except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                result.failures[name] = error
            del self._held[name]
        return result if result.sampled or result.failures else None

    def _choose_held(self, held: _Held, ahead: Ahead) -> None:
        """Choose the token of logits that were held back, and let the guide read it."""
        row, seq = held.row, held.seq
        assert row is not None
        masks = None if not ahead.masks else Masks.of([(0, ahead.masks[0])], row.shape[1])
        failures: dict[str, Exception] = {}
        picks = _accept([(seq, 0)], self._start(row, [(seq, 0)], masks, failures), failures)
        if seq.id in failures:
            raise failures[seq.id]
        held.row, held.pick = None, picks[seq.id][0]
        self._guides.look(seq.id, seq.output_ids, [held.pick.token])

    def _start(
        self,
        logits: Tensor,
        rows: Seq[Row],
        masks: Masks | None,
        failures: dict[str, Exception],
        skipped: Collection[str] = (),
    ) -> Choice:
        """Begin to choose the tokens of rows by their masks.

        failures: gets the errors of sequences whose rows cannot be computed.
        skipped: ids of sequences that get no token.
        """
        if not self._batched:
            return self._one_by_one(logits, rows, apply_masks(masks, logits))
        bits = {} if masks is None else dict(zip(masks.rows, masks.bits, strict=True))
        final, work = [True] * len(rows), []
        for i, (seq, drafts) in enumerate(rows):
            if seq.id in skipped or seq.id in failures:
                final[i] = False
            elif seq.id not in self._simple or i in bits:
                try:
                    row, final[i] = self._batch_row(i, seq, drafts, bits.get(i), logits.shape[1])
                except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                    failures[seq.id], final[i] = error, False
                    continue
                if row.draw != Draw.UNCHANGED or seq.sampling.logprobs:
                    work.append(row)
        batch = Batch(logits, work, self._counts)
        return Choice(batch.tokens, final, lambda: batch.read().__getitem__)

    def _one_by_one(self, logits: Tensor, rows: Seq[Row], masks: dict[int, RowMask]) -> Choice:
        best = logits.argmax(-1)

        def read() -> Callable[[int], SampledToken]:
            tokens: list[int] = best.tolist()

            def pick(i: int) -> SampledToken:
                (seq, drafts), mask = rows[i], masks.get(i)
                if seq.id in self._simple and (mask is None or mask.allows(tokens[i])):
                    return SampledToken(tokens[i])
                return self._pick(logits[i], tokens[i], seq, drafts, mask)

            return pick

        final = [seq.id in self._simple and i not in masks for i, (seq, _) in enumerate(rows)]
        return Choice(best, final, read)

    def _batch_row(
        self, number: int, seq: Sequence, drafts: int, mask: NDArray[np.int32] | None, size: int
    ) -> tuple[BatchRow, bool]:
        """Return a row for a batch, and whether its token is final on the device.

        size: number of logits.
        """
        params, forbidden, lists = seq.sampling, self._forbidden(seq, drafts), NO_LISTS
        if params.logit_bias or params.allowed_token_ids:
            lists = self._lists.get(seq.id) or self._lists.setdefault(seq.id, TokenLists(params, size))
        draw, final = choose_draw(params, mask is not None or needs_adjusting(params, forbidden), size)
        point = 0.0 if params.greedy else self._point(seq, drafts)
        return BatchRow(number, seq, seq.drafts[:drafts], lists, forbidden, mask, point, draw), final

    def _deliver(
        self,
        rows: Seq[Row],
        choice: Choice,
        failures: dict[str, Exception],
        skipped: Collection[str],
        propose: Propose | None,
        result: StepResult,
    ) -> None:
        """Write the tokens of a choice into the result, after the guides have read them."""
        picks = _accept(rows, choice, failures, skipped)
        result.failures.update(failures)
        if propose is not None:
            got = [seq for seq, drafts in rows if not drafts and picks.get(seq.id) and seq.id not in failures]
            result.drafts |= propose([(seq, [pick.token for pick in picks[seq.id]]) for seq in got])
        if self._guides:
            guided = {seq.id: seq for seq, _ in rows if seq.id in self._guides}
            self._look_ahead([(seq, picks[name]) for name, seq in guided.items() if picks.get(name)], result)
        result.sampled.update(
            {name: chosen for name, chosen in picks.items() if chosen and name not in result.failures}
        )

    def _look_ahead(self, chosen: list[tuple[Sequence, list[SampledToken]]], result: StepResult) -> None:
        """Let guides read the new tokens of their answers.

        chosen: the sequences that have a guide, with their tokens.

        An answer is cut where it is complete. Tokens that must follow become drafts, before those that were
        proposed. The first token of an answer whose guide is late is held back; accepted drafts after it are
        computed again.
        """
        guided = [(seq, picks) for seq, picks in chosen if seq.id not in result.failures]
        for seq, picks in guided:
            proposed = result.drafts.pop(seq.id, NO_DRAFTS)
            self._guides.look(seq.id, seq.output_ids, [pick.token for pick in picks], proposed=proposed)
        self._guides.wait([seq.id for seq, _ in guided])
        for seq, picks in guided:
            try:
                ahead = self._guides.ahead(seq.id)
                if ahead is None:
                    if len(picks) > 1:
                        self._guides.look(seq.id, seq.output_ids, [picks[0].token])
                    self._held[seq.id] = _Held(seq, pick=picks[0])
                    picks.clear()
                else:
                    self._finish(seq.id, picks, ahead, result)
            except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                result.failures[seq.id] = error

    def _finish(self, name: str, picks: list[SampledToken], ahead: Ahead, result: StepResult) -> None:
        if ahead.complete is not None:
            picks[ahead.complete - 1 :] = [picks[ahead.complete - 1]._replace(final=True)]
        else:
            result.drafts[name] = ahead.drafts

    def _point(self, seq: Sequence, drafts: int) -> float:
        """The random number of the token after the answer and so many drafts."""
        return self._streams[seq.id].number(len(seq.output_ids) + drafts)

    def _pick(self, row: Tensor, best: int, seq: Sequence, drafts: int, mask: RowMask | None) -> SampledToken:
        """Choose the token of one row, which follows the answer and its first `drafts` drafts.

        best: the most likely token.
        """
        params, forbidden = seq.sampling, self._forbidden(seq, drafts)
        adjusts = needs_adjusting(params, forbidden)
        if params.greedy and not adjusts and not params.logprobs and (mask is None or mask.allows(best)):
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


class Choice(NamedTuple):
    """The tokens of a step's rows while they are being chosen.

    tokens: (rows,) int64 on the device.
    final: for each row, whether its token in `tokens` is final.
    read: waits for the device, and returns a function that returns the token of a row by its number.
    """

    tokens: Tensor
    final: list[bool]
    read: Callable[[], Callable[[int], SampledToken]]


class Pending:
    """A step whose tokens are being chosen, from `Sampler.launch`.

    tokens: (rows,) int64 on the device, a token for each row of the logits.
    final: for each row, whether its token is certain, provided that its drafts are accepted and the answer
        does not end earlier.
    """

    def __init__(self, choice: Choice, deliver: Callable[[StepResult], None]) -> None:
        self.tokens, self.final = choice.tokens, choice.final
        self._deliver = deliver

    def finish(self, result: StepResult) -> None:
        """Wait for the device, and write tokens, failures and next drafts of each sequence into `result`."""
        self._deliver(result)


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


@dataclass(slots=True)
class _Held:
    """A sequence whose guide is late. It has nothing to compute until it gets its token.

    row: logits of its next token, (1, vocabulary); None: the token was chosen.
    pick: the token, which the guide is reading.
    """

    seq: Sequence
    row: Tensor | None = None
    pick: SampledToken | None = None


def _accept(
    rows: Seq[Row], choice: Choice, failures: dict[str, Exception], skipped: Collection[str] = ()
) -> dict[str, list[SampledToken]]:
    """Wait for the tokens of rows, and return those of each sequence up to the first wrong draft.

    failures: gets the error of each sequence whose token cannot be chosen.
    skipped: ids of sequences that get none.
    """
    pick = choice.read()
    picks: dict[str, list[SampledToken]] = {}
    for i in sorted(range(len(rows)), key=[drafts for _, drafts in rows].__getitem__):
        seq, drafts = rows[i]
        chosen = picks.setdefault(seq.id, [])
        if drafts and not _is_reached(seq, drafts, chosen) or seq.id in failures or seq.id in skipped:
            continue
        try:
            chosen.append(pick(i))
        except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
            failures[seq.id] = error
    return picks


def _is_reached(seq: Sequence, drafts: int, chosen: list[SampledToken]) -> bool:
    """Whether the tokens that were chosen so far are the first `drafts` drafts. `drafts` is at least 1."""
    return len(chosen) == drafts and chosen[-1].token == seq.drafts[drafts - 1]
