"""Attention over pages of KV on a GPU, in Triton: of decodes, and of chunks over pages in 8 bits.

The contexts of a step are cut into pieces of about equal size, so that few rows still occupy the whole GPU
and a long context delays nobody (`kernels.pieces`). Each piece stores the weighted mean of its values and the
logarithm of the sum of its weights. Another launch merges the results of each row (flash decoding: softmax
divides sums over keys, and such sums can be computed in parts).

Rows that begin with the same blocks form a prefix group. Their common blocks are read once for all of them,
as a product of many queries with the same keys. The result is merged like further pieces (Hydragen, arXiv
2402.05099).

The numbers of pieces are read on the device, and the number of programs does not depend on them. So launches
have the same shape in every step and can be replayed from a graph. A program that finds no piece ends at
once.

Levels of 8 bits are converted where they are read. Scores are multiplied by the scales of keys, and weights
by those of values (`kernels.pages`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fovea.kernels.attention import Chunk, Decodes, Heads
from fovea.kernels.pages import KV, QuantizedKV
from fovea.kernels.pieces import Cutting
from fovea.kernels.triton.rows import addressed, next_power

LEAST_TOKENS = 128
"""Fewest tokens of a piece."""
TOKENS_PER_QUERY = 32
"""Fewest tokens of a piece per query head of a KV head.

A result is written and read once, 8 bytes per number of each query head; a token's key and value have 4 in
bf16. So results are at most a sixteenth of the bytes that are read.
"""
MOST_PIECES = 64
"""Most pieces of a context."""
PROGRAMS = 32
"""Most programs of a launch per processor of the GPU. If there are more pieces, programs compute several."""
SHARED_QUERIES = 64
"""Largest number of query heads in one product with shared keys."""
CHUNK_QUERIES = 64
"""Rows of a chunk in one program. It is always the same, so that a row has the same bits in any chunk."""
WIDE = 16384
"""Numbers of a product's result from which on a program has eight warps instead of four."""
MERGED_AT_ONCE = 16
"""Results of a row that a program of the merge reads at once."""


