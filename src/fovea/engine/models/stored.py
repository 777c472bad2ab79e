"""The tensors of a checkpoint as they are stored: their names, types and shapes, and how they are read.

No tensor is in memory twice: each is read from its place in the file into the rows of its parameter. Only if
the type, the device or the layout differs does a tensor pass through a buffer of its own size.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.files import named_file, read_json
from fovea.engine.models.targets import Cut, TensorEntry
from fovea.kernels.codes import Codes

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of values."""
STORED_TYPES = DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Types of the tensors of a safetensors file that can be read."""
ORIGINAL_NAME = "consolidated"
"""Beginning of the names of Mistral's own files, which its repositories hold beside those of transformers."""
SHORT_RUN = 4096
"""Parts of rows that are shorter than this many bytes are read together with what lies between them."""
BUFFER_BYTES = 16 << 20
"""Bytes that are read together then."""
MAX_HEADER = 100 * 1024 * 1024
"""Largest header of a safetensors file that is read, in bytes."""


class StoredWeights(Protocol):
    """The tensors of a checkpoint, whatever its format.

    files: name of each file, for messages, and its tensors. A quantized tensor is one entry with the type and
        shape of its values, even if the file stores codes and scales as tensors of their own.
    quantization: how the weights are quantized, in a few words for users, such as "awq"; "": they are not.
    nbytes: size of the files.
    """

    @property
    def files(self) -> Sequence[tuple[str, Sequence[TensorEntry]]]: ...

    @property
    def quantization(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, file: int, entry: TensorEntry, target: Tensor) -> None:
        """Fill `target`, of the entry's shape and any type, with the values.

        file: number of the file in `files`.
        Raises CheckpointError if they cannot be read.
        """
        ...

    def read_part(self, file: int, entry: TensorEntry, target: Tensor, cut: Cut) -> int:
        """Fill `target` with a part of the values. Returns how many bytes of the file were read for it.

        target: shaped as the entry, with `cut.count` numbers along its axis.
        Raises CheckpointError if they cannot be read.
        """
        ...

    def codes(self, file: int, entry: TensorEntry) -> Codes:
        """Return the codes of a tensor (n, k) whose entry is `coded`. Raises CheckpointError."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


class SafetensorsWeights:
    """Safetensors files, whose tensors are read as they are. Raises CheckpointError for a broken header."""

    quantization = ""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self._headers = [read_entries(path) for path in self.paths]
        self._open: dict[int, BinaryIO] = {}

    @property
    def files(self) -> Sequence[tuple[str, Sequence[TensorEntry]]]:
        return [(str(path), entries) for path, (entries, _) in zip(self.paths, self._headers, strict=True)]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def read(self, file: int, entry: TensorEntry, target: Tensor) -> None:
        dtype = STORED_TYPES[entry.dtype]
        direct = target.dtype is dtype and target.device.type == "cpu" and target.is_contiguous()
        buffer = target if direct else torch.empty(target.shape, dtype=dtype)
        if buffer.nbytes != entry.stop - entry.start:
            raise CheckpointError(f"{self.paths[file]}: {entry.name} is truncated")
        self._read(file, entry, 0, buffer)
        if not direct:
            target.copy_(buffer)

    def read_part(self, file: int, entry: TensorEntry, target: Tensor, cut: Cut) -> int:
        dtype, shape = STORED_TYPES[entry.dtype], entry.shape
        assert shape is not None
        before, after = prod(shape[: cut.axis]), prod(shape[cut.axis + 1 :])
        size, unit = shape[cut.axis], after * dtype.itemsize
        if before * size * unit != entry.stop - entry.start:
            raise CheckpointError(f"{self.paths[file]}: {entry.name} is truncated")
        buffer = torch.empty((before, cut.count, after), dtype=dtype)
        if unit * min(stop - start for start, stop in cut.runs) < SHORT_RUN and before > 1:
            total = self._read_wide(file, entry, buffer, size, cut)
        else:
            total = buffer.nbytes
            for number, rows in enumerate(buffer):
                place = 0
                for start, stop in cut.runs:
                    part = rows[place : place + stop - start]
                    self._read(file, entry, (number * size + start) * unit, part)
                    place += stop - start
        target.copy_(buffer.view(target.shape))
        return total

    def _read_wide(self, file: int, entry: TensorEntry, buffer: Tensor, size: int, cut: Cut) -> int:
        """Read everything between the parts, too, some rows at a time. size: length of the axis."""
        before, _, after = buffer.shape
        row = size * after * buffer.dtype.itemsize
        step = max(1, BUFFER_BYTES // row)
        for first in range(0, before, step):
            rows = torch.empty((min(step, before - first), size, after), dtype=buffer.dtype)
            self._read(file, entry, first * row, rows)
            parts = [rows[:, start:stop] for start, stop in cut.runs]
            buffer[first : first + step] = torch.cat(parts, 1)
        return before * row

    def _read(self, file: int, entry: TensorEntry, offset: int, buffer: Tensor) -> None:
        """Fill a contiguous buffer with bytes of a tensor from `offset` on."""
        if file not in self._open:
            self._open[file] = self.paths[file].open("rb", buffering=0)
        left = memoryview(buffer.reshape(-1).view(torch.uint8).numpy().data)
        place = self._headers[file][1] + entry.start + offset
        while left:
            count = os.preadv(self._open[file].fileno(), [left], place)
            if not count:
                raise CheckpointError(f"{self.paths[file]}: {entry.name} is truncated")
            left, place = left[count:], place + count

    def codes(self, file: int, entry: TensorEntry) -> Codes:
        raise CheckpointError(f"{self.paths[file]}: {entry.name} has no codes")

    def close(self) -> None:
        for source in self._open.values():
            source.close()
        self._open.clear()


@dataclass(frozen=True, slots=True)
class Shards:
    """The weight files of a checkpoint.

    files: the files that are there, sorted by name.
    missing: names of files that the index names and the folder lacks.
    index: for each tensor's name the name of its file, from model.safetensors.index.json; empty if there is
        no such file.
    """

    files: tuple[Path, ...]
    missing: tuple[str, ...] = ()
    index: Mapping[str, str] = field(default_factory=dict)


def find_shards(folder: Path) -> Shards:
    """Find the checkpoint's safetensors files.

    Raises CheckpointError if there is neither a file nor an index, or if the index names files outside of the
    folder.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise CheckpointError(f"{index} is not a weight index: it has no mapping weight_map")
        # Whatever the values are, each different one is checked once.
        names = {repr(name): name for name in places.values()}.values()
        shards = sorted(named_file(folder, name, index) for name in names)
        files = tuple(path for path in shards if path.is_file())
        missing = tuple(path.name for path in shards if not path.is_file())
        return Shards(files, missing, places)
    found = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in found:
        found = [path for path in found if not path.name.startswith(ORIGINAL_NAME)]
    if not found:
        others = [p.name for p in folder.glob("*.bin")][:3]
        hint = f"; {others} are pickles, which are not read: convert them to safetensors" if others else ""
        raise CheckpointError(f"{folder} holds no *.safetensors file{hint}")
    return Shards(tuple(found))


