"""The name of everything that two engines must have in common before they can exchange values."""

from __future__ import annotations

import hashlib
import json
import os
from io import FileIO
from pathlib import Path

from fovea import __version__

HEAD_BYTES, SAMPLES, SAMPLE_BYTES = 1 << 20, 64, 4096
LONGEST_HEADER = 100 << 20
"""Most bytes of a safetensors file before its tensors."""
SUFFIXES = (".safetensors", ".gguf", ".json")


def layout_name(checkpoint: Path, *details: object) -> str:
    """Return a hash of a checkpoint's files and of what else decides the bits and the shapes of values.

    Of each file its name, its size, its beginning and some samples are read, because to read all of it would
    take minutes. Training changes almost all bytes of a tensor, but it may change only some tensors: so there
    are samples of each.

    checkpoint: a folder or a file.
    """
    digest = hashlib.sha256(json.dumps([__version__, *map(str, details)]).encode())
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    for file in files:
        if file.suffix in SUFFIXES and file.is_file():
            _add(digest, file)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb", buffering=0) as data:
        size = os.fstat(data.fileno()).st_size
        digest.update(f"{file.name}:{size}:".encode())
        digest.update(data.read(HEAD_BYTES))
        if size <= HEAD_BYTES:
            return
        spaced = range(HEAD_BYTES, size, max(1, (size - HEAD_BYTES) // SAMPLES))
        tensors = _tensor_places(data, size) if file.suffix == ".safetensors" else []
        for place in sorted({*spaced, max(HEAD_BYTES, size - SAMPLE_BYTES), *tensors}):
            data.seek(place)
            digest.update(data.read(SAMPLE_BYTES))


def _tensor_places(data: FileIO, size: int) -> list[int]:
    """Return the beginning and the middle of each tensor of a safetensors file; []: it is damaged."""
    data.seek(0)
    begin = 8 + int.from_bytes(data.read(8), "little")
    if begin > min(size, LONGEST_HEADER):
        return []
    try:
        tensors = json.loads(data.read(begin - 8))
        ends = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
        places = [begin + place for first, end in ends for place in (first, (first + end) // 2)]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    return [place for place in places if 0 <= place < size]
