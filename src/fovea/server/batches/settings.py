"""Settings of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The folder of files and batches, its size, and the speed of batches."""

    batch_dir: Path | None = setting(
        None,
        "Folder for /v1/files and /v1/batches. Batches that have not ended go on when the server starts "
        "again. none: both are refused.",
    )
    batch_store_mib: int = setting(
        1024, "Ceiling of all files and results of batches, in MiB.", low=1, high=1 << 20
    )
    batch_file_mib: int = setting(200, "Largest file that is accepted, in MiB.", low=1, high=1 << 20)
    batch_parallel: int = setting(
        4, "Requests of batches that are answered at a time, in all.", low=1, high=1024
    )

    def __post_init__(self) -> None:
        check_settings(self)
