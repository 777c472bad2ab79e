"""Chooses the keys and values that sequences keep, and copies them (`engine.keep`).

Every KV head of every layer keeps tokens of its own. All keep equally many, so they share one block table.
If several processes have the heads, each decides for its own, from the same `Decision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fovea.engine.execute.decode_rows import table
from fovea.engine.keep import BY_KIND, RECENT, SINKS, Kept
from fovea.engine.kv.manager import Compaction
from fovea.engine.layers.config import Attention, DecoderConfig
from fovea.engine.layers.ranks import ALONE, Ranks
from fovea.engine.layers.step import DecoderMemory
from fovea.engine.schedule.plan import Work
from fovea.kernels.pages import KVPool, gather
from fovea.kernels.transfer import to_device

NEAR, NEAR_SHARE = 7, 0.25
"""A row of text gets at least this share of the best score of text within so many rows. So the words around
a fact are kept with it, as in SnapKV. In images each token counts for itself."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A sequence that leaves out rows in a step.

    owner: id of the sequence.
    rows: its rows up to the end of the step.
    kept: how many of them it keeps.
    blocks: (blocks,), block numbers of its rows.
    images: (rows,), which rows are images'.
    by_kind: rows of images and others are chosen apart.
    queries: rows of the step whose queries decide; None: the sequence keeps its last rows.
    """

    owner: str
    rows: int
    kept: Kept
    blocks: NDArray[np.int64]
    images: NDArray[np.bool_]
    by_kind: bool
    queries: tuple[int, int] | None


def decisions(work: Sequence[Work]) -> list[Decision]:
    """Return the sequences of a step that leave out rows."""
    found = []
    for item, end in zip(work, accumulate(item.count for item in work), strict=True):
        if item.kept is None:
            continue
        seq, keep = item.seq, item.seq.keep
        by_queries = keep is not None and keep.method != "window"
        found.append(
            Decision(
                seq.id,
                item.rows,
                item.kept,
                np.array(table(item)),
                visual_rows(item),
                keep is not None and keep.method in BY_KIND,
                (end - item.stop + seq.decides_from(item.stop), end) if by_queries else None,
            )
        )
    return found


class KeptRows:
    """Remembers which rows sequences keep, from the step that decides until they are copied.

    config: shape of the decoder. memory: its keys and values.
    ranks: the processes that have its heads. If some have the same KV head, each has some of its queries.
    """

    def __init__(self, config: DecoderConfig, memory: DecoderMemory, ranks: Ranks = ALONE) -> None:
        self._memory, self._ranks = memory, ranks
        self._pool = memory.kv[0]  # the group without a window, which comes first
        layers = config.kv_groups[0].layers if config.kv_groups[0].window is None else ()
        self._places = {layer: place for place, layer in enumerate(layers)}
        shapes = {layer: config.layers[layer].mixer for layer in layers}
        self._scales = {layer: shape.scale for layer, shape in shapes.items() if isinstance(shape, Attention)}
        self._chosen: dict[str, Tensor] = {}

    def watch(self, made: Sequence[Decision]) -> Watch | None:
        """Return an object that records queries of a step; None: no decision needs them."""
        rows = [(each.owner, each.queries) for each in made if each.queries is not None]
        return Watch(rows) if rows else None

    def choose(self, made: Sequence[Decision], watch: Watch | None) -> None:
        """Decide what the sequences of a step keep.

        watch: has noted the step's queries.
        """
        for each in made:
            queries = {} if watch is None else watch.queries.get(each.owner, {})
            own = {layer: query for layer, query in queries.items() if layer in self._places}
            self._chosen[each.owner] = self._rows_of(each, own)

    def _rows_of(self, made: Decision, queries: dict[int, Tensor]) -> Tensor:
        """Return the rows that a sequence keeps, (layers, Hkv, kept rows)."""
        device, heads, kept = self._pool.pages.device, self._pool.heads, made.kept
        if not queries:
            last = torch.arange(made.rows - kept.rows + SINKS, made.rows, device=device)
            rows = torch.cat((torch.arange(SINKS, device=device), last))
            return rows.expand(len(self._places), heads, -1)
        images = to_device(torch.from_numpy(made.images), device)
        apart = images if made.by_kind else torch.zeros_like(images)
        blocks = torch.as_tensor(made.blocks[: -(-made.rows // self._pool.block_size)], device=device)
        count = len(next(iter(queries.values())))
        places = torch.arange(made.rows - count, made.rows, device=device)
        chosen = []
        for layer, query in queries.items():
            keys = gather(self._memory.layer_kv(layer), blocks, query.dtype).flatten(0, 1)[: made.rows, 0]
            scores = self._ranks.add_heads(attention_scores(query, places, keys, self._scales[layer]))
            chosen.append(best_rows(spread(scores, images), apart, kept))
        return torch.stack(chosen)

    def compact(self, move: Compaction) -> None:
        """Copy the rows that a sequence keeps to their blocks."""
        copy_rows(self._pool, move, self._chosen.pop(move.owner))

    def forget(self, sequence_id: str) -> bool:
        """Forget what a sequence keeps. Returns whether something was known."""
        return self._chosen.pop(sequence_id, None) is not None


class Watch:
    """Records the queries of the rows that decide in a step.

    queries: by sequence id and layer, (w, heads, head_dim), of the w tokens that decide.
    """

    def __init__(self, rows: Sequence[tuple[str, tuple[int, int]]]) -> None:
        """rows: rows of each sequence, first and end."""
        self._rows = rows
        self.queries: dict[str, dict[int, Tensor]] = {owner: {} for owner, _ in rows}

    def __call__(self, layer: int, query: Tensor) -> None:
        for owner, (first, last) in self._rows:
            self.queries[owner][layer] = query[first:last].clone()


def visual_rows(item: Work) -> NDArray[np.bool_]:
    """Return which rows of a sequence are known to be images', (rows up to the end of its work,).

    Of rows that were kept before it is known only with methods that divide them by kind.
    """
    seq = item.seq
    visual = np.zeros(item.rows, dtype=bool)
    visual[: seq.kept.visual] = True
    for span in seq.spans_between(seq.kept.until, item.stop):
        visual[max(span.start, seq.kept.until) - seq.dropped : min(span.end, item.stop) - seq.dropped] = True
    return visual


def attention_scores(query: Tensor, places: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return how much some rows attend to each row, (Hkv, rows) float32.

    It is the largest weight that one of the rows gives, summed over the query heads of a KV head.

    query: (w, heads, head_dim). places: (w,), numbers of its rows. keys: (rows, Hkv, head_dim).
    """
    count, heads, dim = query.shape
    rows, kv_heads, _ = keys.shape
    grouped = query.float().view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    later = torch.arange(rows, device=keys.device) > places[:, None]
    found = []
    for mine, own in zip(grouped, keys.unbind(1), strict=True):  # one head at a time, for less memory
        scores = mine @ own.float().T * scale  # (group, w, rows)
        found.append(scores.masked_fill_(later, -torch.inf).softmax(-1).amax(1).sum(0))
    return torch.stack(found)


