"""Assigns the tensors of a checkpoint to the tensors of a model, by their names, shapes and types alone.

Usually a tensor of a file is a tensor of the model. But a file may hold several of the model's tensors as one
(`FusedTensor`), and it may hold the experts of a layer one by one, which are one tensor in the model.
`weights` carries an assignment out; `check` reports its problems without reading weights.

Names are made canonical first. Different generations save the same model under different names: with and
without a leading `model.`, the decoder as `language_model.model` or `text_model`, the tower inside a
`vision_model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Literal

from torch import Tensor

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.)?(language_model\.)?lm_head\.", "lm_head."),
        (r"^language_model\.output\.", "lm_head."),
        (r"^(model\.)?language_model\.(model\.)?", "decoder."),
        (r"^(model\.)?text_model\.(model\.)?", "decoder."),
        (r"^(model\.)?visual\.(vision_model\.)?", "vision."),
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "vision."),
        (r"^(model\.)?vision_model\.", "vision."),
        (r"^(model\.)?vision_encoder\.", "vision."),
        (r"^(model\.)?multi_modal_projector\.", "projector."),
        (r"^(model\.)?vision_projection\.", "projector."),
        (r"^(model\.)?connector\.modality_projection\.", "projector."),
        (r"^(model\.projector|mlp_AR)\.", "projector."),
        (r"^mlp1\.0\.", "projector.layer_norm."),
        (r"^mlp1\.1\.", "projector.linear_1."),
        (r"^mlp1\.3\.", "projector.linear_2."),
        (r"^(model\.)?embed_vision\.", "projector."),
        (r"^(model\.)?image_newline$", "newline"),
        (r"^model\.(embed_tokens|layers|norm)\.", r"decoder.\1."),
    )
)
ALWAYS_IGNORED = (r"\.inv_freq$", r"\.position_ids$")
"""Regular expressions of canonical names that no model loads."""
NOTHING_FUSED: Mapping[str, FusedTensor] = MappingProxyType({})
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are loaded, by the file format's names."""
_EXPERT = re.compile(r"^(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight$", re.ASCII)
_LONGEST_NAME = 300
Shape = tuple[int, ...]
Kind = Literal["unknown", "missing", "repeated", "dtype", "shape", "quantized"]


def assign(
    files: Iterable[tuple[str, Sequence[TensorEntry]]],
    targets: Mapping[str, Shape],
    ignored: Iterable[str] = (),
    renames: Iterable[tuple[str, str]] = (),
    fused: Mapping[str, FusedTensor] = NOTHING_FUSED,
) -> Assignment:
    """Decide for every tensor of the files which targets it fills.

    files: name and tensors of each file.
    targets: canonical name and shape of every tensor that a checkpoint must contain.
    ignored: regular expressions of canonical names that are skipped.
    renames: regular expressions and replacements, see `canonical`.
    fused: tensors of the files that may hold the rows of several targets, by canonical name.
    """
    unneeded = [re.compile(pattern) for pattern in (*ALWAYS_IGNORED, *ignored)]
    rules = [(re.compile(pattern), replacement) for pattern, replacement in renames]
    table = _Table(targets)
    fills: list[Fill] = []
    problems: list[Problem] = []
    skipped: list[TensorEntry] = []
    for number, (file, entries) in enumerate(files):
        for entry in entries:
            name = canonical(entry.name, rules)
            whole = fused.get(name)
            parts = [name] if whole is None else [part for part, _ in whole.parts]
            if any(table.is_taken(part) for part in parts):
                problems.append(Problem("repeated", entry.name, "is there a second time", file))
                continue
            found = [table.find(part) for part in parts]
            pieces = tuple(piece for piece in found if piece is not None)
            if len(pieces) < len(parts):
                if any(pattern.search(name) for pattern in unneeded):
                    skipped.append(entry)
                else:
                    problems.append(Problem("unknown", entry.name, "is not part of this architecture", file))
                continue
            table.take(parts, pieces)
            expected = pieces[0].shape if whole is None else (whole.rows, *pieces[0].shape[1:])
            problem = _mismatch(entry, expected, file)
            if problem is None:
                fills.append(Fill(number, entry, pieces, whole, _is_transposed(entry, expected)))
            else:
                problems.append(problem)
    problems += [Problem("missing", name, "is missing") for name in table.incomplete]
    return Assignment(tuple(fills), tuple(problems), tuple(skipped))


