"""The name of everything that two engines must have in common before they can exchange values."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from fovea import __version__

HEAD_BYTES, SAMPLES, SAMPLE_BYTES = 1 << 20, 64, 4096
SUFFIXES = (".safetensors", ".gguf", ".json")


def layout_name(checkpoint: Path, *details: object) -> str:
    """Return a hash of a checkpoint's files and of what else decides the bits and the shapes of values.

    Of each file its name, its size, its beginning and some samples are read: two checkpoints of one shape
    differ in almost all of their bytes, and to read all of them would take minutes.

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
        for number in range(SAMPLES if size > HEAD_BYTES else 0):
            data.seek(HEAD_BYTES + number * max(0, size - HEAD_BYTES - SAMPLE_BYTES) // SAMPLES)
            digest.update(data.read(SAMPLE_BYTES))
