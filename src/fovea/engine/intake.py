"""The way of a request from admission to the engine's loop and back, with and without asyncio.

`Visit.steps` is a generator of the steps to wait for. A callable is work for a worker thread. A future is
work in progress that other requests may wait for, too. `walk_async` waits in an event loop, `walk` in the
calling thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fovea.core.errors import Forbidden, FoveaError, InvalidImage, InvalidRequest, Overloaded
from fovea.core.types import Delta, GenerationRequest, ModelInfo, PlannedPrompt, Rendered
from fovea.engine.cache.embeddings import CacheShares
from fovea.engine.config import MIB
from fovea.engine.grammar.compiler import Grammar, GrammarCompiler, explain
from fovea.engine.job import Event, Export, Job, Sink
from fovea.engine.peers.client import Fetched, Peers, Wait
from fovea.engine.peers.layout import Layouts
from fovea.engine.request.admission import Admission, FirstTokenGate, leave_at_end, request_size
from fovea.engine.request.answer import AnswerState
from fovea.engine.request.pixels import Reservation
from fovea.engine.request.prepare import Preparer, ReadyRequest, RequestOutline, to_sequence
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.request.render import render
from fovea.engine.request.work_queue import WorkQueue, request_timeout, result_before, wait_for_shared
from fovea.engine.schedule.first_tokens import Expectation
from fovea.engine.sequence import Sequence
from fovea.engine.step.loop import EngineLoop
from fovea.relevance.pipeline import Realization

if TYPE_CHECKING:
    from fovea.engine.vision.encoding import VisualFeatures

log = logging.getLogger("fovea.engine")

Step = Callable[[], Any] | Future[Any]
Steps = Generator[Step, Any, None]
_Description = tuple[RequestOutline, Sequence, Expectation]


class Intake:
    """Admits requests and leads them to the engine's loop."""

    def __init__(
        self,
        loop: EngineLoop,
        preparer: Preparer,
        admission: Admission,
        info: ModelInfo,
        *,
        refuse: bool,
        find_realization: Callable[[str], Realization | None],
        gate: FirstTokenGate,
        shares: CacheShares,
        grammars: GrammarCompiler,
        peers: Peers | None = None,
        handover: Exporter | None = None,
    ) -> None:
        """loop, preparer, admission, info: parts of the engine.

        refuse: whether a request without room for its pixels is refused instead of queued.
        find_realization: returns the latest relevance result of an image, by the image's key.
        gate: admits requests by the expected time of their first token.
        shares: of the clients, in the caches of images.
        grammars: compiles the formats of answers.
        peers: engines that work for this one; None: none do.
        handover: offers results to engines for which this one works; None: it works for none.
        """
        self.find_realization = find_realization
        self.loop = loop
        self.preparer = preparer
        self.admission = admission
        self.info = info
        self.refuse = refuse
        self.gate = gate
        self.shares = shares
        self.grammars = grammars
        self.peers = peers
        self.handover = handover

    def render(self, request: GenerationRequest) -> Rendered:
        """Return the prompt that would be computed for a request now. For a worker thread. See `render`."""

        def lay_out(request: GenerationRequest, steps_down: int) -> tuple[PreparedPrompt, int]:
            return self.preparer.lay_out(request, self.info, self.admission.load, steps_down)

        return render(request, lay_out, self.gate)


class Exporter(Protocol):
    """Offers results of this engine (`execute.handover.Handover`)."""

    layouts: Layouts
    divided: bool

    def export(self, seq: Sequence, first: int | None, outputs: Iterable[tuple[str, int]]) -> Export: ...

    def keep(self, key: str, features: VisualFeatures) -> None: ...


