"""The tensors of a model in GGUF files, under the names that transformers gives them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.core.hardware import usable_cores
from fovea.engine.models.gguf.blocks import FLOATS, LAYOUTS, unpack, values
from fovea.engine.models.gguf.reader import GgufFile, StoredTensor
from fovea.engine.models.stored import DTYPES, read_whole
from fovea.engine.models.targets import Cut, TensorEntry
from fovea.kernels.codes import Codes

VALUES_AT_ONCE = 1 << 19
"""Number of values that are decoded together. Their copies stay in the processor's cache."""
QUANTIZED_DTYPE = "BF16"
"""Type that quantized tensors are said to have. Their values are rounded once, to the parameter's type."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the model, and the tensors of a file that it is made of.

    name: as in transformers.
    parts: tensors of one file. Their rows follow each other, or see `frames`.
    file: number of the file.
    order: for each row the row of the parts that it is; None: the same.
    shift: number that is added to all values.
    shape: shape of the result; None: that of the parts.
    frames: each part is one time step of a patch embedding: (out, channels, height, width).
    rows: rows of the parts that it has; None: all.
    """

    name: str
    parts: tuple[StoredTensor, ...]
    file: int = 0
    order: Tensor | None = None
    shift: float = 0.0
    shape: tuple[int, ...] | None = None
    frames: bool = False
    rows: slice | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        first, *others = self.parts
        if self.frames:
            return (*first.shape[:2], len(self.parts), *first.shape[2:])
        count = first.shape[0] + sum(part.shape[0] for part in others)
        if self.rows is not None:
            count = len(range(count)[self.rows])
        return (count, *first.shape[1:])

    @property
    def is_coded(self) -> bool:
        """Whether it keeps the codes of its parts: a matrix of one type that has codes."""
        kinds = {part.type.name for part in self.parts}
        plain = not self.shift and not self.frames and self.shape is None
        return len(kinds) == 1 and kinds <= LAYOUTS.keys() and plain and len(self.stored_shape) == 2

    @property
    def dtype(self) -> str:
        kinds = {part.type.name for part in self.parts}
        return kinds.pop() if len(kinds) == 1 and kinds <= set(FLOATS) else QUANTIZED_DTYPE

    def entry(self) -> TensorEntry:
        """Return the entry for `targets.assign`."""
        size = sum(part.nbytes for part in self.parts)
        if self.rows is not None:
            size = size * self.stored_shape[0] // sum(part.shape[0] for part in self.parts)
        start = self.parts[0].start
        coded = f"{LAYOUTS[self.parts[0].type.name].bits} bits" if self.is_coded else ""
        return TensorEntry(self.name, self.dtype, self.shape or self.stored_shape, start, start + size, coded)


