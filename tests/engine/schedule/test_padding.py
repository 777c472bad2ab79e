"""Tests of padded batches: their sizes, and the content of their buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fovea.engine.schedule.decode_batches import (
    MOST_ROWS,
    DecodeInputs,
    GroupInputs,
    GroupPadding,
    Layout,
    Padding,
    PrefixGroup,
    fill,
    first_block,
    of_group,
    padded_sizes,
    window_width,
)
from fovea.kernels.pieces import Cutting

PADDING = Padding(
    sizes=padded_sizes(8), axes=3, groups=(GroupPadding(3, 50),), shared_rows=4, least_rows=4, block_size=4
)


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
    alone = replace(PADDING, sizes=(1, 2, 4), axes=0, shared_rows=0)
    assert alone.batches() == [(4, False), (2, False), (1, False)]
    pairs = replace(PADDING, least_rows=2)
    assert [key for key in pairs.batches() if key[1]] == [(8, True), (4, True), (2, True)]
    assert pairs.layout(8, shared=True).shapes["members.0"] == (4, 4)
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
    layout = PADDING.layout(4, shared=True)
    arrays = layout.arrays(np.zeros(layout.total, dtype=np.int64))
    for count in (4, 2):  # a smaller step after a larger one, over the same buffer
        lengths = np.arange(5, 5 + count)
        tables = np.arange(2 * count).reshape(count, 2) + 10
        group = GroupInputs(lengths + 100, tables, lengths)
        prefixes = [PrefixGroup((0, 1), 2)] if count == 2 else []
        fill(arrays, PADDING, DecodeInputs(lengths, np.tile(lengths, (3, 1)), (group,)), prefixes)
    assert arrays["ids"].tolist() == [5, 6, 0, 0]
    assert arrays["positions"].tolist() == [[5, 6, 0, 0]] * 3
    parts = of_group(arrays, 0)
    assert parts["slots"].tolist() == [105, 106, 200, 200]
    assert parts["lengths"].tolist() == [5, 6, 1, 1]
    assert parts["tables"][:2, :2].tolist() == [[10, 11], [12, 13]]
    assert parts["tables"][2:, 0].tolist() == [50, 50]
    assert parts["starts"].tolist() == [8, 8, 0, 0]
    assert (parts["members"].tolist(), parts["prefixes"].tolist()) == ([[0, 1, -1, -1]], [8])
    fill(arrays, PADDING, DecodeInputs(lengths, np.tile(lengths, (3, 1)), (group,)))
    assert (parts["members"].tolist(), parts["prefixes"].tolist()) == ([[-1] * 4], [0])
    assert not parts["starts"].any()


def test_layers_with_a_window_have_tables_and_first_tokens_of_their_own() -> None:
    """The window's table begins at the first block that the row sees. Contexts are cut from there on."""
    windowed = GroupPadding(window_width(6, 4), 7, windowed=True, cutting=Cutting(tile=2, least=2, most=4))
    padding = replace(PADDING, sizes=(2,), axes=0, groups=(GroupPadding(30, 50), windowed))
    layout = padding.layout(2, shared=False)
    arrays = layout.arrays(np.zeros(layout.total, dtype=np.int64))
    one = np.ones(1, dtype=np.int64)
    whole = GroupInputs(one * 9, np.zeros((1, 23), dtype=np.int64), one * 90)
    part = GroupInputs(one * 13, np.array([[2, 3, 4]]), one * 10, one * 4)
    fill(arrays, padding, DecodeInputs(one, one, (whole, part)))
    parts = of_group(arrays, 1)
    assert "firsts" not in of_group(arrays, 0)
    assert (parts["slots"].tolist(), parts["lengths"].tolist()) == ([13, 28], [10, 1])
    assert parts["firsts"].tolist() == [4, 0]
    assert parts["tables"][:, :3].tolist() == [[2, 3, 4], [7, 0, 0]]
    assert parts["counts"].tolist() == [3, 0]
    assert parts["bounds"].tolist() == [0, 3, 3], "the row that is padding has no pieces"
    assert parts["own"][:3].tolist() == [[0, 4, 6, 0], [0, 6, 8, 1], [0, 8, 10, 2]]


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 1024])
def test_a_windows_table_has_room_wherever_the_row_stands(window: int, size: int) -> None:
    places = np.arange(5 * window + 300)
    begins = first_block(places, window, size)
    assert (begins * size <= np.maximum(0, places - window + 1)).all()
    assert (places // size - begins + 1).max() <= window_width(window, size)


def test_a_layout_counts_its_numbers() -> None:
    assert Layout({"a": (2, 3), "b": (4,)}).total == 10
