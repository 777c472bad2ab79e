"""Drafts from a text that the answer is likely to contain.

It is the request's `prediction`, as in OpenAI's API: the text of a document from an OCR program, or a file
of which the answer changes a few lines. Or it is an earlier answer to the same client about the same image.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.answers import MOST_KEPT, AnswerStore, latest
from fovea.engine.speculate.drafter import prompt_tail
from fovea.engine.speculate.texts import LONGEST, Continuation, Texts

MOST_READ = 1 << 16
"""Tokens of a prediction that are searched where an answer deviates. All answers wait while it is read."""
MOST_IMAGES = 4
"""Images at the end of a prompt for which its answer is kept."""
MOST_BYTES = 1 << 24
"""Memory for the prediction of one request."""


class Hints:
    """Drafts from a request's prediction, or from answers about one of its images."""

    name = "hints"

    def __init__(self, store: AnswerStore) -> None:
        """store: answers by client, salt and image."""
        self._store = store
        self._predictions: dict[str, tuple[int, ...]] = {}
        self._texts: dict[str, Texts] = {}
        self._tails: dict[str, list[int]] = {}

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        if inputs.prediction:
            self._predictions[seq.id] = inputs.prediction
        if seq.spans:
            self._tails[seq.id] = prompt_tail(seq)

    def draft(self, seq: Sequence, answer: Seq[int], most: int) -> Continuation:
        found = self._predicted(seq.id, answer, most)
        if found is not None and found.tokens:
            return found
        tail = self._tails.get(seq.id, ())
        return self._store.follow(self._keys(seq), latest(tail, answer), most)

    def _predicted(self, name: str, answer: Seq[int], most: int) -> Continuation | None:
        prediction, count = self._predictions.get(name), len(answer)
        if prediction is None:
            return None
        if prediction[:count] == tuple(answer):
            tokens = list(prediction[count : count + most])
            return Continuation(tokens, [1.0] * len(tokens), LONGEST)
        if name not in self._texts:
            self._texts[name] = Texts(MOST_BYTES)
            self._texts[name].add(prediction[:MOST_READ])
        return self._texts[name].follow(answer, most)

    def remove(self, seq: Sequence) -> None:
        self._predictions.pop(seq.id, None)
        self._texts.pop(seq.id, None)
        tail = self._tails.pop(seq.id, None)
        if tail is not None and seq.output_ids and seq.finish_reason != "error":
            for key in self._keys(seq):
                self._store.add(key, tail + seq.output_ids[: MOST_KEPT // MOST_IMAGES])

    def clear(self) -> None:
        self._store.clear()

    def _keys(self, seq: Sequence) -> list[tuple[object, str, str]]:
        """The images, the latest first: most questions are about it."""
        images = dict.fromkeys(span.key for span in reversed(seq.spans[-MOST_IMAGES:]))
        return [(seq.client, seq.salt, key) for key in images]
