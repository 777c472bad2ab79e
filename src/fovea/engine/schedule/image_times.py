"""Expected seconds of the encoder for an image, learnt from every encoded image.

seconds = image_s + v * visual_s + v^2 * visual_pair_s          (v rows of encoder output)
"""

from __future__ import annotations

from fovea.engine.schedule.online_fit import Costs, OnlineFit

PROPORTIONS = (1.0, 1.0, 0.002)
"""Costs of an image, of a row and of a pair of rows, relative to each other, before the first image."""
MEMORY = 100
"""Number of images after which an older one has lost two thirds of its weight."""


class ImageTimes:
    """Predicts the seconds of the encoder for an image."""

    def __init__(self, costs: Costs | None = None) -> None:
        """costs: known ones, for simulations; None: they are learnt."""
        self._fit: Costs = costs or OnlineFit(PROPORTIONS, MEMORY)

    def seconds(self, rows: int) -> float:
        """Return the expected seconds for an image with these rows; 0 before the first image."""
        return self._fit.predict((1, rows, rows * rows)) if self._fit.measured else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from an encoded image. seconds: time of the encoder."""
        self._fit.observe((1, rows, rows * rows), seconds)
