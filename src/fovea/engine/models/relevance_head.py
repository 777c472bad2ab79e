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
LAYERS = ("image", "words", "query", "hidden", "coupling")
"""Layers that every head has; others are those of its optional networks."""
MOST_BYTES = 64 << 20
"""Largest file of a head, in bytes; heads have less than one MiB."""
OLD_NAME = "relevance.safetensors"
"""File name of the head in older versions, beside the weights. It is still read, but never as weights."""


def read_head(folder: Path, width: int | None = None) -> Head | None:
    """Read the head of the checkpoint in `folder`. Returns None if there is none.

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
