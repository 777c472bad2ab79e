"""Tests of padded batches: their sizes, and the content of their buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fovea.engine.schedule.decode_batches import (
    MOST_ROWS,
    Layout,
    Padding,
    PrefixGroup,
    fill,
    padded_sizes,
    write_prefix_groups,
)

PADDING = Padding(sizes=padded_sizes(8), width=3, axes=3, shared_rows=4, least_rows=4, block_size=4, scrap=50)


def test_sizes_cover_the_running_sequences_up_to_the_largest_padded_batch() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(5) == (1, 2, 4, 8)
    assert padded_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert padded_sizes(65)[-1] == 96
    assert padded_sizes(4096)[-1] == MOST_ROWS


def test_a_step_gets_the_smallest_batch_that_holds_it() -> None:
    assert [PADDING.size(rows) for rows in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]
    assert PADDING.size(9) is None


def test_only_batches_with_enough_rows_have_arrays_for_prefix_groups() -> None:
    assert PADDING.batches() == [(8, False), (8, True), (4, False), (4, True), (2, False), (1, False)]
    alone = Padding(sizes=(1, 2, 4), width=3, axes=0, shared_rows=0, least_rows=4, block_size=4, scrap=50)
    assert alone.batches() == [(4, False), (2, False), (1, False)]
    pairs = replace(PADDING, least_rows=2)
    assert [key for key in pairs.batches() if key[1]] == [(8, True), (4, True), (2, True)]
    assert pairs.layout(8, shared=True).shapes["members"] == (4, 4)
    assert alone.layout(4, shared=False).shapes["positions"] == (4,)


@pytest.mark.parametrize("shared", [True, False])
def test_arrays_fill_the_buffer_and_do_not_overlap(shared: bool) -> None:
    layout = PADDING.layout(8, shared=shared)
    buffer = np.zeros(layout.total, dtype=np.int64)
    for number, array in enumerate(layout.arrays(buffer).values(), 1):
        assert not array.any()
        array[...] = number
    assert buffer.all()


def test_rows_after_the_last_sequence_use_the_scrap_block() -> None:
    arrays = PADDING.layout(4, shared=True).arrays(
        np.zeros(PADDING.layout(4, shared=True).total, dtype=np.int64)
    )
    for count in (4, 2):  # a smaller step after a larger one, over the same buffer
        lengths = np.arange(5, 5 + count)
        tables = np.arange(2 * count).reshape(count, 2) + 10
        fill(arrays, PADDING, lengths, np.tile(lengths, (3, 1)), lengths + 100, tables, lengths)
    assert arrays["ids"].tolist() == [5, 6, 0, 0]
    assert arrays["positions"].tolist() == [[5, 6, 0, 0]] * 3
    assert arrays["slots"].tolist() == [105, 106, 200, 200]
    assert arrays["lengths"].tolist() == [5, 6, 1, 1]
    assert arrays["tables"][:2, :2].tolist() == [[10, 11], [12, 13]]
    assert arrays["tables"][2:, 0].tolist() == [50, 50]
    write_prefix_groups([PrefixGroup((0, 1), 2)], 4, arrays["starts"], arrays["members"], arrays["prefixes"])
    assert arrays["starts"].tolist() == [8, 8, 0, 0]
    assert (arrays["members"].tolist(), arrays["prefixes"].tolist()) == ([[0, 1, -1, -1]], [8])
    write_prefix_groups([], 4, arrays["starts"], arrays["members"], arrays["prefixes"])
    assert (arrays["members"].tolist(), arrays["prefixes"].tolist()) == ([[-1] * 4], [0])
    assert not arrays["starts"].any()


def test_a_layout_counts_its_numbers() -> None:
    assert Layout({"a": (2, 3), "b": (4,)}).total == 10
