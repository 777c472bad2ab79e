"""Which peer gets a piece of work, and how long one that failed rests."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fovea.engine.peers.choose import BALANCE, FIRST_REST_S, LONGEST_REST_S, Peer, PeerTable

URLS = ("http://a:1", "http://b:1", "http://c:1")
WORK = st.tuples(st.sampled_from(["x", "y", "z", "\ud800"]), st.integers(1, 10_000))


@given(st.lists(st.tuples(WORK, st.sampled_from(["start", "done", "fail"]), st.floats(0, 40)), max_size=60))
def test_work_is_counted_until_it_ends(steps: list[tuple[tuple[str, int], str, float]]) -> None:
    table, now = PeerTable(URLS), 0.0
    running: list[tuple[Peer, int]] = []
    for (key, tokens), what, seconds in steps:
        now += seconds
        if what == "start":
            resting = [peer for peer in table.peers if peer.rests_until > now]
            peer = table.choose(key, tokens, now)
            assert peer not in resting
            if peer is None:
                assert table.awake(now) == 0 or any(each.failures for each in table.peers)
            else:
                running.append((peer, tokens))
        elif running:
            peer, tokens = running.pop(len(running) // 2)
            table.end(peer, tokens, now, failed=what == "fail")
            assert (peer.rests_until > now) == (what == "fail")
            assert peer.rests_until - now <= LONGEST_REST_S
        for peer in table.peers:
            assert peer.pending == sum(tokens for each, tokens in running if each is peer)
        assert table.awake(now) == sum(peer.rests_until <= now for peer in table.peers)
    for peer, tokens in running:
        table.end(peer, tokens, now, failed=False)
    assert not any(peer.pending for peer in table.peers)


@given(st.lists(WORK, min_size=1, max_size=40))
def test_no_peer_has_far_more_than_the_others(works: list[tuple[str, int]]) -> None:
    table = PeerTable(URLS)
    for key, tokens in works:
        before = [peer.pending for peer in table.peers]
        chosen = table.choose(key, tokens, 0.0)
        assert chosen is not None
        most = BALANCE * (sum(before) + tokens) / len(URLS)
        assert chosen.pending <= most or chosen.pending - tokens == min(before)


def test_equal_work_goes_to_the_peer_that_knows_it_and_different_work_to_all() -> None:
    table, chosen = PeerTable(URLS), Counter[str]()
    for number in range(300):
        urls = set()
        for _ in range(3):
            peer = table.choose(str(number), 10, 0.0)
            assert peer is not None
            table.end(peer, 10, 0.0, failed=False)
            urls.add(peer.url)
        (url,) = urls
        chosen[url] += 1
    assert min(chosen[url] for url in URLS) > 60


def test_without_a_peer_only_its_own_work_moves() -> None:
    """And the order of the addresses does not matter: two engines with the same peers agree."""

    def spread(*urls: str) -> dict[str, str]:
        """The peer of each piece of work, while none is too large for any peer."""
        found = {}
        for number in range(100):
            table = PeerTable(urls)
            for each in table.peers:
                each.pending = 1000
            peer = table.choose(str(number), 1, 0.0)
            assert peer is not None
            found[str(number)] = peer.url
        return found

    assert spread(*URLS) == spread(*reversed(URLS))
    fewer = spread(*URLS[:2])
    assert all(fewer[key] == url for key, url in spread(*URLS).items() if url in URLS[:2])


def test_a_peer_that_fails_again_and_again_rests_twice_as_long_each_time() -> None:
    table, now, rests = PeerTable(URLS[:1]), 100.0, []
    for _ in range(8):
        peer = table.choose("x", 1, now)
        assert peer is not None
        table.end(peer, 1, now, failed=True)
        rests.append(peer.rests_until - now)
        assert table.choose("x", 1, now + rests[-1] - 0.01) is None
        now = peer.rests_until
    assert rests == [min(LONGEST_REST_S, FIRST_REST_S * 2**number) for number in range(8)]
    peer = table.choose("x", 1, now)
    assert peer is not None
    table.end(peer, 1, now, failed=False)
    assert (peer.failures, peer.rests_until) == (0, 0.0)


def test_work_that_fails_together_is_one_failure() -> None:
    table = PeerTable(URLS[:1])
    peers = [table.choose("x", 1, 0.0) for _ in range(5)]
    for peer in peers:
        assert peer is not None
        table.end(peer, 1, 0.0, failed=True)
    assert table.peers[0].failures == 1
    assert table.peers[0].rests_until == FIRST_REST_S


def test_a_peer_that_has_failed_gets_one_piece_of_work_first() -> None:
    """If it hangs, one request waits for it, and not all that arrive meanwhile."""
    table = PeerTable(URLS[:1])
    peer = table.choose("x", 5, 0.0)
    assert peer is not None
    table.end(peer, 5, 0.0, failed=True)
    later = FIRST_REST_S
    assert table.choose("x", 5, later) is peer
    assert table.choose("y", 5, later) is None
    table.end(peer, 5, later, failed=False)
    assert table.choose("x", 5, later) is peer
    assert table.choose("y", 5, later) is peer


def test_others_take_the_work_of_a_peer_that_rests_and_without_any_there_is_none() -> None:
    table = PeerTable(URLS)
    for left in (2, 1, 0):
        peer = table.choose("x", 5, 0.0)
        assert peer is not None
        table.end(peer, 5, 0.0, failed=True)
        assert table.awake(0.0) == left
    assert table.choose("x", 5, 0.0) is None
    assert PeerTable(()).choose("x", 5, 0.0) is None
