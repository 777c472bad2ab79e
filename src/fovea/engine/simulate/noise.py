"""Random disturbances of simulated durations, so that a control can be tested as on a real machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class NoiseSettings:
    """Size of the disturbances. Raises ConfigError for a value out of range."""

    noise: float = setting(
        0.0,
        "Spread of the durations of steps and slices: standard deviation of their logarithm.",
        low=0,
        high=2,
    )
    stalls: float = setting(0.0, "Share of steps and slices that stall.", low=0, high=1)
    stall_factor: float = setting(5.0, "A stall takes this multiple of the time.", low=1, high=1000)
    noise_seed: int = setting(0, "The same seed gives the same disturbances.", low=0, high=2**31)

    def __post_init__(self) -> None:
        check_settings(self)


class Noise:
    """Disturbs durations: each is multiplied by a log-normal factor with median 1, and a few are stalls."""

    def __init__(self, settings: NoiseSettings) -> None:
        self._settings = settings
        self._random = Random(f"noise {settings.noise_seed}")

    def disturb(self, seconds: float) -> float:
        """Return the disturbed duration of something that takes `seconds` seconds by the cost model."""
        settings = self._settings
        factor = math.exp(self._random.gauss(0.0, settings.noise)) if settings.noise else 1.0
        if settings.stalls and self._random.random() < settings.stalls:
            factor *= settings.stall_factor
        return seconds * factor