class Visit:
    """One request on its way through the engine.

    `leave` gives back everything that the request holds, at any point. A second call does nothing.

    request: the request.
    arrival: time of arrival on the monotonic clock.
    """

    def __init__(self, intake: Intake, request: GenerationRequest, sink: Sink) -> None:
        """Admit the request. Raises the errors of `Admission.enter`."""
        self.request = request
        self.arrival = time.monotonic()
        self._intake = intake
        intake.shares.note(request.cache_salt, request.cache_share)
        self._ticket = intake.admission.enter(request.sampling.n)
        self._sink = leave_at_end(self._ticket, sink)
        self._reservation: Reservation | None = None
        self._ready: ReadyRequest | None = None
        self._answer: AnswerState | None = None
        self._jobs: list[Job] = []
        self._seq: Sequence | None = None
        self._wait = Wait()

    def steps(self) -> Steps:
        """Yield the steps that wait, then submit the jobs to the loop.

        They are: template and tokens, the frames of pruned videos, encoder outputs from slower tiers, room
        for the pixels, the pixels, and the grammar of the answer's format, which is compiled meanwhile.

        Raises the errors of these steps, such as RequestError and Overloaded.
        """
        intake, preparer, request = self._intake, self._intake.preparer, self.request
        self._check_offering()
        form = request.sampling.format
        compiling = None if form is None else intake.grammars.compile(form, request.client)
        outline: RequestOutline = yield from self._build()
        built_at = time.monotonic()
        self._commit(outline)
        fetched: Fetched = yield from self._ask_peers(outline)
        reservation = self._reservation = preparer.reserve(outline, fetched.keys)
        if intake.refuse and not reservation.granted.done():
            raise Overloaded(
                f"the request's images take about {reservation.size / MIB:.1f} MiB of processed pixels; "
                f"other requests have {preparer.pixel_bytes / MIB:.1f} of "
                f"{preparer.pixel_pool.capacity / MIB:.0f} MiB",
                retry_after=1.0,
                scope="request",
            )
        yield reservation.granted
        prompt = yield preparer.settle(outline.prompt)
        ready: ReadyRequest = yield partial(preparer.read, outline, prompt, reservation, fetched)
        futures = [(task.start(), number) for task, number in ready.needed_tasks]
        for future, number in futures:
            try:
                yield future
            except InvalidImage as error:
                raise error.at(number or 0) from error
        grammar: Grammar | None = None
        if compiling is not None and form is not None:
            try:
                grammar = yield compiling
            except InvalidRequest as error:
                raise explain(error, form) from error
        pixels_s = time.monotonic() - built_at
        decode_s = max((task.decode_s for task, _ in ready.needed_tasks), default=0.0)
        self._ready = ready
        scored = request.sampling.prompt_logprobs is not None
        offsets = (yield partial(preparer.offsets, request.prompt, ready.prompt)) if scored else ()
        self._jobs = preparer.jobs(
            request,
            outline,
            ready,
            reservation,
            self._sink,
            self.arrival,
            pixels_s,
            min(decode_s, pixels_s),
            grammar,
        )
        self._answer = AnswerState(
            request.id,
            ready.prompt,
            [job.reader for job in self._jobs],
            intake.find_realization,
            preparer.reasoning_marks,
            request.return_prompt_ids,
            offsets,
        )
        for job in self._jobs:
            job.seq.computed_elsewhere = fetched.computed
        if ready.prompt is outline.prompt and self._seq is not None:
            for job in self._jobs:  # the names of its blocks need not be calculated again
                job.seq.block_hashes = list(self._seq.block_hashes)
        self._offer_results(ready)
        intake.loop.submit(self._jobs)

    @property
    def done(self) -> bool:
        """Whether every choice has ended. Call it only after all steps."""
        assert self._answer is not None
        return self._answer.done

    def take(self, event: Event) -> Delta:
        """Turn an event of the loop into a delta. Raises the event's error.

        The reservation of pixels ends with the first event, because by then the pixels have been used.
        """
        assert self._answer is not None
        assert self._reservation is not None
        assert self._ready is not None
        delta = self._answer.take(event)
        self._reservation.release()
        self._ready.features.clear()
        return delta

    def _ask_peers(self, outline: RequestOutline) -> Generator[Step, Any, Fetched]:
        """Let peers compute the prompt, or encode its images, and wait for them."""
        intake, request, seq = self._intake, self.request, self._seq
        peers, fetched = intake.peers, Fetched()
        for_peer = request.offering is not None
        if peers is None or seq is None or intake.handover is None or (for_peer and request.encode_only):
            return fetched  # images for a peer are encoded here: peers that ask each other would not end
        if not request.encode_only and not for_peer:
            prefilling = peers.prefill(request, outline.prompt, seq, self._wait)
            if prefilling is not None:
                fetched = yield prefilling
        if not fetched.covered:
            missing = intake.preparer.missing_images(outline)
            if not request.encode_only and not (request.offering and request.offering.outputs):
                needed = peers.needed_keys(outline.prompt, seq)
                missing = [image for image in missing if image.key in needed]
            encoding = peers.encode(request, missing, intake.handover.keep, self._wait)
            if encoding is not None:
                encoded: Fetched = yield encoding
                fetched.features |= encoded.features
        return fetched

    def _check_offering(self) -> None:
        """Refuse a peer whose results could not be of use, before anything is computed."""
        offering, handover, prompt = self.request.offering, self._intake.handover, self.request.prompt
        if offering is None:
            return
        if handover is None:
            raise Forbidden("this engine works for no peers", code="role")
        layouts = handover.layouts
        if offering.layout != (layouts.encoder if offering.first is None else layouts.decoder):
            raise Forbidden(
                "this engine has other weights, or another version, precision, kind of processor or kernels, "
                "kv_dtype or block_size than the one that asks",
                code="layout",
            )
        if offering.road != layouts.road:
            raise Forbidden(
                f"this engine offers by {layouts.road!r}, the one that asks fetches by {offering.road!r}; "
                "peers need one connector, and shm one host and one transfer_dir",
                code="layout",
            )
        if handover.divided and offering.first is not None:
            raise Forbidden("this engine has its keys and values in parts, on several devices", code="role")
        images = len(prompt.images) if isinstance(prompt, PlannedPrompt) else 0
        if not all(0 <= number < images for number in offering.outputs):
            raise InvalidRequest(f"outputs is {offering.outputs}; there are {images} images", param="outputs")

    def _offer_results(self, ready: ReadyRequest) -> None:
        """Offer the results of the first job to the peer that asked for them."""
        offering, handover = self.request.offering, self._intake.handover
        if offering is None or handover is None:
            return
        images = ready.prompt.images
        outputs = [(images[number].key, images[number].plan.rows) for number in offering.outputs]
        job = self._jobs[0]
        job.export = handover.export(job.seq, offering.first, outputs)

    def leave(self) -> None:
        """Release the reservation and the place in admission, and cancel unfinished jobs."""
        self._wait.over = True
        if self._reservation is not None:
            self._reservation.release()
        self._ticket.leave()
        if self._seq is not None:
            self._intake.gate.leave(self._seq)
        unfinished = [job.seq.id for job in self._jobs if job.seq.finish_reason is None]
        if unfinished:
            self._intake.loop.cancel(unfinished)

    def _build(self) -> Generator[Step, Any, RequestOutline]:
        """Build the outline, with less detail of images as long as the first token would be late.

        Raises Overloaded if the first token is late with the least detail, too.
        """
        gate = self._intake.gate
        for steps_down in gate.attempts:
            described: _Description = yield partial(self._describe, steps_down)
            outline, seq, expected = described
            if not outline.prompt.images or not gate.late(seq, expected):
                break
        gate.enter(seq, expected, steps_down)
        self._seq = seq
        return outline

    def _describe(self, steps_down: int) -> _Description:
        """Build the outline and predict the first token. For a worker thread: it hashes the whole prompt."""
        intake, request = self._intake, self.request
        outline = intake.preparer.build(request, intake.info, intake.admission.load, steps_down)
        seq = to_sequence(request, outline.prompt, outline.max_tokens, self.arrival)
        return outline, seq, intake.gate.expect(seq)

    def _commit(self, outline: RequestOutline) -> None:
        """Count the request's KV in admission, and log the detail level of its images. Both are known now."""
        request, prompt = self.request, outline.prompt
        level = logging.DEBUG if self._intake.preparer.builder.detail.lossless else logging.INFO
        for index, image in enumerate(prompt.images):
            use = image.use
            values = (request.id, index, use.detail, use.tokens, use.reason)
            log.log(level, "%s: image %d at %s (%d tokens): %s", *values)
        if not request.encode_only:
            answer = request.sampling.max_tokens or request.usual_tokens
            size = request_size(len(prompt.ids), prompt.image_tokens, answer, request.sampling.n)
            self._ticket.commit(size)


