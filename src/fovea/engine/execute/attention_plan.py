"""Plans a step for the decoder: KV slots of its rows, rows that are computed together, states, images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.execute.decode_rows import table
from fovea.engine.layers.config import DecoderConfig, KVGroup
from fovea.engine.layers.step import DecoderPlan, ImageRows
from fovea.engine.schedule.decode_batches import (
    DecodeInputs,
    GroupInputs,
    find_prefix_groups,
    first_block,
    write_prefix_groups,
)
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import ImageSpan
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes, Pieces, PrefixGroups
from fovea.kernels.base import Kernels
from fovea.kernels.pieces import Cutting, cut
from fovea.kernels.states import StatePlan, StateRun, state_plan
from fovea.kernels.transfer import to_device

Array = NDArray[np.int64]
PADDING_RATIO, PADDING_SLACK = 2, 64
"""Limits of a group of decodes that share a padded length: ratio of their contexts, and extra tokens."""


class DecoderPlanner:
    """Turns the work of a step into the plan that mixers read.

    kernels: the kernels in use.
    config: shape of the decoder.
    block_size: tokens per KV block.
    device, dtype: of the tensors.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: DecoderConfig,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        self._stateful = config.stateful
        self._reads_apart = config.writing_layers < len(config.layers)
        self._groups = [
            GroupPlanner(
                kernels, group, config.whole_images > 0 and not group.causal, block_size, device, dtype
            )
            for group in config.kv_groups
        ]

    def plan(
        self, work: Sequence[Work], read: Sequence[int] = (), decodes: DecodeInputs | None = None
    ) -> DecoderPlan:
        """Return the plan of a step.

        work: single tokens first, as `by_length` sorts them.
        read: numbers of the rows that are returned. Layers after `DecoderConfig.writing_layers` get a plan of
            these rows alone.
        decodes: inputs of a step that only decodes; None: the step also computes prompt tokens.
        """
        inputs = [None] * len(self._groups) if decodes is None else decodes.groups
        attention = tuple(group.plan(work, own) for group, own in zip(self._groups, inputs, strict=True))
        singles = _singles(work, read) if self._reads_apart else []
        apart = tuple(group.plan(singles) for group in self._groups) if singles else attention
        return DecoderPlan(
            attention, self._states(work) if self._stateful else None, apart if self._reads_apart else ()
        )

    def _states(self, work: Sequence[Work]) -> StatePlan:
        """The runs of each sequence: its known tokens, and then its drafts one by one."""
        sequences: dict[str, list[tuple[int, StateRun]]] = {}
        row = 0
        for item in work:
            state = item.state
            assert state is not None
            saves = tuple((position - item.start, slot) for position, slot in state.saves)
            run = StateRun(row, item.count, state.source, saves)
            sequences.setdefault(item.seq.id, []).append((item.start, run))
            row += item.count
        runs = [[run for _, run in sorted(parts, key=_first)] for parts in sequences.values()]
        return state_plan(runs, self._device)


