"""The protocol of a drafter that finds drafts in texts, without computing anything on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.texts import BORDER, Continuation

TAIL = 48
"""Most tokens of a prompt's end that stand before an answer: the question, and the template after it."""


class Drafter(Protocol):
    """Finds tokens that may follow an answer. For one thread.

    name: as in the setting `speculate` and in metrics.
    """

    name: str

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Begin with a sequence. It may be in this state for long, so nothing is computed yet."""
        ...

    def draft(self, seq: Sequence, answer: Seq[int], most: int) -> Continuation:
        """Return up to `most` tokens that may follow.

        answer: tokens of the answer, of which `seq` may not know the latest.
        """
        ...

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, which has ended or failed. An unknown one is ignored."""
        ...

    def clear(self) -> None:
        """Forget the texts of all earlier answers."""
        ...


def without_images(seq: Sequence) -> list[int]:
    """Return the prompt's tokens, with a border in place of each image."""
    tokens: list[int] = []
    at = 0
    for span in seq.spans:
        tokens += seq.prompt_ids[at : span.start]
        tokens.append(BORDER)
        at = span.end
    return tokens + seq.prompt_ids[at:]


def prompt_tail(seq: Sequence) -> list[int]:
    """Return the last tokens of the prompt: at most TAIL, and none before its last image."""
    begin = max(seq.spans[-1].end if seq.spans else 0, len(seq.prompt_ids) - TAIL)
    return seq.prompt_ids[begin:]
