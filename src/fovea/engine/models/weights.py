"""Loads a checkpoint's tensors into the model's own storage, and packs each layer as soon as it is complete.

A recipe says which plain weights are quantized, and to which format; its packer does that while they are
read. Weights that are stored as codes (`kernels.codes`) keep them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fovea.core.errors import CheckpointError
from fovea.core.progress import report
from fovea.engine.layers.linear import Embedding, Linear, PatchLinear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.stored import StoredWeights
from fovea.engine.models.targets import NOTHING_FUSED, Assignment, Cut, Fill, FusedTensor, Piece, assign
from fovea.kernels.base import Kernels
from fovea.kernels.codes import Codes, Format
from fovea.kernels.float8 import FP8
from fovea.kernels.quantize import INT4, INT8

NOTHING_CUT: Mapping[str, Cut] = MappingProxyType({})


def load_weights(
    stored: StoredWeights,
    targets: Iterator[tuple[str, Tensor]],
    ignored: Iterable[str] = (),
    packer: Packer | None = None,
    renames: Iterable[tuple[str, str]] = (),
    fused: Mapping[str, FusedTensor] = NOTHING_FUSED,
    cuts: Mapping[str, Cut] = NOTHING_CUT,
) -> int:
    """Fill every target from the stored tensors, and return the number of bytes read. Reports its progress.

    All headers are read first, so that a checkpoint that does not fit is refused before its weights are read.

    targets: canonical name and storage of every tensor.
    ignored, renames, fused: see `targets.assign`.
    packer: packs each layer when its tensors are loaded, and takes codes of quantized tensors as they are;
        None: every target gets its values.
    cuts: the parts of targets that this process has, by canonical name. Other targets are whole.

    Raises CheckpointError for a tensor that is missing, unknown or repeated, or has a wrong shape or is not a
    float.
    """
    storage = dict(targets)
    shapes = {name: tuple(tensor.shape) for name, tensor in storage.items()}
    shapes |= {name: cut.whole(shapes[name]) for name, cut in cuts.items()}
    assignment = assign(stored.files, shapes, ignored, renames, fused)
    expect_complete(assignment)
    if packer is not None:
        packer.expect(
            {piece.target for fill in assignment.fills if fill.entry.coded for piece in _whole(fill)}
        )
    missing = Counter(piece.target for fill in assignment.fills for piece in fill.pieces)
    total, read, whole = 0, 0, sum(fill.entry.stop - fill.entry.start for fill in assignment.fills)
    report(0, whole)
    try:
        for fill in assignment.fills:
            size = length = fill.entry.stop - fill.entry.start
            if packer is None or not _hand_over(stored, fill, packer, cuts):
                # The views end with the call: a target that is filled must be free to give its memory back.
                if any(piece.target in cuts for piece in fill.pieces):
                    size = _fill_parts(storage, fill, stored, cuts)
                else:
                    _fill([piece.of(storage[piece.target]) for piece in fill.pieces], fill, stored)
            total, read = total + size, read + length
            report(read, whole)
            for piece in fill.pieces:
                missing[piece.target] -= 1
                if not missing[piece.target]:
                    del storage[piece.target]
                    if packer is not None:
                        packer.mark_filled(piece.target)
    finally:
        stored.close()
    return total


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of the linear maps of a model; None: not quantized.

    Norms and biases are never quantized. Patch embeddings are not either: they read pixels, and their cost is
    small. An embedding table that is also the language head is stored once, in the head's format.

    decoder: format of the decoder's layers.
    encoder: format of the vision tower and the projector.
    head: format of the language head.
    """

    decoder: Format | None = None
    encoder: Format | None = None
    head: Format | None = None

    def format_of(self, path: str, layer: Linear) -> Format | None:
        """Return the format of a layer.

        path: its attribute path in the model, such as "decoder.layers.0.mlp.down_proj".
        """
        if isinstance(layer, PatchLinear):
            return None
        if path.startswith("decoder."):
            return self.decoder
        return self.head if path.startswith("head.") else self.encoder


NOTHING = "none"
RECIPES = {
    NOTHING: Recipe(),
    "int8": Recipe(INT8, INT8, INT8),
    # The encoder computes many rows at a time and the head runs once per token, so 8 bits cost little time
    # there.
    "int4": Recipe(INT4, INT8, INT8),
    # The head's outputs are compared with each other; rounded activations would disturb this most.
    "fp8": Recipe(FP8, FP8, None),
}
"""Recipes by the values of the setting `quantization`."""


