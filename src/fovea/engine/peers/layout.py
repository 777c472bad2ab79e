"""Names of everything that two engines must have in common before they can exchange values."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from fovea import __version__
from fovea.engine.config.others import PeerSettings

HEAD_BYTES, SAMPLES, SAMPLE_BYTES = 1 << 20, 64, 4096
LONGEST_HEADER = 100 << 20
"""Most bytes of a safetensors file before its tensors."""
SUFFIXES = (".safetensors", ".gguf", ".json")


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class Layouts:
    """The names of one engine.

    encoder: of what decides encoder outputs. decoder: of that, and of what decides keys, values and states.
    road: of the way by which values travel.
    """

    encoder: str
    decoder: str
    road: str

    def of(self, kind: str) -> str:
        """Return the name that counts for a kind of work, "encode" or "prefill"."""
        return self.encoder if kind == "encode" else self.decoder


def checkpoint_files(path: Path, mmproj: str = "") -> list[Path]:
    """Return the files of a checkpoint: those of a folder, or a GGUF file with its parts and its tower.

    mmproj: see the setting.
    """
    if not path.is_file():
        return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    first = _PART.sub("", path.name)
    siblings = sorted(path.parent.glob("*.gguf"))
    parts = [file for file in siblings if _PART.search(file.name) and _PART.sub("", file.name) == first]
    towers = [Path(mmproj)] if mmproj else [file for file in siblings if "mmproj" in file.name]
    return [*(parts or [path]), *towers]


def road_name(settings: PeerSettings, folder: Path) -> str:
    """Name the way by which values travel. Two engines on different hosts have no shared memory."""
    if settings.connector == "mooncake":
        return f"mooncake over {settings.transfer_protocol}"
    host = BOOT_ID.read_text().strip() if settings.connector == "shm" and BOOT_ID.exists() else ""
    return " ".join(filter(None, (settings.connector, str(folder), host)))


def layout_name(files: Iterable[Path], *details: object) -> str:
    """Return a hash of a checkpoint's files and of what else decides the bits and the shapes of values.

    Of each file its name, its size, its beginning and some samples are read, because to read all of it would
    take minutes. Training changes almost all bytes of a tensor, but it may change only some tensors: so there
    are samples of each.
    """
    digest = hashlib.sha256(json.dumps([__version__, *map(str, details)]).encode())
    for file in files:
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
