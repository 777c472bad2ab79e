"""Settings of request bodies."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class BodySettings:
    """Limits on request bodies."""

    max_body_mib: int = setting(64, "Largest request body, data URLs included.", low=1, high=4096)

    def __post_init__(self) -> None:
        check_settings(self)
