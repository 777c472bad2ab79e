"""Attention of decodes over pages of KV on a GPU, in Triton.

The context of a row is cut into splits, so that few rows still occupy the whole GPU. Each split stores the
weighted mean of its values and the logarithm of the sum of its weights. A second launch merges the splits
(flash decoding: softmax divides sums over keys, and such sums can be computed in parts).

Rows that begin with the same blocks form a prefix group. Their common blocks are read once for all of them,
as a product of many queries with the same keys. The result is merged like further splits (Hydragen, arXiv
2402.05099).

The bounds of the splits depend on the lengths of contexts, but their number does not. So launches have the
same shape in every step and can be replayed from a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fovea.kernels.attention import Decodes
from fovea.kernels.triton.rows import next_power

MAX_SPLITS = 32
SHARED_QUERIES = 64
"""Largest number of query heads in one product with shared keys."""


@triton.jit
def _scan(
    q, kv, table, kv_head, first, last, scale, kv_heads, dim, block_size,
    TILE: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Attention of queries q (M, DIM) over the keys at positions [first, last) of one sequence.

    Returns the weighted mean of the values, (M, DIM), and the logarithm of the sum of weights, (M,).
    """
    d = tl.arange(0, DIM)
    best = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    total = tl.zeros((M, DIM), tl.float32)
    for begin in range(first, last, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < last
        block = tl.load(table + place // block_size, mask=inside, other=0)
        slot = block * block_size + place % block_size
        at = (slot * 2 * kv_heads + kv_head)[:, None] * dim + d[None, :]
        mask = inside[:, None] & (d < dim)[None, :]
        key = tl.load(kv + at, mask=mask, other=0.0)
        value = tl.load(kv + at + kv_heads * dim, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        p = tl.exp(scores - top[:, None])
        rest = tl.exp(best - top)
        weight = weight * rest + tl.sum(p, axis=1)
        total = total * rest[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        best = top
    # A split may be empty. Then the mean is 0, and the logarithm of the weight is -inf.
    some = weight > 0
    total = total / tl.where(some, weight, 1.0)[:, None]
    return total, tl.where(some, best + tl.log(tl.where(some, weight, 1.0)), float("-inf"))


@triton.jit
def _part(first, last, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Cut [first, last) into SPLITS runs of whole tiles, and return the bounds of run `split`."""
    span = tl.cdiv(tl.cdiv(last - first, TILE), SPLITS) * TILE
    begin = first + split * span
    return begin, tl.minimum(begin + span, last)


@triton.jit
def _own_split(
    query, kv, tables, lengths, starts, sums, logs, scale, heads, kv_heads, dim, block_size, width,
    GROUP: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Compute one split of the tokens that a row does not share, for the query heads of one KV head."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m, d = tl.arange(0, M), tl.arange(0, DIM)
    head = kv_head * GROUP + m
    real = m < GROUP
    mask = real[:, None] & (d < dim)[None, :]
    q = tl.load(query + (row * heads + head)[:, None] * dim + d[None, :], mask=mask, other=0.0)
    start = 0
    if SHARED:
        start = tl.load(starts + row).to(tl.int32)
    first, last = _part(start, tl.load(lengths + row).to(tl.int32), split, SPLITS, TILE)
    total, log = _scan(
        q, kv, tables + row * width, kv_head, first, last, scale, kv_heads, dim, block_size, TILE, DIM, M
    )
    slots = 2 * SPLITS if SHARED else SPLITS
    at = (row * heads + head) * slots + split
    tl.store(sums + at[:, None] * dim + d[None, :], total, mask=mask)
    tl.store(logs + at, log, mask=real)
    if SHARED:
        nothing = tl.full((M,), float("-inf"), tl.float32)
        tl.store(logs + at + SPLITS, nothing, mask=real & (start == 0))


@triton.jit
def _shared_split(
    query, kv, tables, members, prefixes, sums, logs, scale, heads, kv_heads, dim, block_size, width,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute one split of a prefix group's tokens, for all its rows and the query heads of one KV head."""
    number, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, d = tl.arange(0, M), tl.arange(0, DIM)
    row = tl.load(members + number * ROWS + m // PADDED_GROUP, mask=m // PADDED_GROUP < ROWS, other=-1)
    real = (row >= 0) & (m % PADDED_GROUP < GROUP)
    head = kv_head * GROUP + m % PADDED_GROUP
    mask = real[:, None] & (d < dim)[None, :]
    q = tl.load(query + (row * heads + head)[:, None] * dim + d[None, :], mask=mask, other=0.0)
    first, last = _part(0, tl.load(prefixes + number).to(tl.int32), split, SPLITS, TILE)
    table = tables + tl.maximum(tl.load(members + number * ROWS), 0) * width
    total, log = _scan(q, kv, table, kv_head, first, last, scale, kv_heads, dim, block_size, TILE, DIM, M)
    at = (row * heads + head) * 2 * SPLITS + SPLITS + split
    tl.store(sums + at[:, None] * dim + d[None, :], total, mask=mask)
    tl.store(logs + at, log, mask=real)


@triton.jit
def _merge(sums, logs, out, dim, SLOTS: tl.constexpr, DIM: tl.constexpr):
    """Merge the splits of one head of one row by their weights."""
    head = tl.program_id(0).to(tl.int64)
    slot, d = tl.arange(0, SLOTS), tl.arange(0, DIM)
    log = tl.load(logs + head * SLOTS + slot)
    weight = tl.exp(log - tl.max(log, axis=0))
    # The sums of empty splits are not read. They may never have been written, and 0 * NaN is NaN.
    mask = (weight > 0)[:, None] & (d < dim)[None, :]
    part = tl.load(sums + (head * SLOTS + slot)[:, None] * dim + d[None, :], mask=mask, other=0.0)
    merged = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + head * dim + d, merged.to(out.dtype.element_ty), mask=d < dim)


def shared_rows(group: int) -> int:
    """Return how many rows a prefix group has at most. group: query heads per KV head."""
    return max(1, SHARED_QUERIES // next_power(group))


def splits(rows: int, kv_heads: int, processors: int) -> int:
    """Return the number of splits of a row: a power of two, for about two programs per processor."""
    target = 2 * processors // (rows * kv_heads)
    return min(MAX_SPLITS, next_power(max(1, target)))


def decode(query: Tensor, kv: Tensor, decodes: Decodes, scale: float, count: int, out: Tensor) -> None:
    """Compute the attention of decodes.

    query: (B, H, D), contiguous.
    kv: (blocks, block_size, 2, Hkv, D), contiguous.
    count: number of splits of a row.
    out: (B, H, D), receives the result.
    """
    rows, heads, dim = query.shape
    block_size, kv_heads = kv.shape[1], kv.shape[3]
    group, shared = heads // kv_heads, decodes.shared
    slots = count if shared is None else 2 * count
    sums = torch.empty((rows, heads, slots, dim), dtype=torch.float32, device=query.device)
    logs = torch.empty((rows, heads, slots), dtype=torch.float32, device=query.device)
    width = max(16, next_power(dim))
    sizes = heads, kv_heads, dim, block_size, decodes.tables.shape[1]
    tiles = {"TILE": 64 if width <= 128 else 32, "DIM": width, "SPLITS": count, "GROUP": group}
    if shared is not None:
        padded = next_power(group)
        per_share = shared.members.shape[1]
        _shared_split[(len(shared.members), kv_heads, count)](
            query, kv, decodes.tables, shared.members, shared.lengths, sums, logs, scale, *sizes,
            **tiles, PADDED_GROUP=padded, ROWS=per_share, M=max(16, next_power(padded * per_share)),
        )  # fmt: skip
    starts = decodes.lengths if shared is None else shared.starts  # lengths are a placeholder, not read
    _own_split[(rows, kv_heads, count)](
        query, kv, decodes.tables, decodes.lengths, starts, sums, logs, scale, *sizes,
        **tiles, M=max(16, next_power(group)), SHARED=shared is not None,
    )  # fmt: skip
    _merge[(rows * heads,)](sums, logs, out, dim, SLOTS=slots, DIM=width)
