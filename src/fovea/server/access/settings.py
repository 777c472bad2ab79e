"""Settings of keys and of what they may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Keys, their limits, and the logs about requests."""

    keys_file: Path | None = setting(
        None, "TOML file of hashed keys with their limits; it is read again when it changes. none: no file."
    )

    def __post_init__(self) -> None:
        check_settings(self)
