"""Chooses the keys and values that sequences keep, and copies them (`engine.keep`).

Every KV head of every layer keeps tokens of its own. All keep equally many, so they share one block table.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from fovea.engine.layers.step import DecoderMemory
from fovea.engine.schedule.plan import Work
from fovea.kernels.pages import KVPool, gather
from fovea.kernels.transfer import to_device

NEAR, NEAR_SHARE = 7, 0.25
"""A row of text gets at least this share of the best score of text within so many rows. So the words around
a fact are kept with it, as in SnapKV. In images each token counts for itself."""


class KeptRows:
    """Remembers which rows sequences keep, from the step that decides until they are copied.

    config: shape of the decoder. memory: its keys and values.
    """

    def __init__(self, config: DecoderConfig, memory: DecoderMemory) -> None:
        self._memory = memory
        self._pool = memory.kv[0]  # the group without a window, which comes first
        layers = config.kv_groups[0].layers if config.kv_groups[0].window is None else ()
        self._places = {layer: place for place, layer in enumerate(layers)}
        shapes = {layer: config.layers[layer].mixer for layer in layers}
        self._scales = {layer: shape.scale for layer, shape in shapes.items() if isinstance(shape, Attention)}
        self._chosen: dict[str, Tensor] = {}

    def watch(self, work: Sequence[Work]) -> Watch | None:
        """Return an object that records queries of a step; None: nothing is decided in it that needs them."""
        ends = accumulate(item.count for item in work)
        rows = [
            (item, slice(end - item.stop + item.seq.decides_from(item.stop), end))
            for item, end in zip(work, ends, strict=True)
            if item.kept is not None and item.seq.keep is not None and item.seq.keep.method != "window"
        ]
        return Watch(self._places, rows) if rows else None

    def choose(self, work: Sequence[Work], watch: Watch | None) -> None:
        """Decide what the sequences of a step keep.

        watch: has noted the step's queries.
        """
        for item in work:
            if item.kept is not None:
                queries = {} if watch is None else watch.queries.get(item.seq.id, {})
                self._chosen[item.seq.id] = self._rows_of(item, item.kept, queries)

    def _rows_of(self, item: Work, kept: Kept, queries: dict[int, Tensor]) -> Tensor:
        """Return the rows that a sequence keeps, (layers, Hkv, kept rows)."""
        device, heads = self._pool.pages.device, self._pool.heads
        if not queries:
            last = torch.arange(item.rows - kept.rows + SINKS, item.rows, device=device)
            rows = torch.cat((torch.arange(SINKS, device=device), last))
            return rows.expand(len(self._places), heads, -1)
        images = to_device(torch.from_numpy(visual_rows(item)), device)
        divides = item.seq.keep is not None and item.seq.keep.method in BY_KIND
        apart = images if divides else torch.zeros_like(images)
        blocks = torch.as_tensor(table(item)[: -(-item.rows // self._pool.block_size)], device=device)
        count = len(next(iter(queries.values())))
        places = torch.arange(item.rows - count, item.rows, device=device)
        chosen = []
        for layer, query in queries.items():
            keys = gather(self._memory.layer_kv(layer), blocks, query.dtype).flatten(0, 1)[: item.rows, 0]
            scores = spread(attention_scores(query, places, keys, self._scales[layer]), images)
            chosen.append(best_rows(scores, apart, kept))
        return torch.stack(chosen)

    def compact(self, move: Compaction) -> None:
        """Copy the rows that a sequence keeps to their blocks."""
        copy_rows(self._pool, move, self._chosen.pop(move.owner))

    def forget(self, sequence_id: str) -> None:
        self._chosen.pop(sequence_id, None)


class Watch:
    """Records the queries of the rows that decide in a step.

    queries: by sequence id and layer, (w, heads, head_dim), of the w tokens that decide.
    """

    def __init__(self, layers: dict[int, int], rows: Sequence[tuple[Work, slice]]) -> None:
        """layers: the layers whose queries are noted. rows: of each sequence."""
        self._layers, self._rows = layers, rows
        self.queries: dict[str, dict[int, Tensor]] = {item.seq.id: {} for item, _ in rows}

    def __call__(self, layer: int, query: Tensor) -> None:
        if layer in self._layers:
            for item, rows in self._rows:
                self.queries[item.seq.id][layer] = query[rows].clone()


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