class Packer:
    """Packs every layer as soon as its weights are loaded, so that the plain weights are never all in memory.

    model: its layers are packed for `kernels`, in the formats of `recipe`.
    later: modules whose layers are not packed before `pack_rest`.
    as_stored: quantized weights keep their codes, if the kernels can multiply with them. Otherwise their
        values are packed in the formats of `recipe`.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        kernels: Kernels,
        recipe: Recipe,
        later: Iterable[nn.Module] = (),
        *,
        as_stored: bool = True,
    ) -> None:
        self._kernels = kernels
        self._as_stored = as_stored
        self._later = {layer for module in later for layer in module.modules()}
        self._formats: dict[Linear, Format | None] = {}
        self._layers: dict[str, Linear | Embedding] = {}
        self._missing: dict[Linear | Embedding, int] = {}
        self._coded: dict[Linear | Embedding, dict[str, Codes | None]] = {}
        for path, layer in model.named_modules():
            if isinstance(layer, Linear) and not (layer is model.head.lm_head and model.head.tied):
                self._formats[layer] = recipe.format_of(path, layer)
            elif layer is not model.decoder.embed_tokens:
                continue
            assert isinstance(layer, Linear | Embedding)
            names = model.checkpoint_names(path, layer)
            self._layers |= dict.fromkeys(names, layer)
            self._missing[layer] = len(names)

    def expect(self, coded: Set[str]) -> None:
        """Note which targets are stored as codes. A layer keeps codes only if all of its weights are.

        coded: canonical names of these targets.
        """
        if not self._as_stored:
            return
        weights: dict[Linear | Embedding, list[str]] = {}
        for name, layer in self._layers.items():
            if name.endswith(".weight"):
                weights.setdefault(layer, []).append(name)
        for layer, names in weights.items():
            if coded >= set(names) and not isinstance(layer, PatchLinear):
                self._coded[layer] = dict.fromkeys(names)

    def takes(self, name: str) -> bool:
        """Whether the codes of that target are wanted instead of its values."""
        return name in self._coded.get(self._layers.get(name), {})  # type: ignore[arg-type]

    def take(self, name: str, codes: Codes) -> None:
        """Keep the codes of a target that `takes` names until its layer is complete."""
        self._coded[self._layers[name]][name] = codes

    def mark_filled(self, name: str) -> None:
        """Note that the tensor of that canonical name is loaded. Packs a layer after its last tensor."""
        layer = self._layers.get(name)
        if layer is None:
            return
        self._missing[layer] -= 1
        if self._missing[layer]:
            return
        parts = self._coded.pop(layer, None)
        if parts is not None:
            layer.keep_codes([codes for codes in parts.values() if codes is not None])
        if layer not in self._later:
            self._pack(layer)

    def pack_rest(self) -> None:
        """Pack all layers that are not packed yet. All weights must be loaded."""
        for layer in self._missing:
            self._pack(layer)

    def _pack(self, layer: Linear | Embedding) -> None:
        if isinstance(layer, Linear):
            layer.pack(self._kernels, self._formats[layer])
        else:
            layer.pack(self._kernels)


def expect_complete(assignment: Assignment) -> None:
    """Raise CheckpointError for the first problem of an assignment."""
    problem = next(iter(assignment.problems), None)
    if problem is None:
        return
    if problem.kind != "missing":
        raise CheckpointError(str(problem))
    missing = assignment.missing
    raise CheckpointError(f"{len(missing)} tensors are missing, among them {sorted(missing)[:4]}")


def _whole(fill: Fill) -> tuple[Piece, ...]:
    """Return the pieces of a tensor if each is a whole matrix, whose codes can be kept; else none."""
    whole = all(piece.expert is None and len(piece.shape) == 2 for piece in fill.pieces)
    return fill.pieces if whole and not fill.transposed else ()


def _hand_over(stored: StoredWeights, fill: Fill, packer: Packer, cuts: Mapping[str, Cut]) -> bool:
    """Give the codes of a tensor to the packer, if it wants them. Returns whether it did."""
    entry, fused = fill.entry, fill.fused
    if not entry.coded or not all(packer.takes(piece.target) for piece in fill.pieces):
        return False
    codes = stored.codes(fill.file, entry)
    if fused is None:
        target = fill.pieces[0].target
        packer.take(target, codes if target not in cuts else _codes_part(codes, cuts[target], entry.name))
        return True
    for piece, rows in zip(fill.pieces, _own_rows(fused, fill.pieces, cuts), strict=True):
        packer.take(piece.target, codes.rows(rows))
    return True


def _codes_part(codes: Codes, cut: Cut, name: str) -> Codes:
    """Return the codes of a part of a weight. Raises CheckpointError if the cut divides a group."""
    if cut.axis == 0:
        return codes.rows(torch.cat([torch.arange(*run) for run in cut.runs]))
    try:
        (run,) = cut.runs
        return codes.columns(*run)
    except ValueError as error:
        raise CheckpointError(
            f"{name} cannot be divided among processes: {error}; accepted: a smaller tensor_parallel, or "
            "quantization dequantize"
        ) from None


def _own_rows(fused: FusedTensor, pieces: Iterable[Piece], cuts: Mapping[str, Cut]) -> list[Tensor]:
    """Return, for each part of a fused tensor, the numbers of its rows that this process has."""
    found = []
    for piece, (_, rows) in zip(pieces, fused.split(torch.arange(fused.rows)), strict=True):
        cut = cuts.get(piece.target)
        found.append(rows if cut is None else torch.cat([rows[slice(*run)] for run in cut.runs]))
    return found


def _fill_parts(
    storage: Mapping[str, Tensor], fill: Fill, stored: StoredWeights, cuts: Mapping[str, Cut]
) -> int:
    """Read the parts of one tensor that this process has. Returns the bytes of the file that were read."""
    entry, fused = fill.entry, fill.fused
    shape = entry.shape
    assert shape is not None
    if fused is None:
        target, cut = _part_of(fill.pieces[0], storage, cuts)
        if fill.transposed:
            target, cut = target.transpose(1, 2), Cut(3 - cut.axis, cut.runs, cut.size)
        own = list(shape)
        own[cut.axis] = cut.count
        if tuple(own) == tuple(target.shape):
            return stored.read_part(fill.file, entry, target, cut)
        # The target is a view of its storage with other axes than the file's.
        buffer = torch.empty(own, dtype=target.dtype)
        total = stored.read_part(fill.file, entry, buffer, cut)
        target.copy_(buffer.view(target.shape))
        return total
    # The rows of all parts are read in the order of the file, and given to the parts.
    rows = _own_rows(fused, fill.pieces, cuts)
    order = torch.cat(rows).sort().values
    target = storage[fill.pieces[0].target]
    buffer = torch.empty((len(order), *shape[1:]), dtype=target.dtype)
    total = stored.read_part(fill.file, entry, buffer, Cut(0, _runs(order.tolist()), fused.rows))
    for piece, own_rows in zip(fill.pieces, rows, strict=True):
        view = storage[piece.target]
        view.copy_(buffer[torch.searchsorted(order, own_rows)].view(view.shape))
    return total


def _part_of(piece: Piece, storage: Mapping[str, Tensor], cuts: Mapping[str, Cut]) -> tuple[Tensor, Cut]:
    """Return the storage for this process' part of a piece, and the part."""
    target, cut = storage[piece.target], cuts[piece.target]
    if piece.expert is None:
        return target, cut
    matrix = target[piece.expert]
    if cut.axis == 2:
        return matrix, Cut(1, cut.runs, cut.size)
    half = len(matrix) // 2  # gates come first, and then the other half of the block
    first = half if piece.first else 0
    return matrix[first : first + half], Cut(0, cut.runs[:1], cut.size // 2)


def _runs(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs of consecutive numbers, (first, last + 1). numbers: ascending."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return tuple(found)


def _fill(views: list[Tensor], fill: Fill, stored: StoredWeights) -> None:
    """Read one tensor of a file into the storage of its pieces."""
    entry, fused = fill.entry, fill.fused
    target = views[0]
    if fused is not None:
        target = torch.empty((fused.rows, *target.shape[1:]), dtype=target.dtype, device="cpu")
    stored.read(fill.file, entry, target.transpose(1, 2) if fill.transposed else target)
    if fused is not None:
        for view, (_, rows) in zip(views, fused.split(target), strict=True):
            view.copy_(rows)