async def walk_async(steps: Steps, workers: WorkQueue, timeout: float | None, cost: float = 0.0) -> None:
    """Take all steps in an event loop.

    cost: of the steps that a worker takes.
    Raises DeadlineExceeded after `timeout` seconds, and the error of a step.
    """
    async with request_timeout(timeout):
        step = _next(steps, None)
        while step is not None:
            try:
                if isinstance(step, Future):
                    await wait_for_shared(step)
                    result = step.result()
                else:
                    result = await workers.run(step, cost)
            except FoveaError as error:
                step = _fail(steps, error)
            else:
                step = _next(steps, result)


def walk(steps: Steps, deadline: float | None) -> None:
    """Take all steps in this thread, which also does the work of callables.

    deadline: on the monotonic clock; None: no deadline.
    Raises DeadlineExceeded after the deadline, and the error of a step.
    """
    step = _next(steps, None)
    while step is not None:
        try:
            result = result_before(deadline, step) if isinstance(step, Future) else step()
        except FoveaError as error:
            step = _fail(steps, error)
        else:
            step = _next(steps, result)


def _next(steps: Steps, result: Any) -> Step | None:
    """Send the result of the last step into the generator, and return the next step; None: there is none."""
    try:
        return steps.send(result)
    except StopIteration:
        return None


def _fail(steps: Steps, error: FoveaError) -> Step | None:
    """Raise the error of the last step in the generator, which may name the image that it concerns."""
    try:
        return steps.throw(error)
    except StopIteration:
        return None
