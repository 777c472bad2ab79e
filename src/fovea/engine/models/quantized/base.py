"""Weights that safetensors files hold as codes and scales: several tensors of the files stand for one weight.

`regroup` makes one entry of the tensors of a weight. It reads names, types and shapes, and tensors of a few
numbers, so that it serves a check of a checkpoint, too. `QuantizedSafetensors` reads the weights.

A `Family` is a way to quantize: it knows the endings of the tensors' names, and builds a `Weight` from the
tensors that belong together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.models.stored import DTYPES, STORED_TYPES, SafetensorsWeights, read_whole, trim_memory
from fovea.engine.models.targets import Cut, Problem, Shape, TensorEntry
from fovea.kernels.codes import VALUES_AT_ONCE, Codes

MOST_SMALL = 4 << 20
"""Largest tensor that is read to find out what a weight is, in bytes; they have a few numbers per column."""
TRIM_BYTES = 8 << 20
"""Bytes of weights after which freed memory is returned."""
MOST = 1 << 30
"""Largest number of a configuration."""
ITSELF = ""
"""The role of a tensor whose name is that of the weight."""
PLAIN_TYPES = ("F16", "BF16", "F32")
"""Types of scales."""
ROUNDS_ACTIVATIONS = (
    "the scheme keeps activations in 16 bits; where weights keep their codes, Fovea's C++ kernels round "
    "activations to 8 bits; --quantization dequantize computes with plain weights instead"
)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the files. file: the number of its file."""

    file: int
    entry: TensorEntry

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def shape(self) -> Shape:
        assert self.entry.shape is not None
        return self.entry.shape

    @property
    def nbytes(self) -> int:
        return self.entry.stop - self.entry.start


Read = Callable[[Part], Tensor]
"""Reads a tensor of the files as it is stored."""
Rows = Callable[[slice], Tensor]
"""Computes some rows of a weight, (rows, k) float32. Matrices of a weight of three axes follow each other."""


class Fault(Exception):
    """A tensor does not fit those that belong to it. name: the tensor's. text: the words after the name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name[:300]} {text}")
        self.name, self.text = name, text


class Weight(ABC):
    """A quantized weight.

    shape: of its values, (n, k) or (experts, n, k).
    parts: the tensors of the files that it consists of.
    coded: see `TensorEntry.coded`.
    reason: why its codes cannot be kept, for users; "": they can.
    """

    def __init__(self, shape: Shape, parts: Sequence[Part], *, coded: str = "", reason: str = "") -> None:
        self.shape, self.parts = shape, tuple(parts)
        self.coded, self.reason = coded, reason

    @abstractmethod
    def load(self, read: Read) -> Codes | Rows:
        """Return the codes, or a function of the values. Raises CheckpointError for scales of no use."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Family(ABC):
    """A way to quantize, as the configuration of a checkpoint describes it.

    title: its name for users.
    endings: endings of the names of its tensors, and what takes the place of the ending in the weight's name.
        Longer ones come first.
    unused: those endings whose tensors are not needed.
    notes: what a user should know about the checkpoint, a line each.
    wide_activations: its products expect activations of 16 bits.
    """

    endings: ClassVar[Mapping[str, str]]
    unused: ClassVar[tuple[str, ...]] = ()
    title: str
    notes: tuple[str, ...] = ()
    wide_activations = True

    def split(self, name: str) -> tuple[str, str]:
        """Return the name of the weight that a tensor belongs to, and the ending of the tensor, or ITSELF."""
        for ending, replacement in self.endings.items():
            if name.endswith(ending):
                return name.removesuffix(ending) + replacement, ending
        return name, ITSELF

    @abstractmethod
    def weight(self, name: str, parts: Mapping[str, Part], read: Read) -> Weight:
        """Build the weight of that name. Raises Fault if its tensors do not fit each other.

        parts: its tensors by ending, or ITSELF.
        read: reads tensors of a few numbers.
        """


@dataclass(frozen=True, slots=True)
class Grouped:
    """The tensors of a checkpoint, each quantized weight as one entry.

    files: as in `StoredWeights`.
    weights: the quantized weights, by name.
    problems: tensors that do not fit each other.
    """

    files: tuple[tuple[str, tuple[TensorEntry, ...]], ...]
    weights: Mapping[str, Weight]
    problems: tuple[Problem, ...]


