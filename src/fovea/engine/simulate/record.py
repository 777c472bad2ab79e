"""Records the steps of a running engine, so that a cost model can be fitted to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fovea.engine.schedule.composition import composition_of
from fovea.engine.step.loop import EngineLoop
from fovea.planner.fit import ImageSample, StepSample


@dataclass(slots=True)
class StepRecord:
    """The steps of an engine, as they were seen.

    steps: composition and duration of each step that computed tokens, without the encoder's time.
    images: visual tokens, slices and duration of each encoded image.
    between: seconds from the end of each step to the start of the next one.
    """

    steps: list[StepSample] = field(default_factory=list)
    images: list[ImageSample] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@contextmanager
def recorded_steps(
    loop: EngineLoop, model: Any, clock: Callable[[], float] = time.perf_counter
) -> Generator[StepRecord]:
    """Record the steps of an engine's loop within the context.

    The durations are those of the executor's calls. On CUDA, work that it only launches is not in them.

    loop: of the engine, idle at the start and at the end of the context.
    model: the model, whose `encode_slices` is counted.
    """
    record = StepRecord()
    executor = loop.stepper.executor
    execute, encode = executor.execute, model.encode_slices
    ended = 0.0
    counts: list[int] = []

    def counted(image: Any) -> Generator[None, None, Any]:
        slices, count = encode(image), 1
        while True:
            try:
                next(slices)
            except StopIteration as stop:
                counts.append(count)
                return stop.value
            count += 1
            yield

    def observed(plan: Any, encode_s: float = float("inf")) -> Any:
        nonlocal ended
        made_of = composition_of(plan)
        visual = {job.span.key: job.span.tokens for job in plan.encode}
        counts.clear()
        started = clock()
        if ended:
            record.between.append(started - ended)
        result = execute(plan, encode_s)
        ended = clock()
        if made_of:
            record.steps.append(StepSample(made_of, ended - started - result.encode_s))
        for (key, seconds), slices in zip(result.encoded.items(), counts, strict=False):
            record.images.append(ImageSample(visual[key], slices, seconds))
        return result

    # Both are found as attributes of the instance before those of its class.
    executor.execute, model.encode_slices = observed, counted  # type: ignore[method-assign]
    try:
        yield record
    finally:
        del executor.execute, model.encode_slices
