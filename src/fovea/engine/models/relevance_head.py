"""The relevance head of a checkpoint: what `training/relevance.py` learned about its model, as arrays by name.

It lies in a folder of its own inside the checkpoint's folder. Other programs read every *.safetensors file of a
checkpoint's folder as weights of the model, so no other tensors may be there.
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
"""Where the head is written, relative to the checkpoint's folder."""
OLD_NAME = "relevance.safetensors"
"""Where older versions wrote it: among the weights. Still read, and never read as weights."""


def read_head(folder: Path) -> Head | None:
    """The head of the checkpoint in `folder`; None if it has none. Raises CheckpointError."""
    path = next((path for path in (folder / PATH, folder / OLD_NAME) if path.is_file()), None)
    if path is None:
        return None
    from safetensors.numpy import load_file

    try:
        return {name: array.astype(np.float32) for name, array in load_file(path).items()}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def head_digest(head: Mapping[str, NDArray[np.float32]] | None) -> str:
    """A digest of the head for cache keys; empty if there is none."""
    if head is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(head.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