def regroup(
    files: Sequence[tuple[str, Sequence[TensorEntry]]],
    family: Family,
    read: Callable[[int, TensorEntry], Tensor],
) -> Grouped:
    """Make one entry of all tensors of each quantized weight; other entries stay as they are.

    The entry is in the file of the weight's largest tensor, and has the type that most plain tensors of the
    files have. Where the shape of a tensor is unknown, only the weight's name is given.

    read: reads a tensor of a few numbers, by the number of its file and its entry.
    """
    groups = _collect(files, family)
    plain = _plain_type(groups)
    weights: dict[str, Weight] = {}
    problems: list[Problem] = []
    replaced: dict[Part, TensorEntry] = {}
    consumed: set[Part] = set()
    for name, group in groups.items():
        needed = {ending: part for ending, part in group.items() if ending not in family.unused}
        consumed.update(group.values())
        largest = max(needed.values(), key=lambda part: part.nbytes, default=None)
        if largest is None:
            continue
        if list(needed) == [ITSELF] and largest.entry.dtype not in ("I8", "F8_E4M3"):
            consumed.discard(largest)
        elif any(part.entry.shape is None for part in needed.values()):
            replaced[largest] = TensorEntry(name)
        else:
            try:
                weight = weights[name] = family.weight(name, needed, lambda part: read(part.file, part.entry))
            except Fault as fault:
                problems.append(Problem("quantized", fault.name, fault.text, files[largest.file][0]))
                replaced[largest] = TensorEntry(name)
                continue
            replaced[largest] = TensorEntry(name, plain, weight.shape, 0, weight.nbytes, weight.coded)
    grouped = []
    for number, (file, entries) in enumerate(files):
        parts = [Part(number, entry) for entry in entries]
        kept = (replaced.get(part, part.entry) for part in parts if part in replaced or part not in consumed)
        # Files are sorted by type first. A layer's tensors are read one after the other, so that few layers
        # are in memory before they are packed.
        grouped.append((file, tuple(sorted(kept, key=lambda entry: entry.name))))
    return Grouped(tuple(grouped), weights, tuple(problems))


def _collect(
    files: Sequence[tuple[str, Sequence[TensorEntry]]], family: Family
) -> dict[str, dict[str, Part]]:
    """Return the tensors by the weight's name and by ending. A second tensor of a name is left out."""
    groups: dict[str, dict[str, Part]] = {}
    for number, (_, entries) in enumerate(files):
        for entry in entries:
            name, ending = family.split(entry.name)
            groups.setdefault(name, {}).setdefault(ending, Part(number, entry))
    return groups


def _plain_type(groups: Mapping[str, Mapping[str, Part]]) -> str:
    """Return the float type of most bytes of tensors that are not quantized; BF16 if there are none."""
    sizes: Counter[str] = Counter()
    for group in groups.values():
        if list(group) == [ITSELF] and (part := group[ITSELF]).entry.dtype in DTYPES:
            sizes[part.entry.dtype] += part.nbytes
    return sizes.most_common(1)[0][0] if sizes else "BF16"


