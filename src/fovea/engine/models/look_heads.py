"""The attention heads with which a model looks for what a question is about, kept beside its checkpoint.

`fovea relevance calibrate` chooses them. They are in a folder of their own inside the checkpoint's folder, so
other programs do not read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.json_text import parse_object

Head = tuple[int, int]
"""Number of a layer of the decoder, and of a query head in it."""
PATH = Path("fovea") / "look.json"
"""Path of the file, relative to the checkpoint's folder."""

MOST_BYTES = 1 << 20
MOST_HEADS = 256
CHOICE = 2
"""Number of the way in which tokens are chosen. It changes with the choice, because entries of the cache on
disk outlive a version."""


def heads_path(checkpoint: Path) -> Path:
    """The file of a checkpoint. That of a GGUF file has its name, because a folder may hold several."""
    if checkpoint.is_dir():
        return checkpoint / PATH
    return checkpoint.parent / PATH.parent / f"{checkpoint.stem}.json"


def read_heads(checkpoint: Path, known: Iterable[Head] | None = None) -> tuple[Head, ...] | None:
    """Read the heads of a checkpoint, ascending. Returns None if there is no file.

    checkpoint: a folder, or a GGUF file.

    known: the heads that the model has; None: any.
    Raises CheckpointError.
    """
    path = heads_path(checkpoint)
    if not path.is_file():
        return None
    if (size := path.stat().st_size) > MOST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; accepted: at most {MOST_BYTES}")
    try:
        entries: Any = parse_object(path.read_bytes()).get("heads")
    except (OSError, InvalidRequest) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:500]}") from error
    fits = isinstance(entries, list) and 1 <= len(entries) <= MOST_HEADS
    if not fits or not all(map(_is_pair, entries)):
        raise CheckpointError(
            f"{path}: heads must be a list of 1 to {MOST_HEADS} pairs of a layer and a head, such as [[3, 2]]"
        )
    heads = tuple(sorted({(layer, head) for layer, head in entries}))
    if known is not None and (unknown := sorted(set(heads) - set(known))):
        layer, head = unknown[0]
        raise CheckpointError(
            f"{path}: the model has no head {head} with keys of its own in layer {layer}; remove the file "
            "and run fovea relevance calibrate"
        )
    return heads


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(type(n) is int and n >= 0 for n in entry)


def write_heads(checkpoint: Path, heads: Sequence[Head]) -> Path:
    """Write the heads of a checkpoint, a folder or a GGUF file. Returns the path of what was written."""
    path = heads_path(checkpoint)
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"heads": [list(head) for head in heads]}) + "\n")
    new.replace(path)
    return path


def heads_digest(heads: Sequence[Head] | None) -> str:
    """A digest of the heads and of the way of choosing, for cache keys. heads: None if none were chosen."""
    chosen = CHOICE, None if heads is None else tuple(heads)
    return hashlib.blake2b(repr(chosen).encode(), digest_size=8).hexdigest()
