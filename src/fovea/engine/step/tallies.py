"""The histograms of steps and encoded images, by the names of `observe.table`."""

from __future__ import annotations

from fovea.core.measure import Tally
from fovea.engine.step.executor import StepResult
from fovea.observe.table import DISTRIBUTIONS


class StepTallies:
    """Counts steps by size, and encoded images by the time that they took."""

    def __init__(self) -> None:
        self._tallies = {name: Tally(name, row.buckets) for name, row in DISTRIBUTIONS.items()}

    def add(self, tokens: int, sequences: int, result: StepResult) -> None:
        """Count one step.

        tokens: computed tokens. A step that only encoded has none, and is not counted as a step of tokens.
        sequences: sequences for which they were computed.
        """
        if tokens:
            self._tallies["step_tokens"].add(tokens)
            self._tallies["step_sequences"].add(sequences)
        for seconds in result.encoded.values():
            self._tallies["image_encode_seconds"].add(seconds)
        for seconds in result.projected.values():
            self._tallies["image_project_seconds"].add(seconds)

    def stats(self) -> dict[str, float]:
        """Return the figures of all histograms by the names of `core.tally`."""
        return {key: value for tally in self._tallies.values() for key, value in tally.stats().items()}