def fill(target: Tensor, values: Codes | Rows) -> None:
    """Fill a tensor (n, k) or (experts, n, k), of any type and layout, with values that are rounded once."""
    matrices = target if target.ndim == 3 else target[None]
    _, n, k = matrices.shape
    step = max(1, VALUES_AT_ONCE // max(1, k))
    for number, matrix in enumerate(matrices):
        for first in range(0, n, step):
            last = min(n, first + step)
            rows = slice(number * n + first, number * n + last)
            some = values.rows(rows).values() if isinstance(values, Codes) else values(rows)
            matrix[first:last].copy_(some)


class QuantizedSafetensors:
    """Safetensors files with quantized weights. It is a `StoredWeights`.

    Raises CheckpointError if tensors do not fit each other.
    """

    def __init__(self, raw: SafetensorsWeights, family: Family) -> None:
        self._raw, self._family = raw, family
        self._untrimmed = 0
        try:
            grouped = regroup(raw.files, family, self._small)
        finally:
            raw.close()
        if grouped.problems:
            raise CheckpointError(str(grouped.problems[0]))
        self.weights = grouped.weights
        self.files: Sequence[tuple[str, Sequence[TensorEntry]]] = grouped.files

    @property
    def quantization(self) -> str:
        return self._family.title if self.weights else ""

    @property
    def nbytes(self) -> int:
        return self._raw.nbytes

    @property
    def notes(self) -> Iterator[str]:
        """Yield what a user should know about weights that are kept as they are stored, a line each."""
        weights = self.weights.values()
        coded = Counter(weight.coded for weight in weights if weight.coded)
        for words, count in coded.most_common():
            yield f"{count} of {len(weights)} quantized weights keep their codes: {words}"
        reasons = Counter(weight.reason for weight in weights if not weight.coded)
        for reason, count in reasons.most_common():
            yield f"{count} of {len(weights)} quantized weights are loaded as plain values: {reason}"
        if coded and self._family.wide_activations:
            yield ROUNDS_ACTIVATIONS
        yield from self._family.notes

    def read(self, file: int, entry: TensorEntry, target: Tensor) -> None:
        weight = self.weights.get(entry.name)
        if weight is None:
            self._raw.read(file, entry, target)
            return
        if target.shape != weight.shape:
            buffer = torch.empty(weight.shape, dtype=target.dtype)
            self.read(file, entry, buffer)
            target.copy_(buffer.view(target.shape))
            return
        fill(target, weight.load(self._read))
        self._trim(weight)

    def read_part(self, file: int, entry: TensorEntry, target: Tensor, cut: Cut) -> int:
        weight = self.weights.get(entry.name)
        if weight is None:
            return self._raw.read_part(file, entry, target, cut)
        return read_whole(self, file, entry, target, cut)

    def codes(self, file: int, entry: TensorEntry) -> Codes:
        weight = self.weights.get(entry.name)
        codes = None if weight is None or not weight.coded else weight.load(self._read)
        if not isinstance(codes, Codes):
            raise CheckpointError(f"{self.files[file][0]}: {entry.name} has no codes")
        self._trim(weight)
        return codes

    def close(self) -> None:
        self._raw.close()

    def _trim(self, weight: Weight | None) -> None:
        """Return freed memory now and then: buffers of many sizes would leave as much between the weights."""
        self._untrimmed += 0 if weight is None else weight.nbytes
        if self._untrimmed >= TRIM_BYTES:
            self._untrimmed = 0
            trim_memory()

    def _read(self, part: Part) -> Tensor:
        tensor = torch.empty(part.shape, dtype=STORED_TYPES[part.entry.dtype])
        self._raw.read(part.file, part.entry, tensor)
        return tensor

    def _small(self, file: int, entry: TensorEntry) -> Tensor:
        return self._read(Part(file, entry))


def checked(part: Part, types: Sequence[str], *shapes: Shape) -> Part:
    """Return a tensor of the files if it has one of these types and shapes. Raises Fault.

    shapes: none: every shape is accepted.
    """
    entry = part.entry
    if entry.dtype not in types:
        raise Fault(part.name, f"has type {entry.dtype[:20]}; accepted: {', '.join(types)}")
    if shapes and part.shape not in shapes:
        accepted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise Fault(part.name, f"has shape {str(list(part.shape))[:100]}; accepted: {accepted}")
    size = prod(part.shape) * STORED_TYPES[entry.dtype].itemsize
    if size != part.nbytes:
        raise Fault(part.name, f"has {part.nbytes} bytes; accepted: {size}, as its shape and type say")
    return part


def matrix_shape(part: Part) -> tuple[int, int]:
    """Return the shape of a tensor that must be a matrix with numbers. Raises Fault."""
    if len(part.shape) != 2 or not prod(part.shape):
        raise Fault(part.name, f"has shape {str(list(part.shape))[:100]}; accepted: two axes, none empty")
    return part.shape[0], part.shape[1]


def required(parts: Mapping[str, Part], ending: str, name: str) -> Part:
    """Return the tensor of an ending. Raises Fault if the weight has none."""
    if ending not in parts:
        raise Fault(name, f"is quantized, but has no tensor {ending.rpartition('.')[2] or 'weight'!r}")
    return parts[ending]


def small(part: Part, read: Read) -> Tensor:
    """Read a tensor of a few numbers. Raises Fault if it is large."""
    if part.nbytes > MOST_SMALL:
        raise Fault(part.name, f"has {part.nbytes} bytes; accepted: at most {MOST_SMALL}")
    return read(part)


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of a quantized checkpoint, with types that are checked.

    place: where it stands, for errors, such as "config.json: quantization_config".
    """

    content: Mapping[str, Any]
    place: str

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number. Raises CheckpointError."""
        value = self.content.get(name, default)
        if type(value) is not int or abs(value) > MOST:
            raise CheckpointError(
                f"{self.place}: {name} is {str(value)[:50]!r}; accepted: a whole number up to {MOST}"
            )
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block; None: nothing is said. Raises CheckpointError."""
        block = self.content.get(name)
        if block is None:
            return None
        sides = list(block) if isinstance(block, list | tuple) else []
        if [type(side) for side in sides] != [int, int] or not 1 <= min(sides) <= max(sides) <= MOST:
            raise CheckpointError(f"{self.place}: {name} is {str(block)[:50]!r}; accepted: two whole numbers")
        return sides[0], sides[1]

    def word(self, name: str, default: str, accepted: Sequence[str]) -> str:
        """Return a word in lower case. Raises CheckpointError for one that is not accepted."""
        value = self.content.get(name)
        word = (default if value is None else str(value)[:50]).lower()
        if word not in accepted:
            raise CheckpointError(f"{self.place}: {name} is {word!r}; accepted: {', '.join(accepted)}")
        return word
