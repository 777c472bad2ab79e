"""Which of several peers gets a piece of work, and for how long one that failed is left alone. No clock here.

Work about the same image or the same beginning of a prompt goes to the same peer, whose caches then have it
(rendezvous hashing), unless that peer has much more to do than the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass

FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
"""Seconds for which a peer is left alone after its first failure; doubled with each further one in a row."""
BALANCE = 2.0
"""A peer is passed over if it has more than this many times the average work, the new piece included."""


@dataclass(slots=True)
class Peer:
    """One peer.

    url: its address.
    pending: tokens of the work that it has from here now.
    failures: how often it failed in a row.
    rests_until: time until which it gets no work.
    """

    url: str
    pending: int = 0
    failures: int = 0
    rests_until: float = 0.0


class PeerTable:
    """The peers of one kind. Not thread-safe.

    balance: as BALANCE.
    """

    def __init__(self, urls: Sequence[str], balance: float = BALANCE) -> None:
        self.peers = [Peer(url) for url in urls]
        self._balance = balance

    def choose(
        self, key: str, tokens: int, now: float, *, slack: int = 0, without: Container[str] = ()
    ) -> Peer | None:
        """Return the peer that gets a piece of work, and count it there; None: all of them rest.

        The arguments are those of `look`.
        """
        chosen = self.look(key, tokens, now, slack=slack, without=without)
        if chosen is not None:
            chosen.pending += tokens
        return chosen

    def look(
        self, key: str, tokens: int, now: float, *, slack: int = 0, without: Container[str] = ()
    ) -> Peer | None:
        """Return the peer that would get a piece of work now; None: all of them rest.

        A peer whose latest work failed gets one piece first: if it still fails, one request waits for it, and
        not all that arrive meanwhile.

        key: names what the work is about. tokens: its size.
        slack: tokens that a peer may have beyond its bound.
        without: addresses of peers that do not get it.
        """
        awake = [
            peer
            for peer in self.peers
            if peer.rests_until <= now and not (peer.failures and peer.pending) and peer.url not in without
        ]
        if not awake:
            return None
        most = self._balance * (sum(peer.pending for peer in awake) + tokens) / len(awake) + slack
        order = sorted(awake, key=lambda peer: _score(key, peer.url), reverse=True)
        fits = (peer for peer in order if peer.pending + tokens <= most)
        return next(fits, None) or min(order, key=lambda peer: peer.pending)

    def end(self, peer: Peer, tokens: int, now: float, *, failed: bool) -> None:
        """Count a piece of work no longer. After a failure the peer rests."""
        peer.pending -= tokens
        if not failed:
            peer.failures, peer.rests_until = 0, 0.0
        elif peer.rests_until <= now:  # several pieces of work that fail together are one failure
            rest = min(LONGEST_REST_S, FIRST_REST_S * 2 ** min(peer.failures, 16))
            peer.failures += 1
            peer.rests_until = now + rest

    def awake(self, now: float) -> int:
        """Number of peers that get work."""
        return sum(peer.rests_until <= now for peer in self.peers)


def _score(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{len(key)}:{key}{url}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
