"""The paged attention of a step in plain torch against its naive twin, sequence by sequence."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fovea.core.sampling import SamplingParams
from fovea.engine.execute.attention_plan import GroupPlanner
from fovea.engine.layers.config import KVGroup
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence
from fovea.kernels import reference
from fovea.kernels.attention import Heads, attend
from fovea.kernels.pages import store
from fovea.kernels.torch_kernels import PLAIN
from tests.support.thorough import examples

pytestmark = pytest.mark.kernels

DIM, SCALE = 8, 0.3


def planner(size: int, kv_heads: int) -> GroupPlanner:
    """Return a planner. Its plans depend only on the kernels and the numbers of heads."""
    group = KVGroup((0,), None, Heads(kv_heads, kv_heads, DIM))
    return GroupPlanner(PLAIN, group, False, size, torch.device("cpu"), torch.float32)


def works(spans: list[tuple[int, int]], size: int, seed: int) -> tuple[list[Work], int]:
    """Return the work of sequences with shuffled blocks, and the number of blocks.

    spans: (first, count) of each sequence. Sequences with one token come first, as the scheduler sorts them.
    """
    spans = sorted(spans, key=lambda span: span[1] != 1)
    needed = [-(-(first + count) // size) for first, count in spans]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    work = []
    for (first, count), blocks in zip(spans, needed, strict=True):
        seq = Sequence(f"s{len(work)}", [0] * (first + count), SamplingParams(), 1)
        seq.blocks, order = order[:blocks], order[blocks:]
        work.append(Work(seq, first, count))
    return work, sum(needed) + 3


def check(spans: list[tuple[int, int]], size: int, heads: tuple[int, int], seed: int = 0) -> None:
    query_heads, kv_heads = heads
    work, blocks = works(spans, size, seed)
    torch.manual_seed(seed)
    kv = torch.randn(blocks, size, 2, kv_heads, DIM)
    rows = sum(item.count for item in work)
    query = torch.randn(rows, query_heads, DIM)
    plan = planner(size, kv_heads).plan(work)
    store(kv, torch.randn(rows, 2, kv_heads, DIM), plan.slots)
    ours = attend(query, kv, plan, SCALE)
    row = 0
    for item in work:
        theirs = reference.paged_attention(
            query[row : row + item.count], kv, item.seq.blocks, item.start, SCALE
        )
        torch.testing.assert_close(ours[row : row + item.count], theirs, atol=1e-5, rtol=1e-5)
        row += item.count


@settings(max_examples=examples(120), deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6),
    size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    seed=st.integers(0, 5),
)
def test_any_mix_of_decodes_and_chunks(
    spans: list[tuple[int, int]], size: int, heads: tuple[int, int], seed: int
) -> None:
    check(spans, size, heads, seed)


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([(0, 1)], id="a first token alone"),
        pytest.param([(15, 1), (15, 1)], id="decodes of one length need no mask"),
        pytest.param([(3, 1), (90, 1), (40, 1)], id="decodes of different lengths"),
        pytest.param([(0, 33)], id="a whole prompt"),
        pytest.param([(17, 16)], id="a chunk at an offset inside a block"),
        pytest.param([(5, 1), (0, 9), (31, 2)], id="decodes beside chunks"),
    ],
)
def test_typical_shapes_of_a_step(spans: list[tuple[int, int]]) -> None:
    check(spans, 16, (4, 2))


def test_slots_behind_the_end_of_a_sequence_are_not_read() -> None:
    """Blocks are reused without being cleared, so the rest of a last block holds another sequence's keys."""
    work, blocks = works([(4, 1), (20, 1), (2, 3)], 16, 1)
    kv = torch.randn(blocks, 16, 2, 2, DIM)
    query = torch.randn(5, 4, DIM)
    plan = planner(16, 2).plan(work)
    before = attend(query, kv, plan, SCALE)
    for item in work:
        kv[item.seq.blocks[-1], item.stop % 16 :] = 1e4
    torch.testing.assert_close(attend(query, kv, plan, SCALE), before)


def test_rows_are_stored_in_their_slots() -> None:
    kv = torch.zeros(3, 2, 2, 1, 4)
    rows = torch.randn(2, 2, 1, 4)
    store(kv, rows, torch.tensor([5, 0]))
    torch.testing.assert_close(kv[2, 1], rows[0])
    torch.testing.assert_close(kv[0, 0], rows[1])
    assert int((kv != 0).sum()) == rows.numel()


def test_the_oracle_is_plain_causal_attention() -> None:
    """This compares the naive twin itself with torch's attention."""
    query, key, value = torch.randn(7, 4, DIM), torch.randn(7, 2, DIM), torch.randn(7, 2, DIM)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        is_causal=True,
        scale=SCALE,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(reference.attention(query, key, value, SCALE, 0), theirs, atol=1e-5, rtol=1e-5)
