"""Blocks move between pool and host memory: by streams as one after the other, whatever runs first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fovea.engine.execute import block_moves
from fovea.engine.execute.block_moves import BlockMoves, batches
from fovea.engine.kv.manager import Move
from fovea.kernels.pages import INT8, KVFormat, KVPool
from tests.support.late_streams import LateStream, LateStreams
from tests.support.thorough import examples

LAYERS, BLOCKS, SIZE, SLOTS = 3, 6, 4, 4


def pool(seed: int, format: KVFormat | None = None, blocks: int = BLOCKS) -> KVPool:
    """Pages of two heads of two numbers, filled at random."""
    made = KVPool((LAYERS, blocks, SIZE), 2, 2, torch.float32, format)
    made.pages.random_(generator=torch.Generator().manual_seed(seed))
    return made


KINDS = ("save", "load", "copy")
MOVES = st.builds(
    lambda kind, block, slot, rows: Move(
        kind,
        slot if kind == "load" else block,
        slot if kind == "save" else (block if kind == "load" else (block + slot) % BLOCKS),
        SIZE if kind == "save" else rows,
    ),
    st.sampled_from(KINDS),
    st.integers(0, BLOCKS - 1),
    st.integers(0, SLOTS - 1),
    st.integers(1, SIZE),
)


@settings(max_examples=examples(120), deadline=None)
@given(
    steps=st.lists(st.lists(MOVES, max_size=7), min_size=1, max_size=5),
    staged=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
    format=st.sampled_from([None, INT8]),
)
def test_moves_by_streams_equal_moves_one_after_the_other(
    steps: list[list[Move]], staged: int, seed: int, format: KVFormat | None
) -> None:
    """Each step overwrites blocks after its moves, as a step of the engine does.

    staged: blocks of a staging buffer. seed: chooses what runs first.
    """
    expected, found = run(steps, staged, seed, format=format)
    assert torch.equal(found, expected)


def run(
    steps: Sequence[Sequence[Move]],
    staged: int,
    seed: int,
    make: Callable[[Callable[[int], int]], LateStreams] = LateStreams,
    format: KVFormat | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the contents of pool and host memory after plain moves, and after moves by streams."""
    rng = random.Random(seed)
    kv, other = pool(1, format), pool(1, format)
    plain = BlockMoves((kv,), SLOTS)
    streams = make(rng.randrange)
    with mock.patch.object(block_moves, "STAGING_BYTES", staged * kv.block_bytes):
        fast = BlockMoves((other,), SLOTS, streams)
    assert plain.host is not None
    assert fast.host is not None
    for host in (plain.host, fast.host):
        host.zero_()
    for number, moves in enumerate(steps):
        block = rng.randrange(BLOCKS)
        plain.run(moves)
        kv.pages[:, block] = number
        with streams:
            fast.run(moves)
            other.pages[:, block].fill_(number)
        streams.run(rng.randrange(12))
    streams.run()
    pairs = (kv, plain.host), (other, fast.host)
    first, second = (torch.cat((own.pages.flatten(), host.flatten())) for own, host in pairs)
    return first, second


SAVES = [Move("save", block, block, SIZE) for block in range(4)]
LOADS = [Move("load", slot, slot + 2, SIZE) for slot in range(4)]
AGAIN = [Move("save", block + 2, block, SIZE) for block in range(4)]


class Careless(LateStreams):
    """Streams one of which waits for nothing.

    number: the compute stream is 0, that of saves 1, that of loads 2.
    """

    def __init__(self, number: int, choose: Callable[[int], int]) -> None:
        self._number = number
        super().__init__(choose)

    def new(self) -> LateStream:
        stream = super().new()
        if len(self._streams) == self._number + 1:
            stream.wait_event = lambda event: None  # type: ignore[method-assign]
        return stream


@pytest.mark.parametrize("careless", range(3))
def test_without_its_events_a_stream_makes_mistakes(careless: int) -> None:
    """So the stand-in finds a forgotten event."""

    def wrong(number: int) -> int:
        pairs = (run(steps, 2, seed, partial(Careless, number)) for seed in range(60))
        return sum(not torch.equal(*pair) for pair in pairs)

    steps = [SAVES, LOADS, AGAIN, LOADS]
    assert wrong(99) == 0
    assert wrong(careless) > 0


def test_a_step_copies_neighbouring_slots_at_once() -> None:
    """Sixteen blocks took sixteen copies of strided memory. Now one operation gathers, and one copies."""
    kv = pool(0, blocks=32)
    streams = LateStreams(lambda count: 0)
    moves = BlockMoves((kv,), 32, streams)
    with streams:
        moves.run([Move("save", block, 31 - block, SIZE) for block in range(16)])
    calls = sum(len(stream.work) for stream in streams._streams)
    assert calls == 5, "gather, mark, wait, copy, mark"
    streams.run()
    with streams:
        moves.run([Move("load", 31 - block, block + 16, SIZE) for block in range(16)])
    assert sum(len(stream.work) for stream in streams._streams) == 5, "copy, mark, wait, scatter, mark"


def test_moves_stay_in_one_batch_unless_their_order_matters() -> None:
    save, load, copy = Move("save", 0, 0, SIZE), Move("load", 0, 1, SIZE), Move("copy", 2, 3, 2)
    assert len(list(batches([save, load, copy]))) == 1
    assert len(list(batches([load, save]))) == 2, "the slot is loaded before it gets other contents"
    assert len(list(batches([copy, Move("save", 3, 1, SIZE)]))) == 2, "the copy is saved"
    assert len(list(batches([load, Move("copy", 1, 4, 2)]))) == 2, "the loaded rows are copied"


@pytest.mark.parametrize("format", [None, INT8], ids=["float32", "int8"])
def test_a_part_of_a_block_brings_its_numbers_and_their_scales(format: KVFormat | None) -> None:
    """The tokens after the part stay as they were."""
    kv = pool(3, format)
    before = [part.clone() for part in kv.parts(kv.pages)]
    moves = BlockMoves((kv,), 2)
    moves.run([Move("copy", 0, 1, 3), Move("save", 2, 1, SIZE), Move("load", 1, 4, 2)])
    for part, old in zip(kv.parts(kv.pages), before, strict=True):
        for target, source, rows in ((1, 0, 3), (4, 2, 2)):
            assert same(part[:, target, :rows], old[:, source, :rows])
            assert same(part[:, target, rows:], old[:, target, rows:])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are equal, those of numbers that are NaN included."""
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))
