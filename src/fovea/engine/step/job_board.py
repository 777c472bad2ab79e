"""The jobs inside the engine, and the events that go to their clients: tokens, errors, ends, timings."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from fovea.core.errors import EngineError, FoveaError, InvalidRequest, RequestError, Unavailable
from fovea.core.sampling import SamplingParams
from fovea.core.stage import stage
from fovea.core.types import FinishReason, StageTimings, TokenLogprob
from fovea.engine.events import Event
from fovea.engine.job import Job
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import Status
from fovea.engine.step.executor import PromptToken, SampledToken, StepResult
from fovea.engine.step.stepper import Step, Stepper

log = logging.getLogger("fovea.engine")


class JobBoard:
    """All unfinished jobs. For the thread that runs the steps.

    jobs: by sequence id.
    generated_tokens: number of tokens that were sampled.
    tokenizer: turns tokens into text.
    """

    def __init__(self, stepper: Stepper, tokenizer: ChatTokenizer) -> None:
        self.jobs: dict[str, Job] = {}
        self.generated_tokens = 0
        self._stepper = stepper
        self.tokenizer = tokenizer

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs to the scheduler. A job that cannot be added ends with an error event."""
        for job in jobs:
            if job.seq.status is Status.FINISHED:
                continue
            if job.seq.id in self.jobs:
                name = job.seq.id.rpartition(":")[0]
                self._refuse(job, InvalidRequest(f"request {name!r} is running already", param="id"))
                continue
            try:
                self._stepper.add(job.seq, job.inputs)
            except Exception as error:  # noqa: BLE001 - any error refuses this job alone
                self._refuse(job, _public(error, job))
                continue
            self.jobs[job.seq.id] = job

    def cancel(self, sequence_ids: Iterable[str]) -> None:
        """End jobs with finish_reason "abort". Unknown and ended ids are no error."""
        for seq_id in sequence_ids:
            job = self.jobs.get(seq_id)
            if job is not None:
                self._end(job, "abort", Event(job.choice, finish_reason="abort"))

    def fail(self, sequence_ids: Iterable[str], error: Exception) -> None:
        """End jobs with an error event. An internal error goes to the log; clients get its place there."""
        for seq_id in sequence_ids:
            job = self.jobs.get(seq_id)
            if job is not None:
                event = Event(job.choice, finish_reason="error", error=_public(error, job))
                self._end(job, "error", event)

    def fail_all(self, error: EngineError) -> None:
        """Send an error to every client when the engine is dead.

        Nothing is freed, because no step will run again.
        """
        for job in self.jobs.values():
            self._send(job, Event(job.choice, finish_reason="error", error=error))
        self.jobs.clear()

    def begin_step(self, step: Step, now: float) -> None:
        """Note the first step of each job, and end encode-only requests whose images are encoded.

        These end with "length": like an answer whose length limit is reached, they are complete, although the
        model has not ended the answer.
        """
        for item in step.plan.work:
            self._mark_admitted(self.jobs[item.seq.id], now)
        for seq_id in step.plan.encoded_ids:
            job = self.jobs[seq_id]
            job.admitted, job.encoded_before_s, job.last_token = now, job.encode_s, now
            self._end(job, "length", Event(job.choice, finish_reason="length", timings=job.timings))

    def end_step(self, step: Step, result: StepResult, now: float) -> None:
        """Send the step's tokens and failures.

        An image's encoding time counts for the request that needed it first.
        """
        for encode in step.plan.encode:
            job = self.jobs.get(encode.holders[0])
            if job is not None:
                job.encode_s += result.encoded.get(encode.span.key, 0.0)
        for seq_id, failure in result.failures.items():
            self.fail([seq_id], failure)
        for seq_id, scored in result.prompts.items():
            job = self.jobs.get(seq_id)
            if job is not None:
                job.scored |= map(self._prompt_logprob, scored)
        for seq_id, picks in result.sampled.items():
            try:
                self._send_tokens(self.jobs[seq_id], picks, now)
            except Exception as error:  # noqa: BLE001 - any error ends this job alone
                self.fail([seq_id], error)

    @staticmethod
    def _mark_admitted(job: Job, now: float) -> None:
        if job.admitted is None:
            job.admitted = now
            job.encoded_before_s = job.encode_s

    def _refuse(self, job: Job, error: FoveaError) -> None:
        """End a job that was never added, without ending another job that has the same id."""
        job.seq.status, job.seq.finish_reason = Status.FINISHED, "error"
        self._send(job, Event(job.choice, finish_reason="error", error=error))

    def _send_tokens(self, job: Job, picks: Seq[SampledToken], now: float) -> None:
        """Turn the new tokens of a step into text, send it, and end the job if one of them is the last.

        Tokens after the last one are dropped: a step that verifies drafts may go beyond a stop string.
        """
        job.first_token = job.first_token or now
        job.last_token = now
        before = len(job.seq.output_ids) - len(picks)
        text = ""
        logprobs: list[TokenLogprob] = []
        stop: str | int | None = None
        reason: FinishReason | None = None
        began = time.perf_counter()
        for count, pick in enumerate(picks, before + 1):
            with stage("detokenize"):
                more, reason, entry = self._read(job, pick, count)
            text += more
            logprobs += [entry] if entry is not None else []
            if reason is not None:
                named = self._ends(job.seq.sampling, pick.token, count)
                stop = job.text.found_stop
                if named and pick.token in job.seq.sampling.stop_token_ids:
                    stop = pick.token
                picks = picks[: count - before]
                break
        job.detokenize_s += time.perf_counter() - began
        self.generated_tokens += len(picks)
        event = Event(
            job.choice,
            text=text,
            token_ids=tuple(pick.token for pick in picks),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            stop=stop,
            cached_tokens=job.seq.cached_tokens,
            timings=job.timings if reason else StageTimings(),
            prompt=job.scored,
        )
        job.scored = {}
        if reason is None:
            self._send(job, event)
        else:
            self._end(job, reason, event)

    def _read(
        self, job: Job, pick: SampledToken, count: int
    ) -> tuple[str, FinishReason | None, TokenLogprob | None]:
        """Add a token to the answer's text.

        count: the answer's number of tokens with it.

        Returns the text that can be sent now, why the answer ends with this token (None: it goes on), and the
        token's log probability (None: the request wants none).
        """
        ends = self._ends(job.seq.sampling, pick.token, count)
        ends = ends or (pick.final and pick.token in self.tokenizer.eos_ids)
        offset = job.text.length
        text = "" if ends else job.text.push(pick.token)
        hidden = ends or (job.text.length == offset and pick.token in self.tokenizer.special_ids)
        reason: FinishReason | None = None
        if ends or pick.final:
            reason = "stop"
        elif count >= job.seq.max_tokens:
            reason = "length"
        if reason is not None:
            text += job.text.finish()
        if ends:  # its place is behind what was held back for an incomplete character
            offset = job.text.length
        if job.text.stopped:
            reason = "stop"
        return text, reason, self._logprob(pick, offset, hidden, first=count == 1)

    def _ends(self, params: SamplingParams, token: int, count: int) -> bool:
        """Whether a token is one that ends the answer. count: the answer's number of tokens with it."""
        if count < params.min_tokens:
            return False
        return token in params.stop_token_ids or (not params.ignore_eos and token in self.tokenizer.eos_ids)

    def _end(self, job: Job, reason: FinishReason, event: Event) -> None:
        self._stepper.finish(job.seq, reason)
        del self.jobs[job.seq.id]
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
                self.cancel([job.seq.id])

    def _logprob(self, pick: SampledToken, offset: int, hidden: bool, *, first: bool) -> TokenLogprob | None:
        if pick.logprob is None:
            return None
        top = tuple((token, self._written(token, first=first), value) for token, value in pick.top)
        text = self._written(pick.token, first=first)
        return TokenLogprob(pick.token, text, pick.logprob, top, offset=offset, hidden=hidden)

    def _prompt_logprob(self, scored: PromptToken) -> tuple[int, TokenLogprob]:
        top = tuple((token, self._written(token), value) for token, value in scored.top)
        text = self._written(scored.token)
        return scored.place, TokenLogprob(scored.token, text, scored.logprob, top, scored.rank)

    def _written(self, token: int, *, first: bool = False) -> str:
        """Return the text of a token. first: whether it begins an answer."""
        text = self.tokenizer.token_bytes(token).decode("utf-8", "surrogateescape")
        return text.removeprefix(" ") if first and self.tokenizer.drops_first_space else text


def _public(error: Exception, job: Job) -> FoveaError:
    """Return the error that a client gets.

    Errors about the request are sent as they are. The text of any other error may hold file paths, or numbers
    of other requests. It only goes to the log, with the request's id, and the client gets this id.
    """
    if isinstance(error, RequestError | Unavailable):
        return error
    name = job.seq.id.rpartition(":")[0]
    log.error("request %s failed", name, exc_info=error)
    return EngineError(f"the request failed inside the engine; the server's log has the details under {name}")
