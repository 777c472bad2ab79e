"""Finds the sequence that makes steps fail, by trying the sequences of a failed step in smaller groups.

The error of a whole step does not tell which sequence caused it. So none of them ends yet: the next steps
take only half of them, then the other half. A group that fails is halved again, and a sequence that fails
alone is to blame. Sequences in a step that succeeds are cleared. With one guilty sequence among n, this takes
about 2 * log2(n) steps, and the others lose only that time.
"""

from __future__ import annotations

from collections.abc import Collection


class Suspects:
    """The groups of sequences that are still to be tried, by their ids."""

    def __init__(self) -> None:
        self._groups: list[list[str]] = []

    @property
    def group(self) -> frozenset[str] | None:
        """Ids of the only sequences that the next step may take; None: it may take all."""
        return frozenset(self._groups[-1]) if self._groups else None

    def try_next(self, sequence_id: str) -> None:
        """Try one sequence alone in the next steps, before the groups that are waiting."""
        self._groups.append([sequence_id])

    def fail(self, involved: list[str]) -> str | None:
        """Note a failed step. Returns the id of the sequence that is to blame; None: that is not known yet.

        involved: ids of the step's sequences, the least suspicious first; they are tried first.
        """
        if self._groups:
            self._groups.pop()
        if len(involved) < 2:
            return involved[0] if involved else None
        half = (len(involved) + 1) // 2
        self._groups += [involved[half:], involved[:half]]
        return None

    def clear(self, involved: Collection[str]) -> None:
        """Note a step that succeeded.

        A group stays until all of its sequences were in such a step. It also ends when none of its sequences
        can be in a step now, for example because they have ended or wait for memory.

        involved: ids of the step's sequences; empty for a step with nothing to compute.
        """
        if not self._groups:
            return
        rest = [name for name in self._groups.pop() if name not in involved]
        if rest and involved:
            self._groups.append(rest)
