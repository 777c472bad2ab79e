"""Finds what followed an answer's latest tokens where they occurred before, in texts that are kept.

The places at which a pair of tokens ends are a chain: each place knows the one before it, and a table knows
the latest one. zlib finds repeated strings in this way (RFC 1951, section 4). A new token costs one entry,
whatever the length of the text, and a search looks at the latest CANDIDATES places only.

At each place the tokens before the pair are compared, too. Places with longer matches weigh more. The drafts
are the tokens by which most of the weight continues, as long as any place does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

CANDIDATES = 32
"""Number of latest places at which a search looks."""
LONGEST = 16
"""Longest match that is told from longer ones, in tokens."""
TOKEN_BYTES, PAIR_BYTES = 8, 120
"""Memory of a token, and of a pair of tokens that occurs for the first time (CPython)."""
BORDER = -1
"""Stands between two texts, so that no draft goes beyond the end of one."""


class Continuation(NamedTuple):
    """Tokens that may follow.

    tokens: their ids.
    shares: for each of them, the share of the weight that continues with it, of the weight before it.
    matched: number of equal tokens before them, at most LONGEST.
    """

    tokens: list[int]
    shares: list[float]
    matched: int


NOTHING = Continuation([], [], 0)


class Texts:
    """Texts of token ids. The older half is forgotten before they become larger than `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._parts = [_Part()]

    @property
    def nbytes(self) -> int:
        """Estimated memory in bytes."""
        return sum(part.nbytes for part in self._parts)

    def add(self, tokens: Seq[int]) -> None:
        """Add a text, which ends here."""
        self.extend(tokens)
        self.extend((BORDER,))

    def extend(self, tokens: Seq[int]) -> None:
        """Add tokens to the latest text."""
        for token in tokens:
            newest = self._parts[0]
            if 2 * (newest.nbytes + TOKEN_BYTES + PAIR_BYTES) > self._most_bytes:
                self._parts = [_Part(), newest]
            self._parts[0].append(token)

    def follow(self, context: Seq[int], most: int) -> Continuation:
        """Return up to `most` tokens that followed the last tokens of `context`."""
        places: list[tuple[_Part, int, float]] = []
        longest = 0
        for part in self._parts:
            for place, length in part.find(context, CANDIDATES - len(places)):
                places.append((part, place, float(1 << length)))
                longest = max(longest, length)
        return _vote(places, most, longest) if places else NOTHING


class _Part:
    """Texts one after the other.

    tokens: their ids. before: for each place the one before at which the same pair ends; -1: none.
    latest: for each pair the latest place at which it ends.
    """

    def __init__(self) -> None:
        self.tokens = array("i", [BORDER])
        self.before = array("i", [-1])
        self.latest: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        return TOKEN_BYTES * len(self.tokens) + PAIR_BYTES * len(self.latest)

    def append(self, token: int) -> None:
        previous, place = self.tokens[-1], len(self.tokens)
        self.tokens.append(token)
        if previous < 0 or token < 0:
            self.before.append(-1)
            return
        pair = previous << 32 | token
        self.before.append(self.latest.get(pair, -1))
        self.latest[pair] = place

    def find(self, context: Seq[int], most: int) -> list[tuple[int, int]]:
        """Return the latest places that follow the context's last pair, each with the length of its match."""
        found: list[tuple[int, int]] = []
        if len(context) < 2 or context[-1] < 0 or context[-2] < 0:
            return found
        place = self.latest.get(context[-2] << 32 | context[-1], -1)
        tokens, before = self.tokens, self.before
        reach = min(LONGEST, len(context))
        while place >= 0 and len(found) < most:
            length = 2
            while length < reach and tokens[place - length] == context[-1 - length]:
                length += 1
            found.append((place + 1, length))
            place = before[place]
        return found


def _vote(places: list[tuple[_Part, int, float]], most: int, longest: int) -> Continuation:
    """Return the tokens by which most of the weight continues.

    places: texts, the place of the next token in each, and the weight.
    """
    drafts: list[int] = []
    shares: list[float] = []
    while len(drafts) < most:
        weights: dict[int, float] = {}
        for part, place, weight in places:
            token = part.tokens[place] if place < len(part.tokens) else BORDER
            weights[token] = weights.get(token, 0.0) + weight
        best = max(weights, key=weights.__getitem__)
        if best == BORDER:
            break
        drafts.append(best)
        shares.append(weights[best] / sum(weights.values()))
        places = [
            (part, place + 1, weight)
            for part, place, weight in places
            if place < len(part.tokens) and part.tokens[place] == best
        ]
    return Continuation(drafts, shares, longest)
