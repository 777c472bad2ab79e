"""The folders in which huggingface_hub stores checkpoints, for tests without a network."""

from __future__ import annotations

import shutil
from pathlib import Path


def hub_cache(folder: Path, where: Path, commit: str = "c" * 40) -> tuple[Path, Path]:
    """Lay out a checkpoint as huggingface_hub does, and return its snapshot and its blobs."""
    repository = where / "hub" / "models--org--name"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{commit[0]}{number:039x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (repository / "refs").mkdir(exist_ok=True)
    return snapshot, blobs
