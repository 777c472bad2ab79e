"""Tests of shared reads: which rows of a step read which blocks together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.engine.schedule.decode_batches import PrefixGroup, find_prefix_groups
from tests.support.thorough import examples

SIZE = 4


def tables(*rows: tuple[list[int], int]) -> tuple[np.ndarray, np.ndarray]:
    width = max(len(blocks) for blocks, _ in rows)
    grid = np.zeros((len(rows), width), dtype=np.int64)
    for number, (blocks, _) in enumerate(rows):
        grid[number, : len(blocks)] = blocks
    return grid, np.array([length for _, length in rows])


def groups_of(*rows: tuple[list[int], int], most: int = 16, tokens: int = 8) -> list[PrefixGroup]:
    return find_prefix_groups(*tables(*rows), SIZE, most, least_rows=2, least_tokens=tokens)


def test_rows_with_the_same_first_blocks_share_as_many_as_all_of_them_have() -> None:
    rows = [([7, 8, 9, 1], 14), ([7, 8, 9, 2], 15), ([5, 6, 4, 3], 16), ([7, 8, 11, 12], 16)]
    assert groups_of(*rows) == [PrefixGroup((0, 1, 3), 2)]


def test_two_common_prefixes_are_two_groups() -> None:
    rows = [([7, 8], 8), ([5, 6], 8), ([7, 8], 8), ([5, 6], 8)]
    assert groups_of(*rows) == [PrefixGroup((0, 2), 2), PrefixGroup((1, 3), 2)]


def test_a_block_that_is_not_full_is_never_shared() -> None:
    """Tables are padded with block 0, which belongs to another sequence."""
    assert groups_of(([7, 8], 7), ([7, 8], 7)) == []
    assert groups_of(([7, 8, 0], 11), ([7, 8, 0], 11)) == [PrefixGroup((0, 1), 2)]


def test_short_prefixes_and_single_rows_are_not_shared() -> None:
    assert groups_of(([7, 8], 8), ([5, 6], 8)) == []
    assert groups_of(([7, 8, 9], 12), ([7, 8, 9], 12), tokens=13) == []
    assert groups_of(([7, 8], 8), ([7, 8], 8), most=1) == []


def test_a_large_group_is_split_and_a_single_remaining_row_reads_alone() -> None:
    rows = [([7, 8, 9 + row], 10) for row in range(7)]
    assert [group.rows for group in groups_of(*rows, most=3)] == [(0, 1, 2), (3, 4, 5)]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "ab", "abc", "abd"]), st.integers(1, 40)),
        min_size=1,
        max_size=12,
    )
)
def test_shared_blocks_are_full_and_equal_and_no_row_is_in_two_groups(rows: list[tuple[str, int]]) -> None:
    """Each letter is a common prefix of four blocks; after the prefixes, each row has blocks of its own."""
    contexts = []
    for number, (letters, length) in enumerate(rows):
        common = [10 * (ord(letter) - 96) + block for letter in letters for block in range(4)]
        own = [1000 + 100 * number + block for block in range(10)]
        contexts.append(((common + own)[: -(-length // SIZE)], length))
    grid, lengths = tables(*contexts)
    result = find_prefix_groups(grid, lengths, SIZE, 4, least_rows=2, least_tokens=8)
    assert len(result) <= len(rows) // 2
    members = [row for group in result for row in group.rows]
    assert len(members) == len(set(members))
    for group in result:
        assert 2 <= len(group.rows) <= 4
        assert all(group.blocks * SIZE <= lengths[row] for row in group.rows)
        assert len({tuple(grid[row, : group.blocks]) for row in group.rows}) == 1
