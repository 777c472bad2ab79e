"""Prompt lookup: an answer often repeats a part of its prompt, or of itself.

Method: Prompt Lookup Decoding (Saxena, 2023), with the chains of `texts` in place of a search of the prompt.
The tokens of images are not text, so no match contains or crosses them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.drafter import without_images
from fovea.engine.speculate.texts import Continuation, Texts

MOST_READ = 1 << 15
"""Tokens at the end of a prompt that are searched. All answers wait while they are read: 15 milliseconds."""
MOST_BYTES = 1 << 24
"""Memory for the text of one sequence; of a longer one, only the latest part is searched."""


@dataclass(slots=True)
class _Reading:
    """The text of one sequence.

    read: tokens of the answer that are in it. They may be more than the answer has: when a token is late,
        those after it are computed again.
    """

    texts: Texts = field(default_factory=lambda: Texts(MOST_BYTES))
    read: int = -1


class PromptLookup:
    """Drafts from a sequence's own prompt and answer."""

    name = "prompt"

    def __init__(self) -> None:
        self._readings: dict[str, _Reading] = {}

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        self._readings[seq.id] = _Reading()

    def draft(self, seq: Sequence, answer: Seq[int], most: int) -> Continuation:
        reading = self._readings[seq.id]
        if reading.read < 0:
            reading.texts.extend(without_images(seq)[-MOST_READ:])
            reading.read = 0
        # The newest token is read last: its own place would be the nearest match of every search.
        found = reading.texts.follow(answer, most)
        reading.texts.extend(answer[reading.read :])
        reading.read = max(reading.read, len(answer))
        return found

    def remove(self, seq: Sequence) -> None:
        self._readings.pop(seq.id, None)

    def clear(self) -> None:
        """Nothing of a sequence outlives it."""
