"""The attention seam: what a step computes over the paged KV, whatever does the computing.

One step holds sequences that decode (one query each) and chunks of prompts (many queries each). Decodes of similar
length share one product: their keys are gathered to a common length and masked, and the query heads of a KV head stand
in for queries, so that grouped heads need no copies of the keys. Each chunk is its own product with a causal mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Heads:
    """Of a decoder: `query` heads over `kv` heads, which divide them; `dim` numbers in each."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [row, row + count) of the step are queries first..first+count-1 of a sequence whose blocks are `table`."""

    row: int
    count: int
    first: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class Shares:
    """G runs of tokens, each of which several of B rows begin with, for kernels that read them once for all of those rows.

    starts (B,): tokens of a row that a share reads for it, 0: none. members (G, R): rows of each share, padded with -1.
    lengths (G,): tokens of each share, which stand in the blocks of its first member; 0: there is none.
    """

    starts: Tensor
    members: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class Decodes:
    """B consecutive rows from `row` on, each the newest token of its sequence.

    tables (B, blocks): block tables, padded with block 0. lengths (B,): tokens of each context. length: L, the longest.
    mask (B, 1, 1, L) additive, or None when all contexts are that long, or are read where they lie.
    shared: None where every row reads all of its blocks itself.
    """

    row: int
    tables: Tensor
    lengths: Tensor
    length: int
    mask: Tensor | None
    shared: Shares | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """slots (T,): where each row's key and value go, as block * block_size + offset.

    decodes: groups of rows from row 0 on, in order. chunks: the rows after those.
    """

    slots: Tensor
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


ChunkAttention = Callable[[Tensor, Tensor, tuple[Chunk, ...], float, Tensor], None]
"""query (T, H, D) over kv (blocks, block_size, 2, Hkv, D) for some chunks, scaled, into their rows of out (T, H, D). The
chunks' rows are the step's last, one chunk after the other; every layer of a step is given the same tuple."""


def store(kv: Tensor, keys_values: Tensor, slots: Tensor) -> None:
    """Write rows (T, 2, Hkv, D) into kv (blocks, block_size, 2, Hkv, D)."""
    kv.flatten(0, 1).index_copy_(0, slots, keys_values)


def attend(query: Tensor, kv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """query (T, H, D) over kv (blocks, block_size, 2, Hkv, D) as planned; returns (T, H, D)."""
    parts = [
        _decode(query[group.row : group.row + group.tables.shape[0]], kv, group, scale)
        for group in plan.decodes
    ]
    parts += [prefill(query[chunk.row : chunk.row + chunk.count], kv, chunk, scale) for chunk in plan.chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(query: Tensor, kv: Tensor, group: Decodes, scale: float) -> Tensor:
    batch, heads, dim = query.shape
    kv_heads = kv.shape[3]
    gathered = kv.index_select(0, group.tables.flatten()).view(batch, -1, 2, kv_heads, dim)[:, : group.length]
    out = functional.scaled_dot_product_attention(
        query.view(batch, kv_heads, heads // kv_heads, dim),
        gathered[:, :, 0].transpose(1, 2),
        gathered[:, :, 1].transpose(1, 2),
        attn_mask=group.mask,
        scale=scale,
    )
    return out.reshape(batch, heads, dim)


def prefill(query: Tensor, kv: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """query (count, H, D) of one chunk over the blocks of its sequence; returns (count, H, D)."""
    count, heads, _ = query.shape
    kv_heads = kv.shape[3]
    length = chunk.first + count
    gathered = kv.index_select(0, chunk.table).flatten(0, 1)[:length]
    keys, values = (
        gathered[:, side].transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)[None] for side in (0, 1)
    )
    mask = None
    if chunk.first > 0 and count > 1:
        reach = torch.arange(length, device=query.device)[None, :]
        mask = reach <= torch.arange(chunk.first, length, device=query.device)[:, None]
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=chunk.first == 0 and count > 1,
        scale=scale,
    )
    return out[0].transpose(0, 1)


def prefill_each(query: Tensor, kv: Tensor, chunks: tuple[Chunk, ...], scale: float, out: Tensor) -> None:
    """A `ChunkAttention`: one product after the other."""
    for chunk in chunks:
        rows = slice(chunk.row, chunk.row + chunk.count)
        out[rows] = prefill(query[rows], kv, chunk, scale)
