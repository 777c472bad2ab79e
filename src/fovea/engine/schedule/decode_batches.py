"""Batches of decodes: padded to a few sizes for CUDA graphs, and rows that share a prefix.

A replay repeats the recorded launches on the same memory. The inputs that change from step to step (ids,
positions, block tables) are integers. All of them are in one buffer, so one copy brings them to the device.
Layers with a sliding window are a KV group of their own, with a table, slots and lengths of their own.
Rows after the last sequence are padding: they compute a token that is not used, and they read and write a
scrap block. In layers with a state they begin at zero and write a scrap slot.

Rows whose block tables hold the same block at the same place share all tokens before it, because a full block
has one content. One read of these blocks serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fovea.kernels import NO_SLOT
from fovea.kernels.pieces import Cutting, cut

MOST_ROWS = 256
"""Larger batches are not padded: they keep the device busy for longer than their launches take."""
PANEL = 64
"""Keys that the C++ kernels handle together."""
Array = NDArray[np.int64]


class GroupInputs(NamedTuple):
    """The inputs of one KV group in a step of B decodes.

    slots: (B,) KV slots that the tokens are written to.
    tables: (B, blocks of the longest context) block tables. Entries after a row's context mean nothing, but
        are numbers of blocks.
    lengths: (B,) context lengths, the new token included.
    firsts: (B,) first token that each row sees; None: all. Where layers have a sliding window, tables and
        these numbers begin at the block that `first_block` returns.
    """

    slots: Array
    tables: Array
    lengths: Array
    firsts: Array | None = None


class DecodeInputs(NamedTuple):
    """The inputs of a step of B decodes. They are valid until the next one.

    ids: (B,) token ids.
    positions: (B,), or (3, B) with M-RoPE.
    groups: the inputs of each KV group.
    states: (B, 2) slots of each row's state before and after its token; None: the model has no states, or a
        row follows another one of its sequence (a draft), or its state is saved twice (a checkpoint).
    """

    ids: Array
    positions: Array
    groups: tuple[GroupInputs, ...]
    states: Array | None = None


@dataclass(frozen=True, slots=True)
class GroupPadding:
    """The shapes of the inputs of one KV group.

    width: blocks of the longest context, the width of the block table.
    scrap: number of the block that padded rows read and write.
    windowed: the layers have a sliding window.
    cutting: how the kernels cut contexts into pieces; None: they divide the work themselves.
    """

    width: int
    scrap: int
    windowed: bool = False
    cutting: Cutting | None = None


@dataclass(frozen=True, slots=True)
class Padding:
    """The batch sizes to which decodes are padded, and the shapes of their inputs.

    sizes: batch sizes, ascending.
    axes: coordinates of a position (M-RoPE); 0 for plain positions.
    groups: each KV group.
    shared_rows: most rows of a prefix group; 0 for kernels that cannot share prefixes. Only in the first KV
        group rows share prefixes.
    least_rows: fewest rows of a prefix group.
    block_size: tokens per block.
    sequences: see `find_prefix_groups`.
    launch_only: never record graphs, even on CUDA.
    scrap_state: number of the slot that takes the states of padded rows; None: the model has no states.
    """

    sizes: tuple[int, ...]
    axes: int
    groups: tuple[GroupPadding, ...]
    shared_rows: int
    least_rows: int
    block_size: int
    sequences: bool = False
    launch_only: bool = False
    scrap_state: int | None = None

    def fit(self, pools: Sequence[int], context: int, states: int = 0) -> Padding:
        """Return the same padding for pools and a longest context.

        pools: blocks of each KV group's pool. The block after them takes the KV of padded rows.
        states: slots for states. The slot after them takes the states of padded rows.
        """
        width = -(-context // self.block_size)
        groups = (
            replace(group, width=min(width, group.width), scrap=scrap)
            for group, scrap in zip(self.groups, pools, strict=False)
        )
        scrap = None if self.scrap_state is None else states
        return replace(self, groups=tuple(groups), scrap_state=scrap)

    def batch(self, inputs: DecodeInputs) -> int | None:
        """The batch size for a step that decodes; None if it cannot be padded."""
        if self.scrap_state is not None and inputs.states is None:
            return None
        return self.size(len(inputs.ids))

    def size(self, rows: int) -> int | None:
        """The batch size for a step that decodes so many rows; None if there are too many."""
        return next((size for size in self.sizes if size >= rows), None)

    def batches(self) -> list[tuple[int, bool]]:
        """Every batch as (rows, whether rows share prefixes), the largest first."""
        return [
            (rows, shared)
            for rows in reversed(self.sizes)
            for shared in (False, True)
            if not shared or (self.shared_rows and rows >= self.least_rows)
        ]

    def layout(self, rows: int, *, shared: bool) -> Layout:
        """Return the layout of a batch. The arrays of KV group 0 are named "slots.0" and so on."""
        shapes: dict[str, tuple[int, ...]] = {
            "ids": (rows,), "positions": (self.axes, rows) if self.axes else (rows,)
        }  # fmt: skip
        for number, group in enumerate(self.groups):
            own: dict[str, tuple[int, ...]] = {
                "slots": (rows,), "lengths": (rows,), "tables": (rows, group.width)
            }  # fmt: skip
            groups = rows // self.least_rows if shared and not number else 0
            if group.windowed:
                own["firsts"] = (rows,)
            if groups:
                own |= {"starts": (rows,), "members": (groups, self.shared_rows), "prefixes": (groups,)}
            if group.cutting is not None:
                own |= group.cutting.shapes(rows, group.width * self.block_size, groups, self.least_rows)
            shapes |= {f"{name}.{number}": shape for name, shape in own.items()}
        if self.scrap_state is not None:
            shapes |= {"state_starts": (rows + 1,), "state_runs": (rows, 5), "state_saves": (rows, 2)}
        return Layout(shapes)

    def prefix_groups(self, inputs: DecodeInputs) -> list[PrefixGroup]:
        """Return the rows of a step that read common first blocks together."""
        whole = inputs.groups[0]
        return find_prefix_groups(
            whole.tables,
            whole.lengths,
            self.block_size,
            self.shared_rows,
            least_rows=self.least_rows,
            sequences=self.sequences,
        )


T = TypeVar("T")


def of_group(parts: dict[str, T], number: int) -> dict[str, T]:
    """Return the parts of a layout that belong to one KV group, by their names without its number."""
    return {name[:-2]: part for name, part in parts.items() if name.endswith(f".{number}")}


def first_block(position: Any, window: int, block_size: int) -> Any:
    """Return the number of the block with which the table for the token at `position` begins.

    It is the first block that the token sees, or one before it: the order in which the C++ kernels add the
    sums of a row depends on the place of each key in the table modulo PANEL.

    position: a number or an array of them.
    """
    first = np.maximum(0, position - window + 1) // block_size
    return first - first % table_stride(block_size)


def table_stride(block_size: int) -> int:
    """Return the number of blocks of which the beginning of a window's table is a multiple."""
    return PANEL // math.gcd(PANEL, block_size)