def shard_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files.

    Raises CheckpointError if any or all are missing, or if the index names files outside of the folder.
    """
    shards = find_shards(folder)
    if shards.missing:
        count = len(shards.files) + len(shards.missing)
        raise CheckpointError(
            f"{folder}: {len(shards.missing)} of {count} shards are missing: {list(shards.missing[:3])}"
        )
    return list(shards.files)


def read_entries(path: Path) -> tuple[list[TensorEntry], int]:
    """Return the entries of a safetensors file, by place, and the offset of its data in bytes.

    Raises CheckpointError if it is not a safetensors file.
    """
    with path.open("rb") as file:
        return read_header(file, path)


def read_header(file: BinaryIO, path: Path) -> tuple[list[TensorEntry], int]:
    """Return the entries of a safetensors file, by place, and the offset of its data in bytes.

    Raises CheckpointError if it is not a safetensors file.
    """
    size = path.stat().st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise CheckpointError(f"{path} is not a safetensors file, or is truncated")
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        entries = [_entry(name, item) for name, item in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken header: {error}") from error
    begin = 8 + length
    end = max((entry.stop for entry in entries), default=0)
    if begin + end > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes, {begin + end} expected")
    return sorted(entries, key=lambda e: e.start), begin


def _entry(name: str, item: dict[str, Any]) -> TensorEntry:
    dtype, shape, (start, stop) = item["dtype"], item["shape"], item["data_offsets"]
    numbers = (*shape, start, stop)
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or stop < start:
        raise ValueError(f"tensor {name!r} has no usable type, shape or place")
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def read_whole(stored: StoredWeights, file: int, entry: TensorEntry, target: Tensor, cut: Cut) -> int:
    """Fill `target` with a part of a tensor that is read as a whole. See `StoredWeights.read_part`."""
    shape = list(target.shape)
    shape[cut.axis] = cut.size
    buffer = torch.empty(shape, dtype=target.dtype)
    stored.read(file, entry, buffer)
    parts = [buffer.narrow(cut.axis, start, stop - start) for start, stop in cut.runs]
    target.copy_(torch.cat(parts, cut.axis))
    return entry.stop - entry.start


def common_dtype(entries: Iterable[TensorEntry]) -> torch.dtype:
    """Return the float type that most bytes of the tensors have; float32 if there is none."""
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in DTYPES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.stop - entry.start
    return DTYPES[max(sizes, key=lambda kind: sizes[kind])] if sizes else torch.float32


def trim_memory() -> None:
    """Return memory that loading has freed to the operating system (glibc malloc_trim)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
