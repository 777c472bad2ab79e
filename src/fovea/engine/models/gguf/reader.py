"""Reads the header of a GGUF file: its metadata, and the names, types, shapes and places of its tensors.

Layout (versions 2 and 3, little endian): the magic "GGUF", the version, the numbers of tensors and of
metadata entries, the entries, the table of tensors, padding up to `general.alignment`, and the data. Anybody
may have made a file, so every count, length, offset and type is checked against the file's size before memory
is taken for what it announces.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fovea.core.errors import CheckpointError
from fovea.engine.files import check_file

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Versions of the format that are read. Version 1 was in use for weeks in 2023."""
MOST_METADATA = 128 << 20
"""Largest metadata and table of tensors that are read, in bytes."""
MOST_STRINGS = 1 << 22
"""Most strings in all arrays of the metadata together. Each takes up to eight times its size in the file."""
READ_AT_ONCE = 1 << 20
MOST_NAME = 1 << 16
"""Longest name of a metadata entry, in bytes."""
MOST_TENSOR_NAME = 256
"""Longest name of a tensor, in bytes."""
MOST_DIMENSIONS = 4
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MOST_ALIGNMENT = 1 << 20
MOST_FILES = 1000
"""Most files that a split model may have."""
FEWEST_ENTRY_BYTES = 13
"""Size of the smallest metadata entry: the length of its name, its type, one byte."""
FEWEST_TENSOR_BYTES = 32
"""Size of the smallest entry of the table of tensors: the length of its name, one dimension, type, offset."""
_SPLIT = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.gguf$", re.ASCII | re.DOTALL)
_SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
"""numpy types by the numbers of metadata types."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors. Values are stored in blocks of consecutive values of a row.

    name: as llama.cpp names it.
    values: values of a block.
    nbytes: bytes of a block.
    """

    name: str
    values: int
    nbytes: int


TYPES: Mapping[int, BlockType] = {
    number: BlockType(*fields)
    for number, fields in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136),
        28: ("F64", 1, 8),
        30: ("BF16", 1, 2),
    }.items()
}
"""The types that are read, by their numbers."""
OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of types that are not read, for messages."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    shape: as torch has it: the last dimension is the one whose values follow each other in the file.
    start: offset of its first byte in the file.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.values * self.type.nbytes


