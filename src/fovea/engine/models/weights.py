"""Loads a checkpoint's tensors into the model's own storage, and packs each layer as soon as it is complete.

A recipe says which plain weights are quantized, and to which format; its packer does that while they are
read. Weights that are stored as codes (`kernels.codes`) keep them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fovea.core.errors import CheckpointError
from fovea.engine.layers.linear import Embedding, Linear, PatchLinear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.stored import StoredWeights
from fovea.engine.models.targets import NOTHING_FUSED, Assignment, Fill, FusedTensor, Piece, assign
from fovea.kernels.base import Kernels
from fovea.kernels.codes import Codes, Format
from fovea.kernels.float8 import FP8
from fovea.kernels.quantize import INT4, INT8


def load_weights(
    stored: StoredWeights,
    targets: Iterator[tuple[str, Tensor]],
    ignored: Iterable[str] = (),
    packer: Packer | None = None,
    renames: Iterable[tuple[str, str]] = (),
    fused: Mapping[str, FusedTensor] = NOTHING_FUSED,
) -> int:
    """Fill every target from the stored tensors, and return the number of bytes read.

    All headers are read first, so that a checkpoint that does not fit is refused before its weights are read.

    targets: canonical name and storage of every tensor.
    ignored, renames, fused: see `targets.assign`.
    packer: packs each layer when its tensors are loaded, and takes codes of quantized tensors as they are;
        None: every target gets its values.

    Raises CheckpointError for a tensor that is missing, unknown or repeated, or has a wrong shape or is not a
    float.
    """
    storage = dict(targets)
    shapes = {name: tuple(tensor.shape) for name, tensor in storage.items()}
    assignment = assign(stored.files, shapes, ignored, renames, fused)
    expect_complete(assignment)
    if packer is not None:
        packer.expect(
            {piece.target for fill in assignment.fills if fill.entry.coded for piece in _whole(fill)}
        )
    missing = Counter(piece.target for fill in assignment.fills for piece in fill.pieces)
    total = 0
    try:
        for fill in assignment.fills:
            total += fill.entry.stop - fill.entry.start
            if packer is None or not _hand_over(stored, fill, packer):
                # The views end with the call: a target that is filled must be free to give its memory back.
                _fill([piece.of(storage[piece.target]) for piece in fill.pieces], fill, stored)
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


def _hand_over(stored: StoredWeights, fill: Fill, packer: Packer) -> bool:
    """Give the codes of a tensor to the packer, if it wants them. Returns whether it did."""
    entry, fused = fill.entry, fill.fused
    if not entry.coded or not all(packer.takes(piece.target) for piece in fill.pieces):
        return False
    codes = stored.codes(fill.file, entry)
    if fused is None:
        packer.take(fill.pieces[0].target, codes)
        return True
    numbers = torch.arange(fused.rows)
    for piece, (_, rows) in zip(fill.pieces, fused.split(numbers), strict=True):
        packer.take(piece.target, codes.rows(rows))
    return True


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
