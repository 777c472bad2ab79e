"""Finds which rows of a step see which images, for layers with cross-attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fovea.engine.layers.step import ImageRows
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import ImageSpan
from fovea.kernels.attention import AttentionPlan, Chunk


def image_rows(
    work: Sequence[Work], keys_values: Callable[[ImageSpan], tuple[Tensor, ...]]
) -> tuple[ImageRows, ...]:
    """Return the rows of a step that see images.

    keys_values: returns the keys and values of an image, see `ImageRows`.
    """
    found, base = [], 0
    for item in work:
        for start, stop, spans in visible_images(item.seq.spans, item.start, item.stop):
            parts = [keys_values(span) for span in spans]
            joined = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
            rows = range(base + start - item.start, base + stop - item.start)
            found.append(_rows(rows, joined))
        base += item.count
    return tuple(found)


def _rows(rows: range, keys_values: tuple[Tensor, ...]) -> ImageRows:
    """The rows and the plan of their attention, which all layers share."""
    states, device = len(keys_values[0]), keys_values[0].device
    table = torch.zeros(1, dtype=torch.int64, device=device)
    limits = torch.tensor([[0, states]], device=device).repeat(len(rows), 1)
    chunk = Chunk(0, len(rows), states - len(rows), table, limits)
    numbers = torch.arange(rows.start, rows.stop, device=device)
    return ImageRows(numbers, AttentionPlan(table[:0], (), (chunk,)), keys_values)


def visible_images(
    spans: Sequence[ImageSpan], start: int, stop: int
) -> Iterator[tuple[int, int, tuple[ImageSpan, ...]]]:
    """Yield (first position, position after the last, images) for positions that see the same images.

    A token sees the newest image that is not after it, and the images whose tokens stand directly before that
    one. (The token of an image sees this image.) Positions that see no image are left out.
    """
    for number, span in enumerate(spans):
        end = spans[number + 1].start if number + 1 < len(spans) else stop
        first, last = max(span.start, start), min(end, stop)
        if first < last:
            begin = number
            while begin and spans[begin - 1].end == spans[begin].start:
                begin -= 1
            yield first, last, tuple(spans[begin : number + 1])