def most_shared_rows(kernels: Kernels, group: KVGroup) -> int:
    """Return how many decodes at most read common first blocks together in a KV group; 0: none do."""
    if group.window is not None or not group.layers:
        return 0
    return kernels.shared_rows(group.heads.query // group.heads.kv)


class GroupPlanner:
    """Plans the attention of one KV group.

    group: the group. whole_images: the tokens of an image see each other.
    """

    def __init__(
        self,
        kernels: Kernels,
        group: KVGroup,
        whole_images: bool,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._window = group.window
        self._whole_images = whole_images
        self._block_size, self._device, self._dtype = block_size, device, dtype
        self._in_place = kernels.attends_in_place(group.heads.dim, window=group.window is not None)
        self._cutting = kernels.cutting(group.heads) if self._in_place else None
        self._shared_rows = most_shared_rows(kernels, group)
        self._least_rows, self._sequences = kernels.least_shared_rows, kernels.sharing_rounds

    def plan(self, work: Sequence[Work], decodes: GroupInputs | None = None) -> AttentionPlan:
        """Return the plan of a step.

        work: single tokens first, as `by_length` sorts them.
        decodes: inputs of a step that only decodes; None: the step also computes prompt tokens, or `work` is
            a part of it.
        """
        if decodes is not None and self._in_place:
            plan = self._padded(0, np.ascontiguousarray(decodes.tables), decodes.lengths)
            return AttentionPlan(self._tensor(decodes.slots), (plan,), ())
        singles = next((i for i, item in enumerate(work) if item.count != 1), len(work))
        chunks, row = [], singles
        for item in work[singles:]:
            chunks.append(self._chunk(item, row))
            row += item.count
        places = slots(work, self._block_size, windowed=self._window is not None)
        return AttentionPlan(self._tensor(places), self._groups(work[:singles]), tuple(chunks))

    def _chunk(self, item: Work, row: int) -> Chunk:
        begin, dropped = self._begin(item.start), item.seq.dropped if self._window is None else 0
        blocks = table(item, windowed=self._window is not None)
        blocks = blocks[begin : -(-(item.stop - dropped) // self._block_size)]
        before = begin * self._block_size + dropped
        limits = self._limits(item)
        return Chunk(
            row,
            item.count,
            item.start - before,
            self._tensor(np.maximum(blocks, 0)),  # no row sees blocks that are GONE
            None if limits is None else self._tensor(np.maximum(limits - before, 0)),
        )

    def _limits(self, item: Work) -> Array | None:
        """First token that each row of a chunk sees, and the one after the last, (count, 2).

        None: each row sees all tokens up to itself. The tokens of an image see the image to its end.
        """
        spans = item.seq.spans_between(item.start, item.stop) if self._whole_images else ()
        if self._window is None and not spans:
            return None
        ends = np.arange(item.start, item.stop) + 1
        limits = np.stack((np.zeros_like(ends), ends), axis=1)
        if self._window is not None:
            limits[:, 0] = np.maximum(0, ends - self._window)
        for span in spans:
            inside = slice(max(span.start, item.start) - item.start, span.end - item.start)
            limits[inside, 1] = span.end
        return limits

    def _begin(self, position: int) -> int:
        """Number of the block with which the table for the token at `position` begins."""
        return 0 if self._window is None else int(first_block(position, self._window, self._block_size))

    def _groups(self, singles: Sequence[Work]) -> tuple[Decodes, ...]:
        if not self._in_place:
            groups, first = [], 0
            for group in group_by_length(singles):
                groups.append(self._decodes(group, first))
                first += len(group)
            return tuple(groups)
        return (self._decodes(singles, 0),) if singles else ()

    def _decodes(self, work: Sequence[Work], row: int) -> Decodes:
        begins = np.array([self._begin(item.start) for item in work])
        stops = [item.stop for item in work] if self._window is not None else [item.rows for item in work]
        lengths = np.array(stops) - begins * self._block_size
        ends = begins - (-lengths // self._block_size)
        tables = np.zeros((len(work), -(-int(lengths.max()) // self._block_size)), dtype=np.int64)
        for number, item in enumerate(work):
            blocks = table(item, windowed=self._window is not None)
            blocks = blocks[begins[number] : ends[number]]
            tables[number, : len(blocks)] = np.maximum(blocks, 0)
        return self._padded(row, tables, lengths)

    def _padded(self, row: int, tables: Array, lengths: Array) -> Decodes:
        """Return the plan of decodes from their block tables, padded to the longest, and their lengths."""
        firsts = None if self._window is None else np.maximum(0, lengths - self._window)
        mask = self._mask(lengths, firsts) if not self._in_place else None
        shared = self._prefix_groups(tables, lengths) if self._shared_rows else None
        pieces = None
        if self._cutting is not None:
            pieces = self._pieces(self._cutting, lengths, firsts, shared)
        return Decodes(
            row,
            self._tensor(tables),
            self._tensor(lengths),
            int(lengths.max()),
            mask,
            None if shared is None else PrefixGroups(*map(self._tensor, shared)),
            None if firsts is None else self._tensor(firsts),
            pieces,
        )

    def _pieces(
        self, rule: Cutting, lengths: Array, firsts: Array | None, shared: tuple[Array, Array, Array] | None
    ) -> Pieces:
        """Cut the contexts of decodes. The arrays come to the device as one copy."""
        room = rule.room(len(lengths), int(lengths.max()), shared=shared is not None)
        if shared is not None:
            found = cut(rule, shared[0], lengths, room, *shared[1:])
        else:
            found = cut(rule, np.zeros_like(lengths) if firsts is None else firsts, lengths, room)
        arrays = found.arrays()
        flat = self._tensor(np.concatenate([array.ravel() for array in arrays.values()]))
        parts = torch.split(flat, [array.size for array in arrays.values()])
        views = {name: part.view(arrays[name].shape) for name, part in zip(arrays, parts, strict=True)}
        return Pieces.of(views, rule, found.results)

    def _mask(self, lengths: Array, firsts: Array | None) -> Tensor | None:
        """Mask of contexts that are padded to the longest, (B, 1, 1, L); None: all are of that length."""
        places = np.arange(int(lengths.max()))[None, :]
        allowed = places < lengths[:, None]
        if firsts is not None:
            allowed &= places >= firsts[:, None]
        if allowed.all():
            return None
        mask = torch.zeros(allowed.shape, dtype=self._dtype)
        hidden = ~torch.from_numpy(allowed)
        return to_device(mask.masked_fill_(hidden, float("-inf"))[:, None, None], self._device)

    def _prefix_groups(self, tables: Array, lengths: Array) -> tuple[Array, Array, Array] | None:
        """Return the arrays of `PrefixGroups`; None: no rows share a prefix."""
        groups = find_prefix_groups(
            tables,
            lengths,
            self._block_size,
            self._shared_rows,
            least_rows=self._least_rows,
            sequences=self._sequences,
        )
        if not groups:
            return None
        starts = np.empty(len(tables), dtype=np.int64)
        members = np.empty((len(groups), self._shared_rows), dtype=np.int64)
        prefixes = np.empty(len(groups), dtype=np.int64)
        write_prefix_groups(groups, self._block_size, starts, members, prefixes)
        return starts, members, prefixes

    def _tensor(self, array: Array) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)


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
    limits = torch.zeros((len(rows), 2), dtype=torch.int64, device=device)
    limits[:, 1] = states
    chunk = Chunk(0, len(rows), states - len(rows), table, limits)
    numbers = torch.arange(rows.start, rows.stop, device=device)
    return ImageRows(numbers, AttentionPlan(table[:0], (), (chunk,)), keys_values)


def visible_images(
    spans: Sequence[ImageSpan], start: int, stop: int
) -> Iterator[tuple[int, int, tuple[ImageSpan, ...]]]:
    """Yield (first position, position after the last, images) for positions that see the same images.

    A token sees the newest image that is not after it, and the images whose tokens come directly before that
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


def _singles(work: Sequence[Work], rows: Sequence[int]) -> list[Work]:
    """The work of single rows of a step, each by itself."""
    ends = np.cumsum([item.count for item in work])
    numbers = np.searchsorted(ends, rows, side="right")
    return [
        Work(work[number].seq, work[number].stop - int(ends[number]) + row, 1)
        for number, row in zip(numbers, rows, strict=True)
    ]


def _first(part: tuple[int, StateRun]) -> int:
    return part[0]


def slots(work: Sequence[Work], block_size: int, *, windowed: bool = False) -> Array:
    """Return the KV slot of each row of the step: block * block_size + offset. windowed: see `table`."""
    parts = []
    for item in work:
        blocks = np.asarray(table(item, windowed=windowed), dtype=np.int64)
        places = np.arange(item.start, item.stop) - (0 if windowed else item.seq.dropped)
        parts.append(blocks[places // block_size] * block_size + places % block_size)
    return np.concatenate(parts)


def by_length(work: Sequence[Work]) -> list[Work]:
    """Sort the work as `group_by_length` needs it: single tokens first, from short contexts to long ones."""
    return sorted(work, key=lambda item: (item.count != 1, item.start if item.count == 1 else 0))


def group_by_length(work: Sequence[Work]) -> list[list[Work]]:
    """Split sorted single tokens into groups of similar context length.

    A padded position costs as much as a real key, so the lengths of a group should not differ much. The
    longest context of a group is at most PADDING_RATIO times the shortest, plus PADDING_SLACK.
    """
    groups: list[list[Work]] = []
    for item in work:
        if groups and item.stop <= PADDING_RATIO * groups[-1][0].stop + PADDING_SLACK:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