def spread(scores: Tensor, images: Tensor) -> Tensor:
    """Return scores (Hkv, rows) with a share for the neighbours of high ones. images: (rows,), see NEAR."""
    best = functional.max_pool1d(scores.masked_fill(images, 0.0), 2 * NEAR + 1, 1, NEAR)
    return torch.where(images, scores, torch.maximum(scores, NEAR_SHARE * best))


def best_rows(scores: Tensor, visual: Tensor, kept: Kept) -> Tensor:
    """Return the rows with the highest scores, (Hkv, kept rows): first those of images, then the others.

    Each part is ascending. The last rows, and the first ones of text, have the highest scores.

    scores: (Hkv, rows), which are changed. visual: (rows,), which rows count as images'. kept: how many to
        keep of each kind.
    """
    others = (~visual).nonzero()[:, 0]
    scores[:, -RECENT:] = torch.inf
    scores[:, others[:SINKS]] = torch.inf
    parts = []
    for rows, count in ((visual.nonzero()[:, 0], kept.visual), (others, kept.text)):
        best = scores[:, rows].topk(count, dim=1).indices.sort(1).values
        parts.append(rows[best])
    return torch.cat(parts, 1)


def copy_rows(pool: KVPool, move: Compaction, rows: Tensor) -> None:
    """Copy rows of a block table to the first rows of another.

    rows: (layers, Hkv, kept rows), for each head of each layer.
    """
    device, size = pool.pages.device, pool.block_size
    source, target = (torch.tensor(blocks, device=device) for blocks in (move.source, move.target))
    heads, new = torch.arange(rows.shape[1], device=device), torch.arange(rows.shape[2], device=device)
    for pages, chosen in zip(pool.pages, rows.transpose(1, 2), strict=True):  # chosen: (kept rows, Hkv)
        for part in pool.parts(pages):
            numbers = part.view(torch.uint8) if part.dtype.is_floating_point and part.itemsize == 1 else part
            found = numbers[source[chosen // size], chosen % size, :, heads]  # (kept rows, Hkv, 2, ...)
            numbers[target[new // size], new % size] = found.transpose(1, 2)