class GgufWeights:
    """The tensors of GGUF files. It is a `stored.StoredWeights`.

    files: headers of the files.
    sources: the tensors of the model. Those of one file follow each other in the order of their places.
    """

    def __init__(self, files: Sequence[GgufFile], sources: Iterable[Source]) -> None:
        self._files = files
        self._sources: list[dict[str, Source]] = [{} for _ in files]
        for source in sources:
            self._sources[source.file][source.name] = source
        self._open: dict[int, BinaryIO] = {}
        self._lock = threading.Lock()

    @property
    def files(self) -> Sequence[tuple[str, Sequence[TensorEntry]]]:
        return [
            (str(file.path), sorted((source.entry() for source in sources.values()), key=lambda e: e.start))
            for file, sources in zip(self._files, self._sources, strict=True)
        ]

    @property
    def quantization(self) -> str:
        """The quantized types of the files, by their share: "gguf q4_k q6_k", for example."""
        sizes: dict[str, int] = {}
        for file in self._files:
            for tensor in file.tensors:
                if tensor.type.name not in FLOATS:
                    sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
        names = sorted(sizes, key=lambda name: -sizes[name])
        return " ".join(("gguf", *names)).lower() if names else ""

    @property
    def quantized(self) -> int:
        """Number of the model's tensors whose values are quantized."""
        return sum(
            any(part.type.name not in FLOATS for part in source.parts)
            for sources in self._sources
            for source in sources.values()
        )

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self._files)

    def read(self, file: int, entry: TensorEntry, target: Tensor) -> None:
        source = self._sources[file][entry.name]
        view = target.detach().view(source.stored_shape) if target.is_contiguous() else None
        filled = torch.empty(source.stored_shape, dtype=target.dtype) if view is None else view
        if source.frames:
            for number, part in enumerate(source.parts):
                self._fill(source, [part], filled[:, :, number])
        else:
            self._fill(source, source.parts, filled)
        if view is None:
            target.copy_(filled.view(entry.shape or filled.shape))

    def read_part(self, file: int, entry: TensorEntry, target: Tensor, cut: Cut) -> int:
        source = self._sources[file][entry.name]
        if cut.axis or len(cut.runs) > 1 or len(source.parts) > 1 or source.order is not None or source.rows:
            return read_whole(self, file, entry, target, cut)
        rows = replace(source, rows=slice(*cut.runs[0]))
        view = torch.empty(rows.stored_shape, dtype=target.dtype)
        self._fill(rows, rows.parts, view)
        target.copy_(view.view(target.shape))
        return rows.entry().stop - rows.entry().start

    def codes(self, file: int, entry: TensorEntry) -> Codes:
        source = self._sources[file][entry.name]
        if not source.is_coded:
            raise CheckpointError(f"{self._files[file].path}: {entry.name} has no codes")
        kind = source.parts[0].type.name
        layout, whole = LAYOUTS[kind], {}
        chunks = list(_chunks(source, source.parts))
        # The first chunk tells the shapes.
        for name, array in unpack(kind, self._read(chunks[0])).items():
            whole[name] = np.empty((source.stored_shape[0], array.shape[1]), array.dtype)

        def work(chunk: Chunk) -> None:
            for name, array in unpack(kind, self._read(chunk)).items():
                whole[name][chunk.row : chunk.row + chunk.rows] = array

        for _ in self._pool.map(work, chunks):
            pass
        fields: dict[str, Any] = {name: torch.from_numpy(array) for name, array in whole.items()}
        codes = Codes(
            **fields, bits=layout.bits, group=layout.group, zero=layout.zero, outer_groups=layout.outer_groups
        )
        return codes if source.order is None else codes.rows(source.order)

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()
        if "_pool" in self.__dict__:
            self._pool.shutdown()
            del self._pool

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        # numpy releases the interpreter's lock, so threads unpack on all cores.
        return ThreadPoolExecutor(len(usable_cores()), thread_name_prefix="fovea-gguf")

    def _fill(self, source: Source, parts: Sequence[StoredTensor], target: Tensor) -> None:
        """Fill a tensor with the values of parts, some rows at a time."""
        place = None if source.order is None else torch.argsort(source.order)

        def work(chunk: Chunk) -> Tensor:
            kind, blocks = chunk.part.type.name, self._read(chunk)
            if kind not in FLOATS:
                return torch.from_numpy(values(kind, blocks))
            return torch.from_numpy(blocks.reshape(len(blocks), -1)).view(DTYPES[kind])

        chunks = list(_chunks(source, parts))
        step = len(usable_cores())
        for first in range(0, len(chunks), step):
            some = chunks[first : first + step]
            for chunk, result in zip(some, self._pool.map(work, some), strict=True):
                shifted = result.float() + source.shift if source.shift else result
                rows: slice | Tensor = slice(chunk.row, chunk.row + chunk.rows)
                rows = rows if place is None else place[rows].to(target.device)
                target[rows] = shifted.view(chunk.rows, *target.shape[1:]).to(target.device, target.dtype)

    def _read(self, chunk: Chunk) -> NDArray[np.uint8]:
        """Return blocks of rows: (rows, blocks of a row, bytes of a block). Threads may call it together."""
        with self._lock:
            if chunk.file not in self._open:
                self._open[chunk.file] = self._files[chunk.file].path.open("rb")
            source = self._open[chunk.file]
        buffer = np.empty((chunk.rows, chunk.blocks, chunk.part.type.nbytes), np.uint8)
        left, place = memoryview(buffer.reshape(-1).data), chunk.start
        while left:
            count = os.preadv(source.fileno(), [left], place)
            if not count:
                raise CheckpointError(f"{self._files[chunk.file].path}: {chunk.part.name} is truncated")
            left, place = left[count:], place + count
        return buffer


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a tensor that are read together.

    file: number of the file.
    part: the tensor.
    start: offset of the first row in the file.
    row: number of the first row in the tensor of the model.
    rows: number of rows.
    blocks: blocks of a row.
    """

    file: int
    part: StoredTensor
    start: int
    row: int
    rows: int
    blocks: int


def _chunks(source: Source, parts: Sequence[StoredTensor]) -> Iterator[Chunk]:
    """Cut parts into chunks of about VALUES_AT_ONCE values. A row has all values of the first dimension."""
    row = 0
    for part in parts:
        width = prod(part.shape[1:])
        blocks = width // part.type.values
        chosen = range(part.shape[0])[source.rows or slice(None)]
        step = max(1, VALUES_AT_ONCE // max(1, width))
        for first in range(chosen.start, chosen.stop, step):
            rows = min(step, chosen.stop - first)
            start = part.start + first * blocks * part.type.nbytes
            yield Chunk(source.file, part, start, row, rows, blocks)
            row += rows


def mapping_of(files: Sequence[GgufFile]) -> Mapping[str, tuple[int, StoredTensor]]:
    """Return the number of the file, and the place, of every tensor of a model by its name in the files."""
    return {tensor.name: (number, tensor) for number, file in enumerate(files) for tensor in file.tensors}
