"""The tensors of a model in GGUF files, under the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.models.gguf.blocks import FLOATS, LAYOUTS, decode, values
from fovea.engine.models.gguf.reader import GgufFile, StoredTensor
from fovea.engine.models.targets import TensorEntry
from fovea.kernels.codes import Codes

VALUES_AT_ONCE = 1 << 19
"""Number of values that are decoded together. Their copies stay in the processor's cache."""
QUANTIZED_DTYPE = "BF16"
"""Type in which the values of quantized tensors are computed. They are rounded once, to the parameter's type."""


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
        return kinds.pop() if len(kinds) == 1 and kinds <= FLOATS.keys() else QUANTIZED_DTYPE

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

    def codes(self, file: int, entry: TensorEntry) -> Codes:
        source = self._sources[file][entry.name]
        if not source.is_coded:
            raise CheckpointError(f"{self._files[file].path}: {entry.name} has no codes")
        whole = _join(self._decoded(source), source.stored_shape[0])
        return whole if source.order is None else whole.rows(source.order)

    def close(self) -> None:
        for source in self._open.values():
            source.close()
        self._open.clear()

    def _fill(self, source: Source, parts: Sequence[StoredTensor], target: Tensor) -> None:
        """Fill a tensor with the values of parts, some rows at a time."""
        place = None if source.order is None else torch.argsort(source.order)
        row = 0
        for kind, blocks in self._blocks(source, parts):
            some = values(kind, blocks)
            if source.shift:
                some = some.float() + source.shift
            rows: slice | Tensor = slice(row, row + len(some))
            if place is not None:
                rows = place[rows].to(target.device)
            target[rows] = some.view(len(some), *target.shape[1:]).to(target.device, target.dtype)
            row += len(some)

    def _decoded(self, source: Source) -> Iterator[Codes]:
        for kind, blocks in self._blocks(source, source.parts):
            yield decode(kind, blocks)

    def _blocks(self, source: Source, parts: Sequence[StoredTensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of the type, and blocks of rows, (rows, blocks of a row, bytes of a block) uint8.

        A row has all values of the last dimension of a matrix, and all values but the first dimension's else.
        """
        for part in parts:
            width = prod(part.shape[1:]) // part.type.values if len(part.shape) > 1 else 1
            row_bytes = width * part.type.nbytes
            count = part.shape[0]
            if len(part.shape) == 1:
                # The values of a vector that is quantized fill whole blocks. Floats are rows of one value.
                count = part.shape[0] // part.type.values
            first, last = 0, count
            if source.rows is not None:
                chosen = range(count)[source.rows]
                first, last = chosen.start, chosen.stop
            step = max(1, VALUES_AT_ONCE // max(1, width * part.type.values))
            for row in range(first, last, step):
                rows = min(step, last - row)
                yield (
                    part.type.name,
                    self._read(source.file, part, row * row_bytes, (rows, width, part.type.nbytes)),
                )

    def _read(self, file: int, part: StoredTensor, offset: int, shape: tuple[int, ...]) -> Tensor:
        if file not in self._open:
            self._open[file] = self._files[file].path.open("rb")
        source = self._open[file]
        source.seek(part.start + offset)
        buffer = np.empty(shape, np.uint8)
        if source.readinto(buffer.reshape(-1).data) != buffer.size:  # type: ignore[attr-defined]
            raise CheckpointError(f"{self._files[file].path}: {part.name} is truncated")
        return torch.from_numpy(buffer)


def _join(parts: Iterator[Codes], rows: int) -> Codes:
    """Join codes of successive rows. Only one part exists beside the result.

    rows: number of rows of all parts.
    """
    first = next(parts)
    names = ("codes", "scale", "minimum", "outer", "outer_minimum")
    fields: dict[str, Any] = {}
    for name in names:
        tensor = getattr(first, name)
        fields[name] = None if tensor is None else torch.empty(rows, tensor.shape[1], dtype=tensor.dtype)
    row, part = 0, first
    while part is not None:
        for name, whole in fields.items():
            if whole is not None:
                whole[row : row + part.shape[0]] = getattr(part, name)
        row += part.shape[0]
        part = next(parts, None)  # type: ignore[assignment]
    return replace(first, **fields)


def mapping_of(files: Sequence[GgufFile]) -> Mapping[str, tuple[int, StoredTensor]]:
    """Return the number of the file, and the place, of every tensor of a model by its name in the files."""
    return {tensor.name: (number, tensor) for number, file in enumerate(files) for tensor in file.tensors}
