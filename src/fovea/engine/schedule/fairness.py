"""Keeps requests from starving each other: clients take turns, and a sequence is passed a few times only."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from fovea.engine.sequence import Sequence

Client = tuple[str, str]
SHORT = 4
"""A prompt is short beside one of this many times its length."""


class Turns:
    """Clients in turn: the next prompt is one of the client that was served least.

    A client is charged the tokens of each prompt that joins. One that comes back after a pause begins with
    the least charge of those who are there, so a pause earns nothing (start-time fair queueing, Goyal et al.
    1996).
    """

    def __init__(self) -> None:
        self._charged: dict[Client, int] = {}
        self._present: Counter[Client] = Counter()

    def enter(self, client: Client) -> None:
        """Count a sequence of the client."""
        if client not in self._present:
            self._charged[client] = min(self._charged.values(), default=0)
        self._present[client] += 1

    def leave(self, client: Client) -> None:
        """Count a sequence of the client no longer."""
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client], self._charged[client]

    def charge(self, client: Client, tokens: int) -> None:
        self._charged[client] += tokens

    def order(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield the sequences so that clients take turns; those of one client stay in their order.

        Charges made between two yields change the order at once.
        """
        queues: dict[Client, deque[Sequence]] = {}
        for seq in sequences:
            queues.setdefault(seq.client, deque()).append(seq)
        taken = dict.fromkeys(queues, 0)
        while queues:
            client = min(queues, key=lambda name: (self._charged[name], taken[name]))
            taken[client] += 1
            yield queues[client].popleft()
            if not queues[client]:
                del queues[client]


def may_pass(seq: Sequence, waiting: Iterable[Sequence], most: int) -> bool:
    """Whether the sequence may join: no sequence that arrived earlier has been passed `most` times."""
    return not any(other.times_passed >= most for other in waiting if _passes(seq, other))


def count_passes(seq: Sequence, waiting: Iterable[Sequence]) -> None:
    """Note that the sequence joins before those of the waiting ones that arrived earlier."""
    for other in waiting:
        if _passes(seq, other):
            other.times_passed += 1


def _passes(seq: Sequence, other: Sequence) -> bool:
    """Whether `seq` would pass `other`, which arrived earlier.

    A sequence that only wants its images encoded takes no place in a step, so it cannot be passed.
    """
    return (other.arrival, other.id) < (seq.arrival, seq.id) and not other.encode_only
