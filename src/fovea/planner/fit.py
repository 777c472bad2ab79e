"""Fits a cost model to measurements of a real engine, with no parameter below zero.

The errors are relative because a step of 2 ms and one of 300 ms matter alike. They have Huber's weights
because other processes on the machine make some steps slow and none fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.core.errors import ConfigError
from fovea.planner.cost import Composition, CostModel

STEP_PARAMETERS = ("step_s", "decode_s", "context_s", "token_s", "chunk_s", "pair_s")
IMAGE_PARAMETERS = ("image_s", "visual_s", "visual_pair_s")
ROUNDS = 20
HUBER = 1.345
SMALLEST = 1e-6
"""Seconds: a floor for those parameters that may not be zero."""

Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step and its seconds, without those of the encoder."""

    made_of: Composition
    seconds: float


@dataclass(frozen=True, slots=True)
class ImageSample:
    """An encoded image: its visual tokens, slices and seconds."""

    visual_tokens: int
    slices: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Error:
    """Absolute relative errors of a fit: |predicted / measured - 1|."""

    median: float
    p90: float
    count: int

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> Error:
        off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(float(np.median(off)), float(np.quantile(off, 0.9)), len(off))


def fit_steps(seen: Sequence[StepSample]) -> dict[str, float]:
    """The parameters of a step. Raises ConfigError when nothing was seen."""
    rows = [
        [1, m.decodes, m.decode_context, m.prompt_tokens, m.chunks, m.pairs]
        for m in (s.made_of for s in seen)
    ]
    found = _fit(rows, [s.seconds for s in seen], STEP_PARAMETERS, "step")
    return {**found, "step_s": max(found["step_s"], SMALLEST)}


def fit_images(seen: Sequence[ImageSample]) -> dict[str, float]:
    """The parameters of an image, its slices' length among them. Raises ConfigError when nothing was seen."""
    rows = [[1, s.visual_tokens, s.visual_tokens**2] for s in seen]
    found = _fit(rows, [s.seconds for s in seen], IMAGE_PARAMETERS, "image")
    slices = float(np.median([s.seconds / s.slices for s in seen]))
    return {**found, "slice_s": max(slices, SMALLEST)}


@dataclass(frozen=True, slots=True)
class Preparation:
    """Seconds until the engine can schedule a request.

    request_s: of every request. token_s: per token of its prompt. pixel_s: per pixel of its images.
    """

    request_s: float
    token_s: float
    pixel_s: float

    def seconds(self, prompt: int, pixels: int) -> float:
        """Return the seconds for a prompt and its images, from numbers of tokens and pixels."""
        return self.request_s + prompt * self.token_s + pixels * self.pixel_s


def fit_preparation(seen: Sequence[tuple[int, int, float]]) -> Preparation:
    """Return the preparation that fits requests, each (tokens of its prompt, pixels, seconds)."""
    rows = [[1, prompt, pixels] for prompt, pixels, _ in seen]
    found = _fit(rows, [max(seconds, SMALLEST) for _, _, seconds in seen], ("r", "t", "p"), "request")
    return Preparation(found["r"], found["t"], found["p"])


def step_error(cost: CostModel, seen: Sequence[StepSample]) -> Error:
    """Return the errors of a cost model for measured steps."""
    return Error.of([cost.step(s.made_of) for s in seen], [s.seconds for s in seen])


def image_error(cost: CostModel, seen: Sequence[ImageSample]) -> Error:
    """Return the errors of a cost model for measured images."""
    return Error.of([cost.image(s.visual_tokens) for s in seen], [s.seconds for s in seen])


def _fit(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], names: Sequence[str], what: str
) -> dict[str, float]:
    if not rows:
        raise ConfigError(f"no {what} was seen; a cost model needs some of every kind")
    measured = np.asarray(seconds, dtype=np.float64)
    scaled = np.asarray(rows, dtype=np.float64) / measured[:, None]
    weights = np.ones(len(measured))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = _not_negative(scaled * root[:, None], root)
        off = np.abs(scaled @ found - 1)
        spread = max(float(np.median(off)) / 0.6745, 1e-9)
        weights = np.minimum(1.0, HUBER * spread / np.maximum(off, 1e-12))
    return dict(zip(names, map(float, found), strict=True))


def _not_negative(a: Rows, b: Rows) -> Rows:
    """Least squares of a x = b with x >= 0.

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), the active set method.
    """
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    a = a / scale
    x = np.zeros(a.shape[1])
    passive = np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        gradient[passive] = -np.inf
        if gradient.max() <= 1e-10:
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros_like(x)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            if trial[passive].min(initial=np.inf) > 0:
                break
            back = passive & (trial <= 0)
            step = float(np.min(x[back] / np.maximum(x[back] - trial[back], 1e-300)))
            x = x + step * (trial - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
        x = trial
    return np.asarray(x / scale)
