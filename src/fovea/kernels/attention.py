"""Attention of a step over paged KV: its plan, which all kernels read, and its computation in plain torch.

A step holds sequences that decode (one query each) and chunks of prompts (many queries each). In plain torch,
decodes of similar length share one call: their keys are gathered, padded to a common length and masked. The
query heads of a KV head take the place of queries in that call, so grouped heads need no copies of the keys.
Each chunk is a call of its own with a causal mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.pages import KV, gather
from fovea.kernels.pieces import Cutting


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of a decoder.

    query: query heads.
    kv: KV heads, a divisor of `query`.
    dim: numbers per head.
    """

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt in a step.

    row: first row of the step that belongs to the chunk.
    count: number of rows.
    first: number of tokens before the chunk that are in the table.
    table: block numbers of the sequence, (blocks,). With a sliding window it begins where the window does.
    limits: (count, 2), first token that each row sees, and the one after the last, counted in the table;
        None: each row sees all tokens up to itself.
    """

    row: int
    count: int
    first: int
    table: Tensor
    limits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Groups of decodes whose contexts begin with the same blocks. Kernels read these blocks once per group.

    There are B decodes, a row each, and G groups of at most R rows.

    starts: (B,), number of first tokens of each row that its group reads; 0: the row is in no group.
    members: (G, R), rows of each group as numbers 0..B-1, padded with -1.
    lengths: (G,), tokens of each group, in the blocks of its first member; 0: the group is padding.
    """

    starts: Tensor
    members: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """The contexts of B decodes, cut into pieces, see `kernels.pieces`. A piece gives results for its rows.

    counts: (2,), numbers of pieces in `own` and in `together`. Entries after these mean nothing.
    bounds: (B + 1,), first result of each row, and the end of the last row's. The results of a prefix that
        a row shares come after those of the tokens that it reads itself.
    own: (P, 4), row, first token, end, number of the result.
    together: (Q, 4), prefix group, first token, end, number of the result from the end of a member's results
        on, which is negative; None: there are no groups.
    room: number of results for which there is room.
    most: most results of a row.
    """

    counts: Tensor
    bounds: Tensor
    own: Tensor
    together: Tensor | None
    room: int
    most: int

    @classmethod
    def of(cls, parts: Mapping[str, Tensor], rule: Cutting, room: int) -> Pieces:
        """Return pieces from their arrays by name. rule: how contexts were cut."""
        together = parts.get("together")
        most = rule.most * (1 if together is None else 2)
        return cls(parts["counts"], parts["bounds"], parts["own"], together, room, most)


@dataclass(frozen=True, slots=True)
class Decodes:
    """B consecutive rows of a step, each the newest token of its sequence.

    row: the first of them.
    tables: (B, blocks), block tables, padded with block 0.
    lengths: (B,), tokens of each context, the row's own included. With a sliding window, contexts begin with
        the block in which the window does.
    length: L, the longest context.
    mask: (B, 1, 1, L), additive; None: all contexts have length L, or the kernels read pages in place.
    shared: rows that read common blocks together; None: every row reads all of its blocks itself.
    firsts: (B,), first token that each row sees; None: all of its context.
    pieces: the parts into which the work is divided; None: the kernels divide it themselves.
    """

    row: int
    tables: Tensor
    lengths: Tensor
    length: int
    mask: Tensor | None
    shared: PrefixGroups | None = None
    firsts: Tensor | None = None
    pieces: Pieces | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The inputs of the attention kernels for one step.

    slots: (T,), slot of each row's key and value: block * block_size + offset.
    decodes: groups of rows from row 0 on, in order.
    chunks: the rows after those, in order.
    """

    slots: Tensor
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


ChunkAttention = Callable[[Tensor, KV, tuple[Chunk, ...], float, Tensor], None]
"""Computes the attention of chunks and writes their rows of `out`.

Arguments: query (T, H, D), kv (blocks, block_size, 2, Hkv, D), chunks, scale, out (T, H, D). The rows of the
chunks are the last rows of the step, one chunk after the other. Every layer of a step passes the same tuple
of chunks.
"""


def attend(query: Tensor, kv: KV, plan: AttentionPlan, scale: float) -> Tensor:
    """Return the attention (T, H, D) of query (T, H, D) over kv, as planned.

    kv: (blocks, block_size, 2, Hkv, D).
    """
    parts = [
        _decode(query[group.row : group.row + group.tables.shape[0]], kv, group, scale)
        for group in plan.decodes
    ]
    parts += [prefill(query[chunk.row : chunk.row + chunk.count], kv, chunk, scale) for chunk in plan.chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(query: Tensor, kv: KV, group: Decodes, scale: float) -> Tensor:
    batch, heads, dim = query.shape
    kv_heads = kv.shape[3]
    context = gather(kv, group.tables.flatten(), query.dtype)
    context = context.view(batch, -1, 2, kv_heads, dim)[:, : group.length]
    out = functional.scaled_dot_product_attention(
        query.view(batch, kv_heads, heads // kv_heads, dim),
        context[:, :, 0].transpose(1, 2),
        context[:, :, 1].transpose(1, 2),
        attn_mask=group.mask,
        scale=scale,
    )
    return out.reshape(batch, heads, dim)


def prefill(query: Tensor, kv: KV, chunk: Chunk, scale: float) -> Tensor:
    """Return the attention (count, H, D) of a chunk's query (count, H, D) over its sequence's blocks."""
    count, heads, _ = query.shape
    kv_heads = kv.shape[3]
    length = chunk.first + count
    context = gather(kv, chunk.table, query.dtype).flatten(0, 1)[:length]
    keys, values = (
        context[:, side].transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)[None] for side in (0, 1)
    )
    mask = None
    if chunk.limits is not None:
        reach = torch.arange(length, device=query.device)[None, :]
        mask = (reach >= chunk.limits[:, :1]) & (reach < chunk.limits[:, 1:])
    elif chunk.first > 0 and count > 1:
        reach = torch.arange(length, device=query.device)[None, :]
        mask = reach <= torch.arange(chunk.first, length, device=query.device)[:, None]
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None and chunk.first == 0 and count > 1,
        scale=scale,
    )
    return out[0].transpose(0, 1)


def prefill_each(query: Tensor, kv: KV, chunks: tuple[Chunk, ...], scale: float, out: Tensor) -> None:
    """Compute one chunk after the other with `prefill`. This is a `ChunkAttention`."""
    for chunk in chunks:
        rows = slice(chunk.row, chunk.row + chunk.count)
        out[rows] = prefill(query[rows], kv, chunk, scale)