class GgufFile:
    """The header of one GGUF file.

    Raises CheckpointError, naming what is wrong and what is accepted.

    path: the file.
    metadata: values by name. Arrays of numbers are numpy arrays, arrays of texts are lists.
    tensors: in the order of the table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                reader = _Reader(file, path)
                self.metadata, self.tensors = reader.read()
                self.nbytes = reader.size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    @cached_property
    def by_name(self) -> Mapping[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.tensors}


class _Reader:
    """Reads from the beginning of a file, and never beyond its end or MOST_METADATA."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.size = path.stat().st_size
        self._at = 0
        self._window = memoryview(b"")
        self._strings = 0

    def read(self) -> tuple[dict[str, Any], tuple[StoredTensor, ...]]:
        if self.size < 24 or self._take(4, "the magic") != MAGIC:
            raise self._fault("is not a GGUF file: it does not begin with the four letters GGUF")
        version = self._number("<u4", "the version")
        if version & 0xFFFF == 0 and version:
            raise self._fault("is in big-endian byte order; accepted: little-endian GGUF files")
        if version not in VERSIONS:
            raise self._fault(
                f"has version {version} of the format; accepted: {VERSIONS[0]} and {VERSIONS[1]}"
            )
        tensors = self._count("tensors", FEWEST_TENSOR_BYTES)
        entries = self._count("metadata entries", FEWEST_ENTRY_BYTES)
        metadata = self._entries(entries)
        return metadata, self._tensors(tensors, metadata)

    def _entries(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for number in range(count):
            key = self._text(f"the name of metadata entry {number}", MOST_NAME)
            if key in metadata:
                raise self._fault(f"has the metadata entry {key[:100]!r} twice; accepted: each name once")
            metadata[key] = self._value(self._number("<u4", f"the type of {key[:100]}"), key[:100])
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        value = self._number(self._type(kind, key), key)
        if kind == 7 and value not in (0, 1):
            raise self._fault(f"{key} is a boolean of value {value}; accepted: 0 and 1")
        return bool(value) if kind == 7 else value

    def _array(self, key: str) -> list[str] | NDArray[Any]:
        kind = self._number("<u4", f"the type of {key}")
        if kind == _ARRAY:
            raise self._fault(f"{key} is an array of arrays; accepted: arrays of numbers or of texts")
        length = self._number("<u8", f"the length of {key}")
        if kind == _STRING:
            self._expect(8 * length, f"the {length} texts of {key}")
            self._strings += length
            if self._strings > MOST_STRINGS:
                raise self._fault(f"has more than {MOST_STRINGS} texts in its arrays, as of {key}")
            return self._texts(key, length)
        dtype = np.dtype("u1" if kind == 7 else self._type(kind, key))
        content = self._take(dtype.itemsize * length, f"the {length} values of {key}")
        values = np.frombuffer(content, dtype)
        if kind == 7 and (values > 1).any():
            raise self._fault(f"{key} has booleans of value {int(values.max())}; accepted: 0 and 1")
        return values.astype(bool) if kind == 7 else values

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> tuple[StoredTensor, ...]:
        alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self._fault(
                f"{ALIGNMENT} is {str(alignment)[:100]}; accepted: a power of two, at most {MOST_ALIGNMENT}"
            )
        found = [self._tensor(number, alignment) for number in range(count)]
        begin = -(-self._at // alignment) * alignment
        names: set[str] = set()
        placed = []
        for tensor in found:
            if tensor.name in names:
                raise self._fault(f"has the tensor {tensor.name!r} twice; accepted: each name once")
            names.add(tensor.name)
            placed.append(StoredTensor(tensor.name, tensor.type, tensor.shape, begin + tensor.start))
        end = 0
        for tensor in sorted(placed, key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.start < end:
                raise self._fault(
                    f"tensor {tensor.name!r} begins within another one; accepted: one after another"
                )
            end = tensor.start + tensor.nbytes
            if end > self.size:
                raise self._fault(
                    f"is truncated: tensor {tensor.name!r} ends at byte {end}, and the file has {self.size}"
                )
        return tuple(placed)

    def _tensor(self, number: int, alignment: int) -> StoredTensor:
        """Read one entry of the table. The offset of the result is relative to the data."""
        name = self._text(f"the name of tensor {number}", MOST_TENSOR_NAME)
        count = self._number("<u4", f"the number of dimensions of {name}")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise self._fault(f"tensor {name!r} has {count} dimensions; accepted: 1 to {MOST_DIMENSIONS}")
        shape = tuple(self._number("<u8", f"the dimensions of {name}") for _ in range(count))
        kind = self._number("<u4", f"the type of tensor {name}")
        offset = self._number("<u8", f"the offset of tensor {name}")
        block = TYPES.get(kind)
        if block is None:
            named = OTHER_TYPES.get(kind, f"of number {kind}")
            accepted = ", ".join(block.name for block in TYPES.values())
            raise self._fault(f"tensor {name!r} has type {named}; accepted: {accepted}")
        if count == 1 and block.values > 1:
            raise self._fault(f"tensor {name!r} has type {block.name} and one dimension; accepted: floats")
        if min(shape) < 1 or shape[0] % block.values:
            raise self._fault(
                f"tensor {name!r} has shape {list(shape)}; accepted for {block.name}: sizes of at least 1, "
                f"the first a multiple of {block.values}"
            )
        if prod(shape) // block.values * block.nbytes > self.size:
            raise self._fault(
                f"tensor {name!r} of shape {list(shape)} and type {block.name} is larger than the file, "
                f"which has {self.size} bytes"
            )
        if offset % alignment or offset > self.size:
            raise self._fault(
                f"tensor {name!r} has offset {offset}; accepted: multiples of {alignment} within the file"
            )
        return StoredTensor(name, block, shape[::-1], offset)

    def _count(self, what: str, fewest: int) -> int:
        """Read a number of things of which each takes at least `fewest` bytes of the file."""
        count: int = self._number("<u8", f"the number of {what}")
        self._expect(count * fewest, f"{count} {what}")
        return count

    def _type(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self._fault(f"{key} has type {kind}; accepted: types 0 to 12 of the format")
        return _SCALARS[kind]

    def _text(self, what: str, most: int = MOST_METADATA) -> str:
        length = self._number("<u8", f"the length of {what}")
        if length > most:
            raise self._fault(f"{what} has {length} bytes; accepted: at most {most}")
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self._fault(f"{what} is not UTF-8 text: {error.reason}") from error

    def _texts(self, key: str, count: int) -> list[str]:
        """Read texts one after another. There may be hundreds of thousands, so this is a tight loop."""
        found: list[str] = []
        length_at = struct.Struct("<Q").unpack_from
        while len(found) < count:
            window, place = self._window, 0
            while len(found) < count and place + 8 <= len(window):
                end = place + 8 + length_at(window, place)[0]
                if end > len(window):
                    break
                try:
                    found.append(str(window[place + 8 : end], "utf-8"))
                except UnicodeDecodeError:
                    break
                place = end
            self._window = window[place:]
            self._at += place
            if len(found) < count:
                found.append(self._text(f"text {len(found)} of {key}"))
        return found

    def _number(self, kind: str, what: str) -> Any:
        code, size = _CODES[kind]
        return struct.unpack(code, self._take(size, what))[0]

    def _take(self, count: int, what: str) -> memoryview:
        """Return the next bytes. The file is read in windows of READ_AT_ONCE bytes."""
        self._expect(count, what)
        if count > len(self._window):
            more = self._file.read(max(count - len(self._window), READ_AT_ONCE))
            self._window = memoryview(bytes(self._window) + more)
            if count > len(self._window):
                raise self._fault(f"is truncated within {what}")
        content, self._window = self._window[:count], self._window[count:]
        self._at += count
        return content

    def _expect(self, count: int, what: str) -> None:
        """Raise CheckpointError if fewer bytes are left."""
        if self._at + count > self.size:
            raise self._fault(
                f"is truncated, or damaged: {what} would take {count} bytes from byte {self._at} on, and the "
                f"file has {self.size}"
            )
        if self._at + count > MOST_METADATA:
            raise self._fault(
                f"has too much metadata: {what} would end at byte {self._at + count}; accepted: at most "
                f"{MOST_METADATA} bytes before the tensors"
            )

    def _fault(self, text: str) -> CheckpointError:
        separator = " " if text.startswith(("is ", "has ")) else ": "
        return CheckpointError(f"{self._path}{separator}{text[:1000]}")


_CODES = {
    kind: ("<" + code, struct.calcsize("<" + code))
    for kind, code in zip(_SCALARS.values(), "BbHhIifBQqd", strict=True)
}
"""Code and size of the module struct for each numpy type."""


def open_split(path: Path) -> list[GgufFile]:
    """Return the headers of all files of a model, of which `path` is one; usually it is the only one.

    Files of a split model are named NAME-00001-of-00003.gguf.

    Raises CheckpointError if a file is missing or broken, or is not part of the model.
    """
    match = _SPLIT.match(path.name)
    if match is None:
        file = GgufFile(path)
        _expect_split(file, 0, 1)
        return [file]
    stem, count = match[1], int(match[3])
    if not 1 <= count <= MOST_FILES or not 1 <= int(match[2]) <= count:
        raise CheckpointError(f"{path} is no part of a split model; accepted: 1 to {MOST_FILES} parts")
    paths = [path.with_name(f"{stem}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} of {count} files are missing: {missing[:3]}")
    files = []
    for number, part in enumerate(paths):
        if part != path:
            check_file(part, part.parent.resolve())
        files.append(GgufFile(part))
        _expect_split(files[-1], number, count)
    _expect_different(files)
    return files


def _expect_split(file: GgufFile, number: int, count: int) -> None:
    """Raise CheckpointError if the metadata says that a file is another part of a split model."""
    found = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1) or 1
    if found != (number, count) and (count > 1 or "split.count" in file.metadata):
        raise CheckpointError(
            f"{file.path}: split.no and split.count are {str(found)[:100]}; accepted for a file of this "
            f"name: {(number, count)}"
        )


def _expect_different(files: Iterable[GgufFile]) -> None:
    names: set[str] = set()
    for file in files:
        for tensor in file.tensors:
            if tensor.name in names:
                raise CheckpointError(
                    f"{file.path}: another file of the model has tensor {tensor.name!r}, too"
                )
            names.add(tensor.name)


def holds_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with such files and without config.json."""
    if path.suffix == SUFFIX and path.is_file():
        return True
    return path.is_dir() and not (path / "config.json").exists() and any(path.glob(f"*{SUFFIX}"))


def is_first(path: Path) -> bool:
    """Whether a file is a whole model or the first file of a split one, by its name."""
    match = _SPLIT.match(path.name)
    return match is None or int(match[2]) == 1
