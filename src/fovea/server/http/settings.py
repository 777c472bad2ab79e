"""Settings of connections."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits on connections, headers and their times."""

    keep_alive_s: float = setting(
        5.0, "Seconds that a connection may wait for its next request.", low=0.1, high=3600
    )

    def __post_init__(self) -> None:
        check_settings(self)
