"""A suffix cache: earlier answers of the same client, found by the latest tokens of question and answer.

Method: like SuffixDecoding (arXiv 2411.04975), with the chains of `texts` in place of a suffix tree.

Answers are kept by client and cache salt. So no client gets drafts from another client's answers, and none
can measure by the speed of its own answers which ones others got.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq

from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.drafter import prompt_tail
from fovea.engine.speculate.texts import LONGEST, NOTHING, Continuation, Texts

SHARE = 4
"""The texts of one key may fill one part in so many of the store."""
MOST_KEPT = 4096
"""Tokens of an answer that are kept. All answers wait while they are added: 2 milliseconds."""


class AnswerStore:
    """Texts by key, within a limit of bytes. The texts whose key was used least recently leave first.

    nbytes: estimated bytes of all texts.
    """

    def __init__(self, most_bytes: int) -> None:
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._texts: OrderedDict[Hashable, Texts] = OrderedDict()

    def add(self, key: Hashable, tokens: Seq[int]) -> None:
        """Add a text to those of a key."""
        if not self._most_bytes:
            return
        texts = self._texts.get(key)
        if texts is None:
            texts = self._texts[key] = Texts(self._most_bytes // SHARE)
        else:
            self.nbytes -= texts.nbytes
        texts.add(tokens)
        self.nbytes += texts.nbytes
        self._texts.move_to_end(key)
        while self.nbytes > self._most_bytes:
            _, oldest = self._texts.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def follow(self, keys: Iterable[Hashable], context: Seq[int], most: int) -> Continuation:
        """Return what follows a context in the texts of the first key that has a match."""
        for key in keys:
            texts = self._texts.get(key)
            found = NOTHING if texts is None else texts.follow(context, most)
            if found.tokens:
                self._texts.move_to_end(key)
                return found
        return NOTHING

    def clear(self) -> None:
        self._texts.clear()
        self.nbytes = 0


def latest(tail: Seq[int], answer: Seq[int]) -> Seq[int]:
    """Return the last tokens of a prompt and its answer, as many as a search compares."""
    missing = LONGEST - len(answer)
    return answer[-LONGEST:] if missing <= 0 else [*tail[-missing:], *answer]


class EarlierAnswers:
    """Drafts from earlier answers of the same client with the same salt."""

    name = "answers"

    def __init__(self, store: AnswerStore) -> None:
        self._store = store
        self._tails: dict[str, list[int]] = {}

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        self._tails[seq.id] = prompt_tail(seq)

    def draft(self, seq: Sequence, answer: Seq[int], most: int) -> Continuation:
        return self._store.follow((self._key(seq),), latest(self._tails[seq.id], answer), most)

    def remove(self, seq: Sequence) -> None:
        tail = self._tails.pop(seq.id, None)
        if tail is not None and seq.output_ids and seq.finish_reason != "error":
            self._store.add(self._key(seq), tail + seq.output_ids[:MOST_KEPT])

    def clear(self) -> None:
        self._store.clear()

    def _key(self, seq: Sequence) -> Hashable:
        return seq.client, seq.salt