def window_width(window: int, block_size: int) -> int:
    """Return the most blocks in the table of a row with a sliding window."""
    return (window - 1) // block_size + 1 + table_stride(block_size)


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes of arrays that lie one after the other in a flat buffer of `total` numbers.

    shapes: shape of each array by its name, in the order of the buffer.
    """

    shapes: dict[str, tuple[int, ...]]

    @property
    def total(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def parts(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """The slice of the buffer and the shape of each array, by name."""
        parts, at = {}, 0
        for name, shape in self.shapes.items():
            parts[name] = (slice(at, at + math.prod(shape)), shape)
            at += math.prod(shape)
        return parts

    def arrays(self, buffer: Array) -> dict[str, Array]:
        return {name: buffer[where].reshape(shape) for name, (where, shape) in self.parts().items()}


def padded_sizes(most: int, least: int = 1) -> tuple[int, ...]:
    """Return the batch sizes for at most `most` rows: 1, 2, 4, 8, 16, 24, 32, 48, 64, ...

    The largest one holds `most` rows, or is MOST_ROWS. From 16 rows on, at most a third of a batch is
    padding.

    least: the smallest size. Libraries of products may add in another order for another number of rows, so
        with a larger one a row has the same bits beside a few others, its own drafts for example.
    """
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < MOST_ROWS:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    largest = next((size for size in sizes if size >= most), MOST_ROWS)
    return tuple(size for size in sizes if least <= size <= max(least, largest))


def fill(
    arrays: dict[str, Array], padding: Padding, inputs: DecodeInputs, prefixes: Sequence[PrefixGroup] = ()
) -> None:
    """Write a step's numbers into the arrays of a batch, and padding after them.

    prefixes: rows that share a prefix. They are written if the batch has arrays for them.
    """
    count = len(inputs.ids)
    _pad(arrays["ids"], inputs.ids, 0)
    _pad(arrays["positions"], inputs.positions, 0)
    for number, (group, own) in enumerate(zip(padding.groups, inputs.groups, strict=True)):
        parts = of_group(arrays, number)
        _pad(parts["slots"], own.slots, group.scrap * padding.block_size)
        _pad(parts["lengths"], own.lengths, 1)
        parts["tables"][:count, : own.tables.shape[1]] = own.tables
        parts["tables"][count:, 0] = group.scrap
        starts = np.zeros(count, dtype=np.int64)
        if own.firsts is not None:
            _pad(parts["firsts"], own.firsts, 0)
            starts = own.firsts
        if "members" in parts:
            write_prefix_groups(
                prefixes, padding.block_size, parts["starts"], parts["members"], parts["prefixes"]
            )
            starts = parts["starts"][:count]
        if group.cutting is not None:
            longest = group.width * padding.block_size
            room = group.cutting.room(len(parts["slots"]), longest, shared="members" in parts)
            shared = parts.get("members"), parts.get("prefixes")
            cut(group.cutting, starts, own.lengths, room, *shared).write(parts)
    if padding.scrap_state is not None:
        assert inputs.states is not None
        _write_runs(arrays, inputs.states, padding.scrap_state)


def _write_runs(arrays: dict[str, Array], slots: Array, scrap: int) -> None:
    """Write the arrays of a `kernels.states.RunTable` with one run of one token for each row of a batch.

    slots: (B, 2) slots before and after the tokens. scrap: slot that the rows after them write.
    """
    runs, saves = arrays["state_runs"], arrays["state_saves"]
    numbers = np.arange(len(runs) + 1)
    arrays["state_starts"][:] = numbers
    runs[:, 0] = runs[:, 3] = numbers[:-1]
    runs[:, 4] = numbers[1:]
    runs[:, 1] = saves[:, 0] = 1
    _pad(runs[:, 2], slots[:, 0], NO_SLOT)
    _pad(saves[:, 1], slots[:, 1], scrap)


def _pad(array: Array, values: Array, rest: int) -> None:
    """Write values to the beginning of each row of the array, and `rest` after them."""
    count = values.shape[-1]
    array[..., :count], array[..., count:] = values, rest


LEAST_TOKENS = 256
"""Fewest tokens that the rows of a group have in common."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows of a step whose block tables begin with the same blocks.

    rows: the rows, ascending.
    blocks: number of common blocks.
    """

    rows: tuple[int, ...]
    blocks: int


def find_prefix_groups(
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    block_size: int,
    most_rows: int,
    *,
    least_rows: int,
    least_tokens: int = LEAST_TOKENS,
    sequences: bool = False,
) -> list[PrefixGroup]:
    """Group the rows whose contexts begin with the same full blocks; at most B // least_rows groups.

    tables: (B, W) block tables.
    lengths: (B,) tokens of each context. Blocks that a row has not filled are never shared.
    block_size: tokens per block.
    most_rows: most rows of one group; more rows become several of them.
    least_rows: fewest rows of one group.
    least_tokens: fewest tokens that the rows of a group have in common.
    sequences: the rows must end in as many different blocks. So an answer's drafts do not form a group, with
        kernels that would round it otherwise than without drafts.
    """
    first = -(-least_tokens // block_size) - 1
    if most_rows < least_rows or len(tables) < least_rows or tables.shape[1] <= first:
        return []
    full = lengths // block_size
    candidates: dict[int, list[int]] = {}
    for row in np.nonzero(full > first)[0].tolist():
        candidates.setdefault(int(tables[row, first]), []).append(row)
    groups = []
    for candidate in candidates.values():
        for begin in range(0, len(candidate), most_rows):
            rows = candidate[begin : begin + most_rows]
            if sequences and len(set(tables[rows, (lengths[rows] - 1) // block_size].tolist())) < least_rows:
                continue
            if len(rows) >= least_rows:
                groups.append(PrefixGroup(tuple(rows), _common(tables[rows], int(full[rows].min()))))
    return groups


def write_prefix_groups(
    groups: Sequence[PrefixGroup],
    block_size: int,
    starts: NDArray[np.int64],
    members: NDArray[np.int64],
    prefixes: NDArray[np.int64],
) -> None:
    """Write the groups into arrays for the kernels. Unused entries are padding: 0 tokens, and -1 for rows.

    starts: (B,) gets for each row the number of tokens that its group reads together.
    members: (G, R) gets the rows of each group.
    prefixes: (G,) gets the number of tokens of each group.
    """
    starts[:] = prefixes[:] = 0
    members[:] = -1
    for number, group in enumerate(groups):
        members[number, : len(group.rows)] = group.rows
        starts[list(group.rows)] = prefixes[number] = group.blocks * block_size


def _common(tables: NDArray[np.int64], most: int) -> int:
    equal = (tables[:, :most] == tables[0, :most]).all(0)
    return most if equal.all() else int(equal.argmin())
