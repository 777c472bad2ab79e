"""The relevance head of a checkpoint: weights from `training/relevance.py`, as arrays by name.

Its file is in a folder of its own inside the checkpoint's folder. Other programs read every *.safetensors
file of a checkpoint's folder as weights of the model, so no other tensors may be there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fovea.core.errors import CheckpointError

Head = dict[str, NDArray[np.float32]]
PATH = Path("fovea") / "relevance.safetensors"
"""Path of the head, relative to the checkpoint's folder."""
OLD_NAME = "relevance.safetensors"
"""File name of the head in older versions, beside the weights. It is still read, but never as weights."""


def read_head(folder: Path) -> Head | None:
    """Read the head of the checkpoint in `folder`. Returns None if there is none. Raises CheckpointError."""
    path = next((path for path in (folder / PATH, folder / OLD_NAME) if path.is_file()), None)
    if path is None:
        return None
    from safetensors.numpy import load_file

    try:
        return {name: array.astype(np.float32) for name, array in load_file(path).items()}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def head_digest(head: Mapping[str, NDArray[np.float32]] | None) -> str:
    """The digest of a head, for cache keys. It is empty if there is no head."""
    if head is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(head.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