def canonical(name: str, renames: Iterable[tuple[re.Pattern[str], str]] = ()) -> str:
    """Return the canonical form of a tensor's name.

    `model.language_model.layers.0.x` and `language_model.model.layers.0.x`, for example, become
    `decoder.layers.0.x`.

    renames: a model's own rules. All that match are applied, in order, to the name after the common rules.
    """
    for pattern, replacement in _RULES:
        renamed, count = pattern.subn(replacement, name, count=1)
        if count:
            name = renamed
            break
    for pattern, replacement in renames:
        name = pattern.sub(replacement, name)
    return name


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """The layout of a checkpoint tensor whose rows belong to several tensors.

    Its rows are equal groups. Every group has some rows of each part, one part after the other.

    name: canonical name of the checkpoint's tensor.
    groups: number of groups.
    parts: canonical name of each part, and its rows in one group.
    """

    name: str
    groups: int
    parts: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        """Rows of the checkpoint's tensor."""
        return self.groups * sum(size for _, size in self.parts)

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the rows of each part; the rows of all groups follow each other.

        tensor: the checkpoint's, (rows, ...).
        """
        shape = tensor.shape[1:]
        groups = tensor.view(self.groups, -1, *shape)
        row = 0
        for name, size in self.parts:
            yield name, groups[:, row : row + size].reshape(-1, *shape)
            row += size


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, and its place: bytes [start, stop) after the header.

    name: as in the file.
    dtype: the file format's name of the type.
    shape: None: only the name is known, from an index of files that are not there.
    coded: a short description of the codes that stand for its values (`kernels.codes`), such as
        "4 bits in groups of 128"; "": it has none that can be kept, so its values are loaded.
    """

    name: str
    dtype: str = ""
    shape: Shape | None = None
    start: int = 0
    stop: int = 0
    coded: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a checkpoint's tensor that a process has.

    axis: the axis along which the tensor is divided.
    runs: the parts of this axis, (start, stop), which follow each other in the process' own tensor.
    size: length of the axis in the checkpoint.
    """

    axis: int
    runs: tuple[tuple[int, int], ...]
    size: int

    @property
    def count(self) -> int:
        """Length of the axis in the process' own tensor."""
        return sum(stop - start for start, stop in self.runs)

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the checkpoint's tensor. shape: that of the process' own.

        Views may divide the axis into several.
        """
        own = list(shape)
        own[self.axis] = own[self.axis] * self.size // self.count
        return tuple(own)


@dataclass(frozen=True, slots=True)
class Piece:
    """A target, or the rows of one expert in it.

    target: canonical name of the model's tensor.
    shape: shape of the piece.
    expert: number of the expert; None: the whole target.
    first: first row of the piece in the expert's matrix.
    """

    target: str
    shape: Shape
    expert: int | None = None
    first: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return the storage of this piece. tensor: the storage of the target."""
        if self.expert is None:
            return tensor
        return tensor[self.expert, self.first : self.first + self.shape[0]]


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor of a file, and the pieces that it fills.

    file: number of the file.
    fused: layout of a tensor that holds the rows of several pieces; None: there is one piece.
    transposed: the tensor's last two axes are swapped.
    """

    file: int
    entry: TensorEntry
    pieces: tuple[Piece, ...]
    fused: FusedTensor | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A tensor that cannot be loaded, or is missing.

    kind: "unknown": the model has no such tensor. "repeated": another tensor has filled the same storage.
        "dtype", "shape": it is of a wrong type or shape. "missing": no file has it. "quantized": tensors of a
        quantized weight do not fit each other.
    name: as in the file; the canonical name of a missing tensor.
    text: the words after the name in a message.
    file: name of the file; "" for a missing tensor.
    """

    kind: Kind
    name: str
    text: str
    file: str = ""

    def __str__(self) -> str:
        name = self.name if len(self.name) <= _LONGEST_NAME else self.name[:_LONGEST_NAME] + "..."
        quoted = f"tensor {name!r}" if self.kind in ("unknown", "repeated") else name
        return f"{self.file}: {quoted} {self.text}" if self.file else f"{quoted} {self.text}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The tensors that are read, in the order of the files, and everything that is wrong with the others.

    ignored: tensors that the model does not need.
    """

    fills: tuple[Fill, ...]
    problems: tuple[Problem, ...]
    ignored: tuple[TensorEntry, ...]

    @property
    def missing(self) -> list[str]:
        """Canonical names of the targets that no file fills, or not completely."""
        return [problem.name for problem in self.problems if problem.kind == "missing"]


class _Table:
    """The targets, and how many numbers of each are still to be filled."""

    def __init__(self, targets: Mapping[str, Shape]) -> None:
        self._targets = targets
        self._left = {name: prod(shape) for name, shape in targets.items()}
        self._taken: set[str] = set()

    @property
    def incomplete(self) -> list[str]:
        return [name for name in self._targets if name not in self._taken and self._left[name]]

    def is_taken(self, name: str) -> bool:
        """Whether a tensor of that name would fill storage that another one fills, too."""
        if name in self._taken or (name in self._targets and self._left[name] < prod(self._targets[name])):
            return True
        return _expert(name)[0] in self._taken

    def find(self, name: str) -> Piece | None:
        """Return the target of that name, or the rows of one expert; None: the model has none."""
        if name in self._targets:
            return Piece(name, self._targets[name])
        target, expert, part = _expert(name)
        shape = self._targets.get(target, ())
        if len(shape) != 3 or expert >= shape[0]:
            return None
        if part == "down":
            return Piece(target, shape[1:], expert)
        half = shape[1] // 2
        return Piece(target, (half, shape[2]), expert, half if part == "up" else 0)

    def take(self, names: Iterable[str], pieces: Iterable[Piece]) -> None:
        """Note that tensors of these names fill these pieces."""
        self._taken.update(names)
        for piece in pieces:
            self._left[piece.target] -= prod(piece.shape)


def _expert(name: str) -> tuple[str, int, str]:
    """Split the name of one expert's map: name of the tensor of all experts, expert, and gate, up or down.

    For other names, the first part is empty.
    """
    match = _EXPERT.match(name)
    if match is None:
        return "", 0, ""
    prefix, number, part = match.groups()
    return f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj", int(number), part


def _mismatch(entry: TensorEntry, expected: Shape, file: str) -> Problem | None:
    """Return the problem of a tensor whose type or shape is wrong; None: both fit, or are not known."""
    if entry.shape is None:
        return None
    if entry.dtype not in FLOATS:
        kind = entry.dtype[:20]
        text = f"has type {kind}; accepted: {', '.join(FLOATS)}"
        return Problem("dtype", entry.name, text, file)
    if entry.shape == expected or _is_transposed(entry, expected):
        return None
    # The same numbers may have other axes: a table of positions (1, rows, columns) is one of (rows, columns).
    if len(entry.shape) != len(expected) and prod(entry.shape) == prod(expected):
        return None
    text = f"has shape {str(list(entry.shape))[:100]}, the configuration says {list(expected)}"
    return Problem("shape", entry.name, text, file)


def _is_transposed(entry: TensorEntry, expected: Shape) -> bool:
    """Whether a tensor of experts has its last two axes swapped.

    Qwen3-VL-MoE stores them as (experts, inputs, outputs), unless transformers has written them. If
    inputs and outputs are equal in number, the layout is unknown. Then the tensor is taken as it is, as in
    transformers.
    """
    shape = entry.shape
    if shape is None or len(shape) != 3 or shape == expected or ".experts." not in entry.name:
        return False
    return expected == (shape[0], shape[2], shape[1])
