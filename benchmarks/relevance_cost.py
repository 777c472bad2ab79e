"""Time the relevance decision for one image at a time: all steps before any region is encoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any, TypeVar
from unittest.mock import patch

from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.engine.regions.relevance_model import RelevanceModel
from fovea.engine.vision.encoding import Slices
from fovea.evaluation.datasets import Case
from fovea.relevance.pipeline import survey
from fovea.relevance.policy import look_shape
from relevance_encoder import RelevanceEncoder
from relevance_page import Cost

Result = TypeVar("Result")
TIMES = "survey", "view", "decoder", "planning"


@dataclass(slots=True)
class Watch:
    """Times of the calls of `RelevanceModel` for one image, in seconds.

    started: when encoding began.
    view: from then until the decoder's part of the look, so it is the encoder's part of it.
    decoder: the decoder's part of the look.
    planning: tensions, balancing, attending and layout.
    """

    started: float = field(default_factory=time.perf_counter)
    view: float = 0.0
    decoder: float = 0.0
    planning: float = 0.0


def measure(name: str, cases: Iterable[Case], keep: float) -> Cost:
    """Time the first image and question of each case; the first case runs twice, once to warm up."""
    loaded = load_model(name, EngineConfig())
    samples = list(cases)
    # Each encoder has empty caches, so that every look encodes its view.
    costs = [
        measure_case(RelevanceEncoder(loaded, caches=False), loaded.processor.capabilities, case, keep)
        for case in (samples[0], *samples)
    ][1:]
    times = {name: median(getattr(cost, name) for cost in costs) for name in TIMES}
    return Cost(**times, reused=fmean(cost.reused for cost in costs))


def measure_case(encoder: RelevanceEncoder, capabilities: Any, case: Case, keep: float) -> Cost:
    image = encoder.prepare(case.images[0], case.exchanges[0].question, keep)
    _, surveying = timed(partial(survey, image.arrays["rgb"], capabilities.any_size.factor))
    with watched() as watch:
        layout = encoder.realize(image).allocation.layout
    reused = layout.views[0].shape == look_shape(layout.grid)
    return Cost(surveying, watch.view, watch.decoder, watch.planning, float(reused))


@contextmanager
def watched() -> Iterator[Watch]:
    """Time the methods of `RelevanceModel` while one image is encoded."""
    watch, look = Watch(), RelevanceModel.look

    def timed_look(self: RelevanceModel, *args: Any) -> Slices[Any]:
        began = time.perf_counter()
        watch.view = began - watch.started
        result = yield from look(self, *args)
        watch.decoder = time.perf_counter() - began
        return result

    def planned(method: Callable[..., Result]) -> Callable[..., Result]:
        def call(*args: Any) -> Result:
            result, seconds = timed(partial(method, *args))
            watch.planning += seconds
            return result

        return call

    with (
        patch.object(RelevanceModel, "look", timed_look),
        patch.object(RelevanceModel, "tensions", planned(RelevanceModel.tensions)),
        patch.object(RelevanceModel, "realize", planned(RelevanceModel.realize)),
    ):
        yield watch


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
