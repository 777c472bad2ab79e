"""The jobs inside the engine, and the events that go to their clients: tokens, errors, ends, timings.

Waking an event loop costs a system call. One call per row would be a large part of a step's host work. So the
events of a step wait here until all of them are there, and each event loop is woken once.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop, Queue
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from fovea.core.errors import EngineError, FoveaError, InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import FinishReason
from fovea.engine.job import Event, Job, Reading, SampledToken, Sink
from fovea.engine.request.answer import public_error
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import Sequence, Status
from fovea.engine.step.executor import StepResult
from fovea.engine.step.stepper import Step, Stepper

log = logging.getLogger("fovea.engine")
Mail = list[tuple["Queue[Event]", Event]]


class JobBoard:
    """All unfinished jobs. For the thread that runs the steps.

    Every public method ends by waking the event loops for which it had events, each of them once.

    jobs: by sequence id.
    generated_tokens: number of tokens that were sampled.
    tokenizer: knows the tokens that end answers.
    outbox: makes sinks for event loops.
    """

    def __init__(self, stepper: Stepper, tokenizer: ChatTokenizer) -> None:
        self.jobs: dict[str, Job] = {}
        self._exporting: dict[str, Job] = {}
        self.generated_tokens = 0
        self._stepper = stepper
        self.tokenizer = tokenizer
        self.outbox = Outbox()

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs to the scheduler. A job that cannot be added ends with an error event."""
        for job in jobs:
            if job.seq.status is Status.FINISHED:
                continue
            if job.seq.id in self.jobs:
                message = f"request {job.request!r} is running already"
                self._refuse(job, InvalidRequest(message, param="id"))
                continue
            try:
                self._stepper.add(job.seq, job.inputs)
            except Exception as error:  # noqa: BLE001 - any error refuses this job alone
                self._refuse(job, public_error(error, job.request))
                continue
            self.jobs[job.seq.id] = job
            if job.export is not None:
                self._exporting[job.seq.id] = job
        self.outbox.flush()

    def cancel(self, sequence_ids: Iterable[str]) -> None:
        """End jobs with finish_reason "abort". Unknown and ended ids are ignored."""
        for seq_id in sequence_ids:
            self._cancel(seq_id)
        self.outbox.flush()

    def fail(self, sequence_ids: Iterable[str], error: Exception) -> None:
        """End jobs with an error event. An internal error goes to the log; clients get its place there."""
        for seq_id in sequence_ids:
            self._fail(seq_id, error)
        self.outbox.flush()

    def fail_all(self, error: EngineError) -> None:
        """Send an error to every client when the engine is dead.

        Nothing is freed, because no step will run again.
        """
        for job in self.jobs.values():
            self._send(job, Event(job.choice, finish_reason="error", error=error))
        self.jobs.clear()
        self._exporting.clear()
        self.outbox.flush()

    def begin_step(self, step: Step, now: float) -> None:
        """Note the first step of each job, and end encode-only requests whose images are encoded.

        These end with "length": like an answer whose length limit is reached, they are complete, although the
        model has not ended the answer.
        """
        for item in step.plan.work:
            job = self.jobs[item.seq.id]
            if job.admitted is None:
                job.admitted, job.encoded_before_s = now, job.encode_s
        for seq_id in step.plan.encoded_ids:
            job = self.jobs[seq_id]
            job.admitted, job.encoded_before_s, job.last_token = now, job.encode_s, now
            offers = () if job.export is None else job.export.take(job.seq)
            last = Event(job.choice, finish_reason="length", timings=job.timings, offers=offers)
            self._end(job, "length", last)
        self.outbox.flush()

    def end_step(self, step: Step, result: StepResult, now: float) -> None:
        """Send the step's tokens and failures.

        An image's encoding time counts for the request that needed it first.
        """
        for encode in step.plan.encode:
            job = self.jobs.get(encode.holders[0])
            if job is not None:
                job.encode_s += result.encoded.get(encode.span.key, 0.0)
        for seq_id, failure in result.failures.items():
            self._fail(seq_id, failure)
        for seq_id, scored in result.prompts.items():
            job = self.jobs.get(seq_id)
            if job is not None:
                job.scored += scored
        self._send_offers()
        for seq_id, picks in result.sampled.items():
            try:
                self._send_tokens(self.jobs[seq_id], picks, now)
            except Exception as error:  # noqa: BLE001 - any error ends this job alone
                self._fail(seq_id, error)
        self.outbox.flush()

    def _send_offers(self) -> None:
        """Offer what the step has made ready. A job's blocks are still there, whether it ends now or not."""
        for job in list(self._exporting.values()):
            assert job.export is not None
            try:
                offers = job.export.take(job.seq)
            except Exception as error:  # noqa: BLE001 - any error ends this job alone
                self._fail(job.seq.id, error)
                continue
            if offers:
                self._send(job, Event(job.choice, offers=offers))

    def _cancel(self, seq_id: str) -> None:
        job = self.jobs.get(seq_id)
        if job is not None:
            self._end(job, "abort", Event(job.choice, finish_reason="abort"))

    def _fail(self, seq_id: str, error: Exception) -> None:
        job = self.jobs.get(seq_id)
        if job is not None:
            error = public_error(error, job.request)
            self._end(job, "error", Event(job.choice, finish_reason="error", error=error))

    def _refuse(self, job: Job, error: FoveaError) -> None:
        """End a job that was never added, without ending another job that has the same id."""
        job.seq.status, job.seq.finish_reason = Status.FINISHED, "error"
        self._send(job, Event(job.choice, finish_reason="error", error=error))

    def _send_tokens(self, job: Job, picks: Seq[SampledToken], now: float) -> None:
        """Send the new tokens of a step, and end the job if one of them is the last.

        Tokens after the last one are dropped: a step that verifies drafts may go beyond it.
        """
        job.first_token = job.first_token or now
        job.last_token = now
        sampled = len(picks)
        before = len(job.seq.output_ids) - sampled
        picks, reason, ended = self._cut(job.seq, picks, before)
        reading: Reading | None = None
        stop: str | int | None = None
        if job.seq.sampling.stop:
            reading = job.reader.read(picks, ended=ended, last=reason is not None)
            stop = job.reader.found_stop
            if stop is not None:
                ended = ended and reading.tokens == len(picks)
                picks, reason = picks[: reading.tokens], "stop"
        self.generated_tokens += len(picks)
        params, last = job.seq.sampling, picks[-1].token
        if ended and last in params.stop_token_ids and self._ends(params, last, before + len(picks)):
            stop = last
        cached, scored = job.seq.cached_tokens, job.scored
        if scored:
            job.scored = []
        if reason is None:
            self._send(job, Event(job.choice, picks, cached_tokens=cached, prompt=scored, reading=reading))
        else:
            timings = job.timings
            event = Event(
                job.choice,
                picks,
                ended,
                reading,
                reason,
                stop,
                None,
                cached,
                scored,
                timings,
                job.seq.dropped,
                job.seq.draft_use.cut(sampled - len(picks), predicted=bool(job.inputs.prediction)),
            )
            self._end(job, reason, event)

    def _cut(
        self, seq: Sequence, picks: Seq[SampledToken], before: int
    ) -> tuple[Seq[SampledToken], FinishReason | None, bool]:
        """Find the last token of an answer among its new ones.

        before: the answer's number of tokens before them.

        Returns the tokens up to it, why the answer ends with it (None: it goes on), and whether it is a token
        that ends answers and is not a part of their text.
        """
        for count, pick in enumerate(picks, 1):
            ended = self._ends(seq.sampling, pick.token, before + count)
            ended = ended or (pick.final and pick.token in self.tokenizer.eos_ids)
            if ended or pick.final:
                return picks[:count], "stop", ended
            if before + count >= seq.max_tokens:
                return picks[:count], "length", False
        return picks, None, False

    def _ends(self, params: SamplingParams, token: int, count: int) -> bool:
        """Whether a token is one that ends the answer. count: the answer's number of tokens with it."""
        if count < params.min_tokens:
            return False
        return token in params.stop_token_ids or (not params.ignore_eos and token in self.tokenizer.eos_ids)

    def _end(self, job: Job, reason: FinishReason, event: Event) -> None:
        self._stepper.finish(job.seq, reason)
        del self.jobs[job.seq.id]
        self._exporting.pop(job.seq.id, None)
        self._send(job, event)

    def _send(self, job: Job, event: Event) -> None:
        """Call the job's sink.

        If the sink fails, for example because its event loop is closed, only this job ends.
        """
        try:
            job.sink(event)
        except Exception:  # noqa: BLE001 - a sink may raise anything; the other jobs go on
            log.warning("the events of %s can no longer be delivered", job.seq.id)
            if event.finish_reason is None:
                self._cancel(job.seq.id)


class Outbox:
    """The events that wait for the end of the step, by event loop. For the thread that runs the steps."""

    def __init__(self) -> None:
        self._mail: defaultdict[AbstractEventLoop, Mail] = defaultdict(list)

    def sink(self, loop: AbstractEventLoop, queue: Queue[Event]) -> Sink:
        """Return a sink whose events are put into `queue` in the thread of `loop`, after the next `flush`.

        The sink raises RuntimeError if the event loop is closed. Any thread may call this method.
        """

        def post(event: Event) -> None:
            if loop.is_closed():
                raise RuntimeError("the event loop is closed")
            self._mail[loop].append((queue, event))

        return post

    def flush(self) -> None:
        """Hand the waiting events over. Events for a loop that was closed meanwhile are dropped."""
        if not self._mail:
            return
        waiting, self._mail = self._mail, defaultdict(list)
        for loop, mail in waiting.items():
            try:
                loop.call_soon_threadsafe(_put_all, mail)
            except Exception:  # noqa: BLE001 - a loop may be of any kind; the others get their events
                log.warning("an event loop was closed; %d events are not delivered", len(mail))


def _put_all(mail: Mail) -> None:
    for queue, event in mail:
        queue.put_nowait(event)
