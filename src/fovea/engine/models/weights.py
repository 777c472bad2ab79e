"""Reads safetensors files directly into the model's own storage.

No tensor is in memory twice: each is read from its place in the file into the rows of its parameter. Only if
the type, the device or the layout differs does a tensor pass through a buffer of its own size.

`read_head` reads the relevance head of a checkpoint: weights from `training/relevance.py`, as arrays by name.

A recipe says which weights are quantized, and to which format; its packer does that while they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.core.errors import CheckpointError
from fovea.engine.files import named_file, read_json
from fovea.engine.layers.linear import Linear, PatchLinear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.targets import NOTHING_FUSED, Assignment, Fill, FusedTensor, TensorEntry, assign
from fovea.kernels.base import Kernels
from fovea.kernels.quantize import FP8, INT4, INT8, Format

Head = dict[str, NDArray[np.float32]]
PATH = Path("fovea") / "relevance.safetensors"
"""Path of the head, relative to the checkpoint's folder."""
LAYERS = ("image", "words", "query", "hidden", "coupling")
"""Layers that every head has; others are those of its optional networks."""
MOST_BYTES = 64 << 20
"""Largest file of a head, in bytes; heads have less than one MiB."""
OLD_NAME = "relevance.safetensors"
"""File name of the head in older versions, beside the weights. It is still read, but never as weights."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ORIGINAL_NAME = "consolidated"
"""Beginning of the names of Mistral's own files, which its repositories hold beside those of transformers."""
MAX_HEADER = 100 * 1024 * 1024
"""Largest header of a safetensors file that is read, in bytes."""


def load_weights(
    files: Iterable[Path],
    targets: Iterator[tuple[str, Tensor]],
    ignored: Iterable[str] = (),
    on_filled: Callable[[str], None] = lambda name: None,
    renames: Iterable[tuple[str, str]] = (),
    fused: Mapping[str, FusedTensor] = NOTHING_FUSED,
) -> int:
    """Fill every target from the files, and return the number of bytes read.

    All headers are read first, so that a checkpoint that does not fit is refused before its weights are read.

    targets: canonical name and storage of every tensor.
    ignored, renames, fused: see `targets.assign`.
    on_filled: called with each target's name when its tensor is loaded; it may use the storage for something
        else.

    Raises CheckpointError for a tensor that is missing, unknown or repeated, or has a wrong shape or is not a
    float.
    """
    paths, storage = list(files), dict(targets)
    headers = [read_entries(path) for path in paths]
    named = [(str(path), entries) for path, (entries, _) in zip(paths, headers, strict=True)]
    shapes = {name: tuple(tensor.shape) for name, tensor in storage.items()}
    assignment = assign(named, shapes, ignored, renames, fused)
    expect_complete(assignment)
    missing = Counter(piece.target for fill in assignment.fills for piece in fill.pieces)
    total = 0
    for number, fills in groupby(assignment.fills, key=lambda fill: fill.file):
        path, begin = paths[number], headers[number][1]
        with path.open("rb") as file:
            for fill in fills:
                views = [piece.of(storage[piece.target]) for piece in fill.pieces]
                _fill(views, fill, _Source(file, begin, path))
                del views  # a target that is filled must be free to give its memory back
                total += fill.entry.stop - fill.entry.start
                for piece in fill.pieces:
                    missing[piece.target] -= 1
                    if not missing[piece.target]:
                        del storage[piece.target]
                        on_filled(piece.target)
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


