"""A request from admission to the engine's loop and out again, written once for callers with and without asyncio.

`Visit.steps` is a generator of what has to be waited for: a callable is work for a worker thread, a future is work that
is under way and that others may wait for, too. `walk_async` waits with an event loop, `walk` with the thread that asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from fovea.core.errors import Overloaded
from fovea.core.types import Delta, GenerationRequest, ModelInfo
from fovea.engine.config import MIB
from fovea.engine.events import Event, Sink
from fovea.engine.job import Job
from fovea.engine.request.admission import Admission, request_size
from fovea.engine.request.answer import AnswerState
from fovea.engine.request.pixel_pool import Claim
from fovea.engine.request.prepare import Prepared, Preparer, Ready
from fovea.engine.request.waiting import deadline, shared, until
from fovea.engine.step.loop import EngineLoop
from fovea.relevance.pipeline import Realization

log = logging.getLogger("fovea.engine")

Steps = Generator[Callable[[], Any] | Future[Any], Any, None]


class Intake:
    """Where requests come in."""

    def __init__(
        self,
        loop: EngineLoop,
        preparer: Preparer,
        admission: Admission,
        info: ModelInfo,
        *,
        refuse: bool,
        realization: Callable[[str], Realization | None],
    ) -> None:
        """refuse: refuse a request instead of letting it wait for room for its pixels.

        realization: the latest relevance result of an image, by its key.
        """
        self.realization = realization
        self.loop = loop
        self.preparer = preparer
        self.admission = admission
        self.info = info
        self.refuse = refuse

    def visit(self, request: GenerationRequest, sink: Sink) -> Visit:
        """Raises Overloaded at once when as many are in as may be."""
        return Visit(self, request, sink)


class Visit:
    """One request. `leave` gives back everything it holds, wherever it stands; leaving twice is no error."""

    def __init__(self, intake: Intake, request: GenerationRequest, sink: Sink) -> None:
        self.request = request
        self.arrival = time.monotonic()
        self._intake = intake
        self._sink = sink
        self._ticket = intake.admission.enter(request.sampling.n)
        self._claim: Claim | None = None
        self._ready: Ready | None = None
        self._answer: AnswerState | None = None
        self._jobs: list[Job] = []

    def steps(self) -> Steps:
        """Template and tokens, room for the pixels, the pixels, then the loop's inbox."""
        intake, preparer, request = self._intake, self._intake.preparer, self.request
        prepared: Prepared = yield partial(preparer.build, request, intake.info, intake.admission.load)
        built = time.monotonic()
        self._commit(prepared)
        claim = self._claim = preparer.claim(prepared)
        if intake.refuse and not claim.granted.done():
            raise Overloaded(
                f"the request's images take about {claim.size / MIB:.1f} MiB of processed pixels; others have "
                f"{preparer.pixel_bytes / MIB:.1f} of {preparer.pixels.capacity / MIB:.0f} MiB",
                retry_after=1.0,
            )
        yield claim.granted
        settled = yield preparer.settle(prepared.prompt)
        ready: Ready = yield partial(preparer.read, prepared, settled, claim)
        for made in [task.start() for task in ready.needed]:  # noqa: UP028 - a list cannot be sent what was found
            yield made
        pixels_s = time.monotonic() - built
        self._ready, self._answer = ready, AnswerState(ready.prompt, request.sampling.n, intake.realization)
        self._jobs = preparer.jobs(request, prepared, ready, claim, self._sink, self.arrival, pixels_s)
        intake.loop.submit(self._jobs)

    @property
    def done(self) -> bool:
        """Whether every choice has ended. For whoever has taken all steps."""
        assert self._answer is not None
        return self._answer.done

    def take(self, event: Event) -> Delta:
        """What the loop said, as a delta; raises the event's error. With the first one the pixels have been used."""
        assert self._answer is not None
        assert self._claim is not None
        assert self._ready is not None
        delta = self._answer.take(event)
        self._claim.release()
        self._ready.found.clear()
        return delta

    def leave(self) -> None:
        if self._claim is not None:
            self._claim.release()
        self._ticket.leave()
        unfinished = [job.seq.id for job in self._jobs if job.seq.finish_reason is None]
        if unfinished:
            self._intake.loop.cancel(unfinished)

    def _commit(self, prepared: Prepared) -> None:
        """What the request will take is known now; so is how closely its images are looked at."""
        request, prompt = self.request, prepared.prompt
        level = logging.DEBUG if self._intake.preparer.builder.detail.lossless else logging.INFO
        for index, image in enumerate(prompt.images):
            seen = image.seen
            said = (request.id, index, seen.detail, seen.tokens, seen.reason)
            log.log(level, "%s: image %d at %s (%d tokens): %s", *said)
        if not request.encode_only:
            asked = request.sampling.max_tokens or request.usual_tokens
            self._ticket.commit(request_size(len(prompt.ids), prompt.image_tokens, asked, request.sampling.n))


async def walk_async(steps: Steps, workers: Executor, timeout: float | None) -> None:
    """Take all steps. Raises DeadlineExceeded after `timeout` seconds, and whatever a step raises."""
    loop = asyncio.get_running_loop()
    async with deadline(timeout):
        found: Any = None
        while (step := _next(steps, found)) is not None:
            if isinstance(step, Future):
                await shared(step)
                found = step.result()
            else:
                found = await loop.run_in_executor(workers, step)


def walk(steps: Steps, ends: float | None) -> None:
    """The same in this thread, which does the work itself. ends: on the monotonic clock; None: no deadline."""
    found: Any = None
    while (step := _next(steps, found)) is not None:
        found = until(ends, step) if isinstance(step, Future) else step()


def _next(steps: Steps, found: Any) -> Callable[[], Any] | Future[Any] | None:
    try:
        return steps.send(found)
    except StopIteration:
        return None
