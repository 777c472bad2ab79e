"""Keeps requests from starving each other: clients take turns, and a sequence is passed a few times only."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from fovea.core.types import Client
from fovea.engine.sequence import Sequence

SHORT = 4
"""A prompt is short beside one of this many times its length."""


class Turns:
    """Turns of API keys, and of the clients of one key among its own turns.

    A key and a client are charged the tokens of each prompt that joins. Next is the key with the least
    charge, and of its clients the one with the least. One that comes back after a pause begins with the least
    charge of those who are there, so a pause earns nothing (start-time fair queueing, Goyal et al. 1996).
    """

    def __init__(self) -> None:
        self._charged: dict[tuple[str, ...], int] = {}
        self._present: Counter[tuple[str, ...]] = Counter()

    def enter(self, client: Client) -> None:
        """Count a sequence of the client."""
        for party in (client[:1], client):
            if party not in self._present:
                rivals = (
                    other for other in self._present if len(other) == len(party) and other[:-1] == party[:-1]
                )
                self._charged[party] = min((self._charged[other] for other in rivals), default=0)
            self._present[party] += 1

    def leave(self, client: Client) -> None:
        """Count a sequence of the client no longer."""
        for party in (client[:1], client):
            self._present[party] -= 1
            if not self._present[party]:
                del self._present[party], self._charged[party]

    def charge(self, client: Client, tokens: int) -> None:
        self._charged[client[:1]] += tokens
        self._charged[client] += tokens

    def order(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield the sequences in turn; those of one client stay in their order.

        Charges made between two yields change the order at once.
        """
        keys: dict[tuple[str, ...], dict[Client, deque[Sequence]]] = {}
        for seq in sequences:
            keys.setdefault(seq.client[:1], {}).setdefault(seq.client, deque()).append(seq)
        taken: Counter[tuple[str, ...]] = Counter()

        def turn(party: tuple[str, ...]) -> tuple[int, int]:
            return self._charged[party], taken[party]

        while keys:
            key = min(keys, key=turn)
            client = min(keys[key], key=turn)
            taken.update((key, client))
            yield keys[key][client].popleft()
            if not keys[key][client]:
                del keys[key][client]
            if not keys[key]:
                del keys[key]


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
