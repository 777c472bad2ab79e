"""Contexts are cut into pieces that cover them, in the same way whichever rows are in the batch."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea.kernels.pieces import Cut, Cutting, cut
from tests.support.thorough import examples

RULE = Cutting(tile=64, least=256, most=64)
ROWS = st.lists(
    st.integers(1, 40_000).flatmap(lambda length: st.tuples(st.integers(0, length - 1), st.just(length))),
    min_size=1,
    max_size=40,
)


def cut_rows(rows: list[tuple[int, int]], room: int | None = None) -> Cut:
    starts, lengths = np.array(rows).T
    return cut(RULE, starts, lengths, RULE.room(len(rows), 40_000) if room is None else room)


def covered(found: Cut, starts: list[int], lengths: list[int]) -> None:
    """The pieces of each row follow one another from its start to its length, and so do their results."""
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        pieces = found.own[found.own[:, 0] == row]
        pieces = pieces[np.argsort(pieces[:, 1])]
        assert pieces[0, 1] == start
        assert pieces[-1, 2] == length
        assert (pieces[1:, 1] == pieces[:-1, 2]).all()
        assert (pieces[:, 1] < pieces[:, 2]).all()
        assert pieces[:, 3].tolist() == list(range(found.bounds[row], found.bounds[row] + len(pieces)))


@settings(max_examples=examples(60))
@given(ROWS)
def test_pieces_cover_what_each_row_reads(rows: list[tuple[int, int]]) -> None:
    found = cut_rows(rows)
    covered(found, *zip(*rows, strict=True))  # type: ignore[arg-type]
    sizes = found.own[:, 2] - found.own[:, 1]
    assert sizes[0] == sizes.max(), "the longest pieces come first"
    assert found.results == len(found.own)
    for row, (start, length) in enumerate(rows):
        count = int(np.diff(found.bounds)[row])
        assert count <= min(RULE.most, -(-(length - start) // RULE.least))
        alone = cut_rows([(start, length)]).own[:, 1:3].tolist()
        assert found.own[found.own[:, 0] == row][:, 1:3].tolist() == alone


@settings(max_examples=examples(30))
@given(ROWS)
def test_pieces_become_longer_where_room_is_short(rows: list[tuple[int, int]]) -> None:
    room = 2 * len(rows)
    found = cut_rows(rows, room)
    assert found.results <= room
    covered(found, *zip(*rows, strict=True))  # type: ignore[arg-type]


def test_results_of_a_shared_prefix_come_after_those_of_the_row_itself() -> None:
    """Rows 0 and 2 share 600 tokens, which are cut like a context. The second group is padding."""
    starts, lengths = np.array([600, 0, 600]), np.array([601, 300, 1000])
    members, prefixes = np.array([[0, 2, -1], [-1, -1, -1]]), np.array([600, 0])
    found = cut(RULE, starts, lengths, 64, members, prefixes)
    covered(found, starts.tolist(), lengths.tolist())
    assert found.bounds.tolist() == [0, 4, 6, 11]
    assert sorted(found.together.tolist()) == [[0, 0, 256, -3], [0, 256, 512, -2], [0, 512, 600, -1]]
    ends = found.bounds[1:]
    places = [{int(ends[row] + back) for back in found.together[:, 3]} for row in (0, 2)]
    assert places == [{1, 2, 3}, {8, 9, 10}]


def test_arrays_of_a_batch_keep_nothing_of_the_step_before() -> None:
    shapes = RULE.shapes(4, 4_096, 1, 2)
    assert shapes == {"counts": (2,), "bounds": (5,), "own": (64, 4), "together": (16, 4)}
    arrays = {name: np.full(shape, 7) for name, shape in shapes.items()}
    cut_rows([(0, 300), (0, 10)]).write(arrays)
    assert arrays["counts"].tolist() == [3, 0]
    assert arrays["bounds"].tolist() == [0, 2, 3, 3, 3], "rows that are padding have no results"


@pytest.mark.parametrize(("longest", "most"), [(1, 1), (256, 1), (257, 2), (1024, 4), (10**6, 64)])
def test_room_follows_from_the_longest_context(longest: int, most: int) -> None:
    assert RULE.room(8, longest) == 8 * most
    assert RULE.room(8, longest, shared=True) == 16 * most
    assert RULE.room(5000, 10**6) == 20_000


def test_programs_have_about_equal_shares() -> None:
    """With as many splits for every row, one context of 30,000 tokens took 21 times as long as the others."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: kernels are imported for it")
    from tests.support import balance

    for name, lengths in balance.CASES.items():
        largest, busiest, busiest_of_three = balance.figures(lengths)
        print(name, *(f"{before:.2f} {after:.2f}" for before, after in (largest, busiest, busiest_of_three)))
        assert sum(balance.pieces(lengths)) == sum(balance.fixed_splits(lengths))
        assert largest[1] <= 1.4
        if len(lengths) > 1:
            assert busiest[1] <= 1.15
            assert busiest_of_three[1] < busiest_of_three[0]
