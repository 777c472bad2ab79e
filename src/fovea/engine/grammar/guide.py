"""Follows answers through their grammars: which tokens may come next, and which must."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fovea.core.errors import InvalidRequest
from fovea.core.hardware import usable_cores
from fovea.engine.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from fovea.engine.grammar.compiler import Grammar

WORD = 32
"""Tokens per number of a mask."""


class Guide:
    """The place of one answer in its grammar.

    on_failure: called if the library gives up; what it has learnt for the grammar is unusable then.
    after: tokens that end the model's reasoning. The grammar begins behind them; (): with the answer.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        on_failure: Callable[[], None] = lambda: None,
        after: tuple[int, ...] = (),
    ) -> None:
        self.matcher = matcher
        self._on_failure = on_failure
        self._after = after
        self._begin = None if after else 0
        self._read = 0

    @property
    def waits(self) -> bool:
        """Whether the model is still reasoning. Every token is allowed until then."""
        return self._begin is None

    def fill_first_mask(self) -> None:
        """Compute the mask of the answer's first token, and drop it. Raises InvalidRequest as `read`."""
        self.matcher.compute_bitmask()
        self.check()

    def read(self, answer: Seq[int]) -> None:
        """Go to the end of an answer. It may be shorter than before: a step that failed is tried again.

        Raises InvalidRequest if the grammar became too complex, or does not allow the answer.
        """
        if self._after and (self._begin is None or len(answer) < self._begin):
            self._begin = _end_of(self._after, answer)
        answer = answer[len(answer) if self._begin is None else self._begin :]
        if len(answer) < self._read:
            self.matcher.rollback(self._read - len(answer))
        elif len(answer) > self._read:
            self.matcher.consume_tokens(list(answer[self._read :]))
        self._read = len(answer)
        self.check()

    def check(self) -> None:
        """Raise InvalidRequest if the library has given up."""
        if self.matcher.is_error():
            self._on_failure()
            raise InvalidRequest(
                f"the answer's format failed at token {self._read}: {self.matcher.get_error()[:300]}",
                code="format_failed",
            )

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and the grammar allows no further token."""
        stopped: bool = not self.waits and self.matcher.is_stopped()
        return stopped

    @property
    def forced(self) -> list[int]:
        """The tokens that come next in any case, as the tokenizer would write them."""
        tokens: list[int] = [] if self.waits else self.matcher.compute_ff_tokens()
        return tokens


def _end_of(part: tuple[int, ...], tokens: Seq[int]) -> int | None:
    """The place behind the first occurrence of some tokens among others; None: there is none."""
    for end in range(len(part), len(tokens) + 1):
        if tuple(tokens[end - len(part) : end]) == part:
            return end
    return None


class Masks(NamedTuple):
    """The allowed tokens of some rows of logits.

    rows: numbers of these rows.
    bits: (len(rows), words) int32. Bit t % 32 of word t // 32 is 1 if token t is allowed.
    """

    rows: list[int]
    bits: NDArray[np.int32]

    def allows(self, index: int, token: int) -> bool:
        """Whether a token is allowed. index: place of the row in `rows`."""
        return bool(self.bits[index, token // WORD] >> token % WORD & 1)

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Return the masks as (len(rows), size) booleans. size: number of logits."""
        bits = np.unpackbits(self.bits.view(np.uint8), axis=1, count=None, bitorder="little")
        return bits[:, :size].view(np.bool_)


class Guides:
    """The guides of all answers that are being generated and have a grammar. For one thread."""

    def __init__(self) -> None:
        self._guides: dict[str, Guide] = {}
        self._executor: LLExecutor | None = None

    def add(self, name: str, grammar: Grammar, after: tuple[int, ...] = ()) -> None:
        """Start the guide of a sequence. name: its id. after: see `Guide`."""
        self._guides[name] = grammar.guide(after)

    def remove(self, name: str) -> None:
        self._guides.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._guides

    def __bool__(self) -> bool:
        return bool(self._guides)

    def masks(
        self, rows: Seq[tuple[Sequence, int]], size: int, failures: dict[str, Exception]
    ) -> Masks | None:
        """Return the masks of the rows whose sequences have a grammar; None: no row has one.

        rows: sequence, and number of its drafts before the row; in any order.
        size: number of logits.
        failures: gets the error of each sequence whose grammar fails, by sequence id; it has no mask.
        """
        places: dict[str, list[int]] = {}
        sequences: dict[str, Sequence] = {}
        for number in sorted(range(len(rows)), key=lambda number: rows[number][1]):
            seq = rows[number][0]
            if seq.id not in self._guides:
                continue
            if seq.id not in sequences:
                sequences[seq.id] = seq
                try:
                    self._guides[seq.id].read(seq.output_ids)
                except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                    failures[seq.id] = error
            if seq.id not in failures and not self._guides[seq.id].waits:
                places.setdefault(seq.id, []).append(number)
        if not places:
            return None
        order = [number for numbers in places.values() for number in numbers]
        bits = np.full((len(order), -(-size // WORD)), -1, dtype=np.int32)
        tasks, at = [], 0
        for name, numbers in places.items():
            tasks.append((self._guides[name].matcher, at, sequences[name].drafts[: len(numbers) - 1]))
            at += len(numbers)
        self._fill(tasks, bits)
        return Masks(order, bits)

    def read(self, seq: Sequence, new: Seq[int]) -> int | None:
        """Let the guide of a sequence read its answer and new tokens after it, up to the end of the answer.

        Returns the number of new tokens with which the answer is complete; None: it is not complete yet.

        Raises InvalidRequest as `Guide.read`.
        """
        guide = self._guides[seq.id]
        answer = list(seq.output_ids)
        guide.read(answer)
        for count, token in enumerate(new, 1):
            answer.append(token)
            guide.read(answer)
            if guide.ended:
                return count
        return None

    def forced(self, name: str) -> list[int]:
        """Return the tokens that come next in any case in the answer of a sequence. name: its id."""
        return self._guides[name].forced

    def _fill(self, tasks: list[tuple[LLMatcher, int, list[int]]], bits: NDArray[np.int32]) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import (
            fill_next_token_bitmask_par,
            fill_next_token_bitmask_par_with_draft_tokens,
        )

        if self._executor is None:
            self._executor = LLExecutor(len(usable_cores()))
        single = [(matcher, row) for matcher, row, drafts in tasks if not drafts]
        several = [task for task in tasks if task[2]]
        if single:
            fill_next_token_bitmask_par(self._executor, single, bits)
        if several:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, several, bits)
