"""Settings of `fovea doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """How long and how hard the checks of load try."""

    load_seconds: float = setting(
        4.0, "Seconds of each level of load; longer levels give steadier percentiles.", low=0.1, high=3600
    )
    max_clients: int = setting(64, "Most clients in the search for the saturation.", low=1, high=4096)
    start_timeout: float = setting(
        600.0, "Seconds that a server which doctor starts has until it is ready.", low=1, high=86400
    )

    def __post_init__(self) -> None:
        check_settings(self)