@triton.jit
def _scan(
    q, kv, scales, table, kv_head, first, last, low, high, scale, kv_heads, dim, block_size, page,
    TILE: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, QUANTIZED: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Attention of queries q (M, DIM) over the keys at positions [first, last) of one sequence.

    low, high: (M,), each query sees the keys at positions [low, high) of these, if LIMITED.
    page: numbers from one page to the next.

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
        head = (place % block_size) * 2 * kv_heads + kv_head
        at = (block * page + head * dim)[:, None] + d[None, :]
        mask = inside[:, None] & (d < dim)[None, :]
        key = tl.load(kv + at, mask=mask, other=0.0)
        value = tl.load(kv + at + kv_heads * dim, mask=mask, other=0.0)
        visible = inside[None, :]
        if LIMITED:
            visible = visible & (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
        if QUANTIZED:
            key, value = key.to(q.dtype), value.to(q.dtype)
            of_head = scales + block * (page // 2) + head
            scores = tl.dot(q, tl.trans(key), input_precision="ieee")
            scores *= tl.load(of_head, mask=inside, other=0.0).to(tl.float32)[None, :] * scale
        else:
            scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        shift = top
        if LIMITED:  # a query may see no key of a tile
            shift = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp(scores - shift[:, None])
        rest = tl.exp(best - shift)
        weight = weight * rest + tl.sum(p, axis=1)
        if QUANTIZED:
            p *= tl.load(of_head + kv_heads, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = total * rest[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        best = top
    if LIMITED:  # padding sees no key at all
        weight = tl.where(weight > 0, weight, 1.0)
    return total / weight[:, None], best + tl.log(weight)


@triton.jit
def _entry(pieces, number):
    """Load a piece: its row or group, first token, end, and where its results are.

    The first piece of a program is loaded before it is known whether there is one: then the device waits once
    for both. The arrays have an entry for each program.
    """
    entry = pieces + number * 4
    first, last = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    return tl.load(entry), first, last, tl.load(entry + 3)


@triton.jit
def _own_pieces(
    query, kv, scales, tables, pieces, counts, sums, logs, scale, heads, kv_heads, dim, block_size, page,
    width,
    GROUP: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Compute pieces of the tokens that rows do not share, for the query heads of one KV head."""
    kv_head = tl.program_id(0)
    m, d = tl.arange(0, M), tl.arange(0, DIM)
    head = kv_head * GROUP + m
    real = m < GROUP
    mask = real[:, None] & (d < dim)[None, :]
    piece, count = tl.program_id(1), tl.load(counts)
    row, first, last, result = _entry(pieces, piece)
    while piece < count:
        q = tl.load(query + (row * heads + head)[:, None] * dim + d[None, :], mask=mask, other=0.0)
        total, log = _scan(
            q, kv, scales, tables + row * width, kv_head, first, last, first, last, scale, kv_heads, dim,
            block_size, page, TILE, DIM, M, QUANTIZED, False,
        )  # fmt: skip
        at = result * heads + head
        tl.store(sums + at[:, None] * dim + d[None, :], total, mask=mask)
        tl.store(logs + at, log, mask=real)
        piece += tl.num_programs(1)
        row, first, last, result = _entry(pieces, tl.minimum(piece, count - 1))


@triton.jit
def _shared_pieces(
    query, kv, scales, tables, members, pieces, counts, bounds, sums, logs, scale, heads, kv_heads, dim,
    block_size, page, width,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Compute pieces of the prefixes of groups, for all their rows and the query heads of one KV head."""
    kv_head = tl.program_id(0)
    m, d = tl.arange(0, M), tl.arange(0, DIM)
    head = kv_head * GROUP + m % PADDED_GROUP
    member = m // PADDED_GROUP
    piece, count = tl.program_id(1), tl.load(counts + 1)
    number, first, last, back = _entry(pieces, piece)
    while piece < count:
        rows = members + number * ROWS
        row = tl.load(rows + member, mask=member < ROWS, other=-1)
        real = (row >= 0) & (m % PADDED_GROUP < GROUP)
        mask = real[:, None] & (d < dim)[None, :]
        q = tl.load(query + (row * heads + head)[:, None] * dim + d[None, :], mask=mask, other=0.0)
        table = tables + tl.load(rows) * width
        total, log = _scan(
            q, kv, scales, table, kv_head, first, last, first, last, scale, kv_heads, dim, block_size, page,
            TILE, DIM, M, QUANTIZED, False,
        )  # fmt: skip
        result = tl.load(bounds + row + 1, mask=real, other=0) + back
        at = result * heads + head
        tl.store(sums + at[:, None] * dim + d[None, :], total, mask=mask)
        tl.store(logs + at, log, mask=real)
        piece += tl.num_programs(1)
        number, first, last, back = _entry(pieces, tl.minimum(piece, count - 1))


@triton.jit
def _merge(sums, logs, bounds, out, heads, dim, RESULTS: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr):
    """Merge the results of one head of one row by their weights. A row without results is padding: 0."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(bounds + row)
    count = (tl.load(bounds + row + 1) - first).to(tl.int32)
    number, step, d = tl.arange(0, RESULTS), tl.arange(0, STEP), tl.arange(0, DIM)
    log = tl.load(logs + (first + number) * heads + head, mask=number < count, other=float("-inf"))
    top = tl.max(log, axis=0)
    top = tl.where(count > 0, top, 0.0)
    weight = tl.sum(tl.exp(log - top), axis=0)
    merged = tl.zeros((DIM,), tl.float32)
    for begin in range(0, count, STEP):
        inside = begin + step < count
        at = (first + begin + step) * heads + head
        share = tl.exp(tl.load(logs + at, mask=inside, other=float("-inf")) - top)
        mask = inside[:, None] & (d < dim)[None, :]
        part = tl.load(sums + at[:, None] * dim + d[None, :], mask=mask, other=0.0)
        merged += tl.sum(part * share[:, None], axis=0)
    merged = merged / tl.where(count > 0, weight, 1.0)
    tl.store(out + (row * heads + head) * dim + d, merged.to(out.dtype.element_ty), mask=d < dim)


def shared_rows(group: int) -> int:
    """Return how many rows a prefix group has at most. group: query heads per KV head."""
    return max(1, SHARED_QUERIES // next_power(group))


def cutting(heads: Heads, processors: int) -> Cutting:
    """Return how contexts are cut on a GPU with so many processors.

    A long context alone gives one to two programs to every processor, as far as MOST_PIECES allows.
    """
    least = max(LEAST_TOKENS, TOKENS_PER_QUERY * next_power(heads.query // heads.kv))
    most = min(MOST_PIECES, max(8, next_power(-(-processors // heads.kv))))
    return Cutting(_tile(heads.dim), least, most)


def _tile(dim: int) -> int:
    """Return the number of keys that a program reads at once."""
    return 64 if dim <= 128 else 32 if dim <= 256 else 16


def programs(pieces: int, kv_heads: int, processors: int) -> int:
    """Return the number of programs per KV head, for arrays with room for so many pieces."""
    return min(pieces, max(1, PROGRAMS * processors // kv_heads))


@triton.jit
def _chunk(
    query, kv, scales, table, limits, out, scale, first, count, heads, kv_heads, dim, block_size, page,
    GROUP: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, QUANTIZED: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
):  # fmt: skip
    """Compute one query head of M rows of a chunk."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    head, d = tl.program_id(1), tl.arange(0, DIM)
    real = row < count
    mask = real[:, None] & (d < dim)[None, :]
    at = (row * heads + head)[:, None] * dim + d[None, :]
    q = tl.load(query + at, mask=mask, other=0.0)
    low, high = tl.zeros((M,), tl.int32), tl.where(real, first + row + 1, 0).to(tl.int32)
    if HAS_LIMITS:
        low = tl.load(limits + 2 * row, mask=real, other=2147483647).to(tl.int32)
        high = tl.load(limits + 2 * row + 1, mask=real, other=0).to(tl.int32)
    # Tiles begin at multiples of their size, so a row's sums do not depend on the rows beside it.
    begin = tl.min(low, axis=0) // TILE * TILE
    total, _ = _scan(
        q, kv, scales, table, head // GROUP, begin, tl.max(high, axis=0), low, high, scale, kv_heads, dim,
        block_size, page, TILE, DIM, M, QUANTIZED, True,
    )  # fmt: skip
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def prefill(query: Tensor, kv: KV, chunks: tuple[Chunk, ...], scale: float, out: Tensor) -> None:
    """Compute the attention of chunks over pages in place. This is a `ChunkAttention`."""
    heads, dim = query.shape[1:]
    width, kv_heads = max(16, next_power(dim)), kv.shape[3]
    pointers, page = addressed(kv)
    for chunk in chunks:
        rows = slice(chunk.row, chunk.row + chunk.count)
        _chunk[(-(-chunk.count // CHUNK_QUERIES), heads)](
            query[rows], *pointers, chunk.table, chunk.table if chunk.limits is None else chunk.limits,
            out[rows], scale, chunk.first, chunk.count, heads, kv_heads, dim, kv.shape[1], page,
            GROUP=heads // kv_heads, M=CHUNK_QUERIES, TILE=_tile(dim), DIM=width,
            QUANTIZED=isinstance(kv, QuantizedKV), HAS_LIMITS=chunk.limits is not None,
            **_resources(CHUNK_QUERIES, width, query),
        )  # fmt: skip


def decode(query: Tensor, kv: KV, decodes: Decodes, scale: float, processors: int, out: Tensor) -> None:
    """Compute the attention of decodes.

    query: (B, H, D), contiguous.
    kv: (blocks, block_size, 2, Hkv, D), see `rows.addressed`.
    decodes: cut as `cutting` says.
    processors: of the GPU.
    out: (B, H, D), receives the result.
    """
    rows, heads, dim = query.shape
    block_size, kv_heads = kv.shape[1], kv.shape[3]
    group, shared, pieces = heads // kv_heads, decodes.shared, decodes.pieces
    assert pieces is not None, "the planner cuts contexts if the kernels have a `cutting`"
    sums = torch.empty((pieces.room, heads, dim), dtype=torch.float32, device=query.device)
    logs = torch.empty((pieces.room, heads), dtype=torch.float32, device=query.device)
    width = max(16, next_power(dim))
    pointers, page = addressed(kv)
    sizes = heads, kv_heads, dim, block_size, page, decodes.tables.shape[1]
    tiles = {"TILE": _tile(dim), "DIM": width, "GROUP": group, "QUANTIZED": isinstance(kv, QuantizedKV)}
    if shared is not None and pieces.together is not None:
        padded = next_power(group)
        per_group = shared.members.shape[1]
        queries = max(16, next_power(padded * per_group))
        _shared_pieces[(kv_heads, programs(len(pieces.together), kv_heads, processors))](
            query, *pointers, decodes.tables, shared.members, pieces.together, pieces.counts, pieces.bounds,
            sums, logs, scale, *sizes, **tiles, PADDED_GROUP=padded, ROWS=per_group, M=queries,
            **_resources(queries, width, query),
        )  # fmt: skip
    if len(pieces.own):
        queries = max(16, next_power(group))
        _own_pieces[(kv_heads, programs(len(pieces.own), kv_heads, processors))](
            query, *pointers, decodes.tables, pieces.own, pieces.counts, sums, logs, scale, *sizes, **tiles,
            M=queries, **_resources(queries, width, query),
        )  # fmt: skip
    _merge[(rows, heads)](
        sums, logs, pieces.bounds, out, heads, dim,
        RESULTS=next_power(pieces.most), STEP=MERGED_AT_ONCE, DIM=width,
    )  # fmt: skip


def _resources(queries: int, width: int, query: Tensor) -> dict[str, int]:
    """Return the warps of a program, and the tiles of keys that it loads ahead."""
    wide_bytes = width * query.element_size() > 1024
    return {"num_warps": 8 if queries * width >= WIDE else 4, "num_stages": 2 if wide_bytes else 3}
