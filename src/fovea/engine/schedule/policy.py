"""Scheduling policies: the order in which waiting sequences are admitted, and rules that keep it fair.

A policy distinguishes two kinds of sequences. A *ready* one needs no encoder: it is text, or its first
image is already encoded. The others wait for an image. A policy cannot starve a sequence: the scheduler
counts how often a sequence is passed by a later one, and beyond a bound it admits no later one before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from fovea.core.types import Client
from fovea.engine.sequence import Sequence

SHORT = 4
"""A prompt is short beside one of this many times its length."""
Ready = Callable[[Sequence], bool]
LONG_QUEUE = 16
"""Sequences that wait for images from which on ready sequences take turns, see `Dual`."""


class Policy(Protocol):
    """An order over waiting sequences.

    strict: a sequence that cannot join yet, because its image is not encoded, holds back all sequences after
        it.
    fair: clients take turns, and prompts that are short beside the longest one get a share of each step.
    """

    strict: bool
    fair: bool

    def order(self, waiting: Seq[Sequence], ready: Ready) -> Seq[Sequence]:
        """Return the waiting sequences in the order in which they are tried; each exactly once.

        Called once per step.
        waiting: sequences in order of arrival.
        ready: tells whether a sequence needs no encoder.
        """
        ...


class FirstCome:
    """First come, first served: strictly in order of arrival, as in engines for text."""

    strict = True
    fair = False

    def order(self, waiting: Seq[Sequence], ready: Ready) -> Seq[Sequence]:
        return waiting


class Dual:
    """Two queues, each in order of arrival: ready sequences, and those whose image must be encoded.

    So text, follow-ups and known images do not wait behind new images. Ready sequences go first, in order of
    arrival. When more than LONG_QUEUE sequences wait for images and at most as many are ready, the ready
    sequences with images and those without take turns. (The images of the second queue are encoded while the
    first queue computes, so the second place costs little.)
    """

    strict = False
    fair = True

    def order(self, waiting: Seq[Sequence], ready: Ready) -> Seq[Sequence]:
        first = [seq for seq in waiting if ready(seq)]
        second = [seq for seq in waiting if not ready(seq)]
        if len(second) > LONG_QUEUE >= len(first):
            with_image = [seq for seq in first if seq.spans]
            text = [seq for seq in first if not seq.spans]
            first = _alternate(with_image, text)
        return [*first, *second]


class Priority:
    """Smaller numbers of `priority` first; within one priority, the order of `Dual`."""

    strict = False
    fair = False

    def __init__(self) -> None:
        self._dual = Dual()

    def order(self, waiting: Seq[Sequence], ready: Ready) -> Seq[Sequence]:
        return sorted(self._dual.order(waiting, ready), key=lambda seq: seq.priority)


class Detail:
    """Ready sequences first, and among them those with fewer visual tokens, in groups of similar cost.

    So the chunks of one step have similar sizes.
    edges: bounds between the groups, in visual tokens.
    """

    strict = False
    fair = True
    edges = (0, 64, 256, 1024)

    def order(self, waiting: Seq[Sequence], ready: Ready) -> Seq[Sequence]:
        def cluster(seq: Sequence) -> tuple[bool, int]:
            tokens = sum(span.rows for span in seq.spans)
            return not ready(seq), sum(tokens > edge for edge in self.edges)

        return sorted(waiting, key=cluster)


POLICIES: dict[str, Callable[[], Policy]] = {
    "dual": Dual,
    "fcfs": FirstCome,
    "priority": Priority,
    "detail": Detail,
}


def _alternate(one: list[Sequence], other: list[Sequence]) -> list[Sequence]:
    paired = [seq for pair in zip(one, other, strict=False) for seq in pair]
    rest = one[len(other) :] or other[len(one) :]
    return [*paired, *rest]


class FairOrder:
    """The order in which sequences of different API keys, and of clients of one key, join a step.

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
        """Yield the sequences in fair order; those of one client stay in their order.

        Charges made between two yields change the order at once.
        """
        keys: dict[tuple[str, ...], dict[Client, deque[Sequence]]] = {}
        for seq in sequences:
            keys.setdefault(seq.client[:1], {}).setdefault(seq.client, deque()).append(seq)
        taken: Counter[tuple[str, ...]] = Counter()

        def charged(party: tuple[str, ...]) -> tuple[int, int]:
            return self._charged[party], taken[party]

        while keys:
            key = min(keys, key=charged)
            client = min(keys[key], key=charged)
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
