"""Checks what is handed to C++, which reads any address that it is given.

Types, shapes and places in memory are checked in every call. The numbers inside a plan (blocks, lengths,
rows) are checked once per plan, because all layers of a step share it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from ctypes import c_int64, c_void_p
from typing import overload

import torch
from torch import Tensor

from fovea.kernels import NO_SLOT
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes
from fovea.kernels.pages import KV, SCALE
from fovea.kernels.states import RunTable

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
ANY = -1
REMEMBERED = 8
"""Plans that are remembered: one per KV group of a step, its states, and images of cross-attention."""


@overload
def address(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int: ...
@overload
def address(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None: ...
def address(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Return the address of a tensor's values; None, a null pointer, if there is no tensor.

    Raises ValueError unless the tensor is on the CPU, contiguous, and of that type and shape.

    shape: ANY stands for any length.
    """
    if tensor is None:
        return None
    fits = tensor.shape == shape or _fits(tensor.shape, shape)
    if not fits or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"the C++ kernels need a contiguous tensor of {dtype} {list(shape)} on the CPU, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
        )
    return tensor.data_ptr()


def _fits(lengths: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape is the wanted one, in which ANY stands for any length."""
    pairs = zip(wanted, lengths, strict=False)
    return len(lengths) == len(wanted) and all(want in (ANY, length) for want, length in pairs)


class PagesStruct(ctypes.Structure):
    """`Pages` of cpu/kernels.h."""

    _fields_ = [("data", c_void_p), ("page", c_int64), ("block", c_int64), ("quantized", c_int64)]


def pages_struct(kv: KV, kv_heads: int, dim: int) -> PagesStruct:
    """Return the pages of one layer for the C++ kernels. The tensors must live as long as it is used.

    Raises ValueError unless they are on the CPU, of that shape, and bfloat16, or int8 with scales in place.
    """
    if isinstance(kv, Tensor):
        data = address(kv, BF16, ANY, ANY, 2, kv_heads, dim)
        return PagesStruct(data, kv[:1].nbytes, kv.shape[1], 0)
    levels, scales, size = kv.levels, kv.scales, kv.shape[1]
    sides, count = (size, 2, kv_heads), size * 2 * kv_heads * dim
    page = count + count // dim * SCALE.itemsize
    fits = (
        levels.shape[1:] == (*sides, dim)
        and scales.shape == levels.shape[:-1]
        and levels[0].is_contiguous()
        and scales[0].is_contiguous()
        and scales.data_ptr() == levels.data_ptr() + count
        and (len(levels) == 1 or (levels.stride(0), SCALE.itemsize * scales.stride(0)) == (page, page))
    )
    if not fits or levels.dtype is not torch.int8 or scales.dtype is not SCALE or not levels.is_cpu:
        raise ValueError(
            f"the C++ kernels need int8 pages (blocks, {size}, 2, {kv_heads}, {dim}) on the CPU, each with "
            f"its scales behind it, got {levels.dtype} {list(levels.shape)} with strides "
            f"{list(levels.stride())} and {scales.dtype} {list(scales.shape)} on {levels.device}"
        )
    return PagesStruct(levels.data_ptr(), page, size, 1)


def check_numbers(name: str, numbers: Tensor, least: int, most: int) -> None:
    """Raise ValueError unless all numbers are from `least` to `most`. name: names them in the message."""
    if not numbers.numel():
        return
    array = numbers.numpy()
    low, high = (array, array) if array.size == 1 else (array.min(), array.max())
    if low < least or high > most:
        raise ValueError(f"{name} must be from {least} to {most}, got {int(low)} to {int(high)}")


class PlanChecks:
    """Checks plans, each only once within a step, because all its layers pass the same ones."""

    def __init__(self) -> None:
        self._plans: deque[tuple[object, tuple[int, ...]]] = deque(maxlen=REMEMBERED)

    def attention(self, plan: AttentionPlan, rows: int, kv: KV) -> None:
        """Check a plan as `check_plan` does, unless it was.

        kv: (blocks, block_size, 2, kv_heads, head_dim).
        """
        blocks, block_size = kv.shape[:2]
        if self._is_new(plan, rows, blocks, block_size):
            check_plan(plan, rows, blocks, block_size)

    def states(self, table: RunTable, rows: int, slots: int) -> None:
        """Check the runs of layers with a state as `check_runs` does, unless they were."""
        if self._is_new(table, rows, slots):
            check_runs(table, rows, slots)

    def _is_new(self, plan: object, *sizes: int) -> bool:
        if any(known is plan and those == sizes for known, those in self._plans):
            return False
        self._plans.append((plan, sizes))
        return True


def check_plan(plan: AttentionPlan, rows: int, blocks: int, block_size: int) -> None:
    """Raise ValueError if the plan would make the kernels read or write outside of rows or KV.

    Slots are checked where keys are written.

    rows: rows of the step. blocks, block_size: sizes of the KV pool.
    """
    for group in plan.decodes:
        _check_decodes(group, rows, blocks, block_size)
    for chunk in plan.chunks:
        _check_chunk(chunk, rows, blocks, block_size)


def _check_decodes(group: Decodes, rows: int, blocks: int, block_size: int) -> None:
    count, width = group.tables.shape
    if not 0 <= group.row <= rows - count:
        raise ValueError(f"{count} decodes from row {group.row} on are more than the {rows} rows of the step")
    address(group.tables, I64, count, width)
    address(group.lengths, I64, count)
    check_numbers("blocks of decodes", group.tables, 0, blocks - 1)
    check_numbers("lengths of contexts", group.lengths, 1, width * block_size)
    if group.firsts is not None:
        address(group.firsts, I64, count)
        check_numbers("first tokens of windows", group.firsts, 0, width * block_size)
        check_numbers("lengths of windows", group.lengths - group.firsts, 1, width * block_size)
    if group.shared is not None:
        if group.firsts is not None:
            raise ValueError("rows with a window cannot share their first blocks")
        members, lengths = group.shared.members, group.shared.lengths
        address(members, I64, ANY, ANY)
        address(lengths, I64, len(members))
        check_numbers("rows of prefix groups", members, -1, count - 1)
        inside = members >= 0
        sharing = members[inside]
        if len(set(sharing.tolist())) != len(sharing):
            raise ValueError(f"a row is in two prefix groups: {members.tolist()}")
        own = group.lengths[sharing] - lengths[:, None].expand_as(members)[inside]
        check_numbers("tokens that a row does not share", own, 0, width * block_size)


def _check_chunk(chunk: Chunk, rows: int, blocks: int, block_size: int) -> None:
    last = chunk.first + chunk.count
    if not 0 <= chunk.row <= rows - chunk.count:
        raise ValueError(
            f"a chunk of {chunk.count} rows from row {chunk.row} on is more than the {rows} rows of the step"
        )
    address(chunk.table, I64, ANY)
    check_numbers("blocks of a chunk", chunk.table, 0, blocks - 1)
    if last > len(chunk.table) * block_size:
        raise ValueError(
            f"a chunk that ends at token {last} does not fit into {len(chunk.table)} blocks of {block_size}"
        )
    if chunk.limits is not None:
        address(chunk.limits, I64, chunk.count, 2)
        check_numbers("first keys of a chunk's rows", chunk.limits[:, 0], 0, last)
        check_numbers("ends of the keys of a chunk's rows", chunk.limits[:, 1], 1, last)
        check_numbers("numbers of keys of a chunk's rows", chunk.limits[:, 1] - chunk.limits[:, 0], 1, last)
    elif chunk.first < 0:
        raise ValueError(f"a chunk begins at token {chunk.first}")


def check_runs(table: RunTable, rows: int, slots: int) -> None:
    """Raise ValueError if the runs would make the kernels read or write outside of rows or states.

    rows: rows of the step. slots: number of states.
    """
    address(table.starts, I64, ANY)
    address(table.runs, I64, ANY, 5)
    address(table.saves, I64, ANY, 2)
    check_numbers("first runs of sequences", table.starts.diff(), 0, len(table.runs))
    check_numbers("ends of the runs of sequences", table.starts[-1:], len(table.runs), len(table.runs))
    check_numbers("slots of saved states", table.saves[:, 1], 0, slots - 1)
    saves = table.saves[:, 0].tolist()
    for row, count, source, first, last in table.runs.tolist():
        inside = row >= 0 and 0 < count <= rows - row and NO_SLOT <= source < slots
        tokens = saves[first:last] if 0 <= first <= last <= len(saves) else [0]
        if not inside or tokens != sorted(tokens) or any(not 0 < token <= count for token in tokens):
            raise ValueError(
                f"a run of {count} tokens from row {row} of {rows} on, from state {source} of {slots}, "
                f"cannot save states after {tokens} tokens"
            )