RECIPES = {
    "none": Recipe(),
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
    """

    def __init__(
        self, model: VisionLanguageModel, kernels: Kernels, recipe: Recipe, later: Iterable[nn.Module] = ()
    ) -> None:
        self._kernels = kernels
        waiting = {layer for module in later for layer in module.modules()}
        self._formats: dict[Linear, Format | None] = {}
        self._layers: dict[str, Linear] = {}
        self._missing: dict[Linear, int] = {}
        for path, layer in model.named_modules():
            if not isinstance(layer, Linear) or layer is model.head.lm_head and model.head.tied:
                continue
            self._formats[layer] = recipe.format_of(path, layer)
            if layer not in waiting:
                names = model.checkpoint_names(path, layer)
                self._layers |= dict.fromkeys(names, layer)
                self._missing[layer] = len(names)

    def mark_filled(self, name: str) -> None:
        """Note that the tensor of that canonical name is loaded. Packs a layer after its last tensor."""
        layer = self._layers.get(name)
        if layer is None:
            return
        self._missing[layer] -= 1
        if not self._missing[layer]:
            self._pack(layer)

    def pack_rest(self) -> None:
        """Pack all layers that are not packed yet. All weights must be loaded."""
        for layer in self._formats:
            self._pack(layer)

    def _pack(self, layer: Linear) -> None:
        layer.pack(self._kernels, self._formats[layer])


def read_head(folder: Path, width: int | None = None) -> Head | None:
    """Read the head of the checkpoint in `folder`. Returns None if there is none.

    Its file is in a folder of its own inside the checkpoint's folder. Other programs read every
    *.safetensors file of a checkpoint's folder as weights of the model, so no other tensors may be there.

    width: values per word embedding of the model; None: any.
    Raises CheckpointError.
    """
    path = next((path for path in (folder / PATH, folder / OLD_NAME) if path.is_file()), None)
    if path is None:
        return None
    from safetensors.numpy import load_file

    if (size := path.stat().st_size) > MOST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; accepted: at most {MOST_BYTES}")
    try:
        head = {name: array.astype(np.float32) for name, array in load_file(path).items()}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:500]}") from error
    check_head(head, path)
    if width is not None and (found := head["image.weight"].shape[1]) != width:
        raise CheckpointError(f"{path} is for embeddings of {found} values; the model's have {width}")
    return head


def check_head(head: Head, path: Path) -> None:
    """Check that every layer has a weight and a bias that fit, and that all numbers are finite.

    Raises CheckpointError.
    """
    names = {f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")}
    if missing := sorted(names - head.keys()):
        raise CheckpointError(f"{path} has no tensor {missing[0]!r}; accepted: {', '.join(sorted(names))}")
    width, depth = head["image.weight"].shape[-1], head["image.weight"].shape[0]
    hidden = head["hidden.weight"].shape[0]
    expected = {"image": (depth, width), "words": (depth, width), "query": (depth, depth)}
    expected |= {"hidden": (hidden, 3 * depth), "coupling": (1, hidden)}
    for name, array in head.items():
        layer, _, part = name.rpartition(".")
        weight = head.get(f"{layer}.weight")
        shape = expected.get(layer, () if weight is None else weight.shape)
        wanted = shape if part == "weight" else shape[:1]
        if len(shape) != 2 or array.shape != wanted or not np.isfinite(array).all():
            raise CheckpointError(
                f"{path}: {name[:100]} has shape {list(array.shape)}; "
                f"accepted: finite numbers of shape {list(wanted)}"
            )


def head_digest(head: Mapping[str, NDArray[np.float32]] | None) -> str:
    """The digest of a head, for cache keys. It is empty if there is no head."""
    if head is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(head.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


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
    found = sorted(path for path in folder.glob("*.safetensors") if path.name != OLD_NAME)
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


def tensor_names(files: Iterable[Path]) -> Iterator[str]:
    """Yield the name of every tensor, as the files have it."""
    for path in files:
        for entry in read_entries(path)[0]:
            yield entry.name


def _entry(name: str, item: dict[str, Any]) -> TensorEntry:
    dtype, shape, (start, stop) = item["dtype"], item["shape"], item["data_offsets"]
    numbers = (*shape, start, stop)
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or stop < start:
        raise ValueError(f"tensor {name!r} has no usable type, shape or place")
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def expect_complete(assignment: Assignment) -> None:
    """Raise CheckpointError for the first problem of an assignment."""
    problem = next(iter(assignment.problems), None)
    if problem is None:
        return
    if problem.kind != "missing":
        raise CheckpointError(str(problem))
    missing = assignment.missing
    raise CheckpointError(f"{len(missing)} tensors are missing, among them {sorted(missing)[:4]}")


@dataclass(frozen=True, slots=True)
class _Source:
    """An open weight file. begin: offset of its data in bytes."""

    file: BinaryIO
    begin: int
    path: Path


def _fill(views: list[Tensor], fill: Fill, source: _Source) -> None:
    """Read one tensor of a file into the storage of its pieces."""
    entry, fused = fill.entry, fill.fused
    target = views[0]
    if fused is not None:
        target = torch.empty((fused.rows, *target.shape[1:]), dtype=DTYPES[entry.dtype], device="cpu")
    _read(target.transpose(1, 2) if fill.transposed else target, entry, source)
    if fused is not None:
        for view, (_, rows) in zip(views, fused.split(target), strict=True):
            view.copy_(rows)


def _read(target: Tensor, entry: TensorEntry, source: _Source) -> None:
    dtype = DTYPES[entry.dtype]
    direct = target.dtype is dtype and target.device.type == "cpu" and target.is_contiguous()
    buffer = target if direct else torch.empty(target.shape, dtype=dtype)
    source.file.seek(source.begin + entry.start)
    view = memoryview(buffer.reshape(-1).view(torch.uint8).numpy().data)
    if len(view) != entry.stop - entry.start or source.file.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise CheckpointError(f"{source.path}: {entry.name} is truncated")
    if not direct:
        target.copy_(buffer)


def checkpoint_dtype(files: Iterable[Path]) -> torch.dtype:
    """Return the float type that most of the checkpoint's bytes have; float32 if there is none."""
    return common_dtype(entry for path in files for entry in read_entries(path)[0])


def common_dtype(entries: Iterable[TensorEntry]) -> torch.dtype:
    """Return the float type that most bytes of the tensors have; float32 if there is none."""
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in DTYPES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.stop - entry.start
    return DTYPES[max(sizes, key=lambda kind: sizes[kind])] if sizes else torch.float32
