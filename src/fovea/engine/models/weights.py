"""Reads safetensors files directly into the model's own storage.

No tensor is in memory twice: each is read from its place in the file into the rows of its parameter. Only if
the type or the device differs does a tensor pass through a buffer of its own size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.files import named_file, read_json
from fovea.engine.models.fused_tensors import FusedTensor
from fovea.engine.models.names import ALWAYS_IGNORED, canonical
from fovea.engine.models.relevance_head import OLD_NAME
from fovea.engine.models.targets import NOTHING_FUSED, Targets

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ORIGINAL_NAME = "consolidated"
"""Beginning of the names of Mistral's own files, which its repositories hold beside those of transformers."""
MAX_HEADER = 100 * 1024 * 1024
"""Largest header of a safetensors file that is read, in bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor in a file: bytes [start, stop) after the header.

    name: as in the file.
    dtype: the file format's name of the type.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def shard_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files.

    Raises CheckpointError if any or all are missing, or if the index names files outside of the folder.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise CheckpointError(f"{index} is not a weight index: it has no mapping weight_map")
        # Whatever the values are, each different one is checked once.
        names = {repr(name): name for name in places.values()}.values()
        shards = sorted(named_file(folder, name, index) for name in names)
        missing = [path.name for path in shards if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(shards)} shards are missing: {missing[:3]}"
            )
        return shards
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != OLD_NAME)
    if (folder / "model.safetensors") in files:
        files = [path for path in files if not path.name.startswith(ORIGINAL_NAME)]
    if not files:
        others = [p.name for p in folder.glob("*.bin")][:3]
        hint = f"; {others} are pickles, which are not read: convert them to safetensors" if others else ""
        raise CheckpointError(f"{folder} holds no *.safetensors file{hint}")
    return files


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


def has_tensor(files: Iterable[Path], name: str) -> bool:
    """Whether one of the files has a tensor of that canonical name."""
    for path in files:
        with path.open("rb") as file:
            if any(canonical(entry.name) == name for entry in read_header(file, path)[0]):
                return True
    return False


def _entry(name: str, item: dict[str, Any]) -> TensorEntry:
    dtype, shape, (start, stop) = item["dtype"], item["shape"], item["data_offsets"]
    numbers = (*shape, start, stop)
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or stop < start:
        raise ValueError(f"tensor {name!r} has no usable type, shape or place")
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def load_weights(
    files: Iterable[Path],
    targets: Iterator[tuple[str, Tensor]],
    ignored: Iterable[str] = (),
    on_filled: Callable[[str], None] = lambda name: None,
    renames: Iterable[tuple[str, str]] = (),
    fused: Mapping[str, FusedTensor] = NOTHING_FUSED,
) -> int:
    """Fill every target from the files, and return the number of bytes read.

    targets: canonical name and storage of every tensor.
    ignored: regular expressions of canonical names that are skipped.
    on_filled: called with each target's name when its tensor is loaded; it may use the storage for something
        else.
    renames: regular expressions and replacements, see `names.canonical`.
    fused: see `Targets`.

    Raises CheckpointError for a tensor that is missing, unknown or repeated, or has a wrong shape or is not a
    float.
    """
    table = Targets(targets, fused)
    unneeded = [re.compile(pattern) for pattern in (*ALWAYS_IGNORED, *ignored)]
    rules = [(re.compile(pattern), replacement) for pattern, replacement in renames]
    total = 0
    for path in files:
        with path.open("rb") as file:
            entries, begin = read_header(file, path)
            for entry in entries:
                name = canonical(entry.name, rules)
                if table.is_loaded(name):
                    raise CheckpointError(f"{path}: tensor {entry.name!r} is there a second time")
                found = table.find(name)
                if not found:
                    if not any(pattern.search(name) for pattern in unneeded):
                        raise CheckpointError(
                            f"{path}: tensor {entry.name!r} is not part of this architecture"
                        )
                    continue
                if name in fused:
                    _fill_parts(found, fused[name], file, begin, entry, path)
                else:
                    _fill(found[0], file, begin, entry, path)
                for filled in table.mark_filled(name):
                    on_filled(filled)
                total += entry.stop - entry.start
    if table.missing:
        raise CheckpointError(
            f"{len(table.missing)} tensors are missing, among them {sorted(table.missing)[:4]}"
        )
    return total


def _fill_parts(
    targets: list[Tensor], fused: FusedTensor, file: BinaryIO, begin: int, entry: TensorEntry, path: Path
) -> None:
    """Read a tensor that holds the rows of several targets."""
    whole = torch.empty((fused.rows, *targets[0].shape[1:]), dtype=DTYPES.get(entry.dtype), device="cpu")
    _fill(whole, file, begin, entry, path)
    for target, (_, rows) in zip(targets, fused.split(whole), strict=True):
        target.copy_(rows)


def _fill(target: Tensor, file: BinaryIO, begin: int, entry: TensorEntry, path: Path) -> None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{path}: {entry.name} has type {entry.dtype}; accepted: {', '.join(DTYPES)} "
            "(quantized checkpoints are not)"
        )
    swapped = (*entry.shape[:-2], *entry.shape[:-3:-1])
    if ".experts." in entry.name and target.shape == swapped != entry.shape:
        # Qwen3-VL-MoE stores its experts as (experts, inputs, outputs), unless transformers has written them.
        target = target.transpose(1, 2)
    if target.numel() != _count(entry.shape) or (
        tuple(target.shape) != entry.shape and len(target.shape) == len(entry.shape)
    ):
        raise CheckpointError(
            f"{path}: {entry.name} has shape {list(entry.shape)}, the configuration says {list(target.shape)}"
        )
    direct = target.dtype is dtype and target.device.type == "cpu" and target.is_contiguous()
    buffer = target if direct else torch.empty(target.shape, dtype=dtype)
    file.seek(begin + entry.start)
    view = memoryview(buffer.reshape(-1).view(torch.uint8).numpy().data)
    if file.readinto(view) != entry.stop - entry.start:  # type: ignore[attr-defined]
        raise CheckpointError(f"{path}: {entry.name} is truncated")
    if not direct:
        target.copy_(buffer)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def checkpoint_dtype(files: Iterable[Path]) -> torch.dtype:
    """Return the float type that most of the checkpoint's bytes have; float32 if there is none."""
    sizes: dict[str, int] = {}
    for path in files:
        with path.open("rb") as file:
            for entry in read_header(file, path)[0]:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.stop - entry.start
    common: Mapping[str, int] = {k: v for k, v in sizes.items() if k in DTYPES}
    return DTYPES[max(common, key=lambda k: common[k])] if common else torch.float32
