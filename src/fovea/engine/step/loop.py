"""The engine's one thread: take what arrived, schedule, run, fold back, tell.

Everything that touches the scheduler or the model happens here, so neither needs a lock. Other threads put commands
into the inbox and get events from sinks. A defect in a step ends the requests of that step with an error and leaves
the rest running; a defect in the loop itself ends all of them, and `alive` says so.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from fovea.core.errors import DeadlineExceeded, EngineError, FoveaError, InvalidRequest, Unavailable
from fovea.core.stage import stage
from fovea.core.types import FinishReason, StageTimings, TokenLogprob
from fovea.engine.execute.runner import Runner, StepResult
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sample.sampler import Sampled
from fovea.engine.schedule.batch import BatchControl, DecodeBound
from fovea.engine.schedule.pace import Pace
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.sequence import Sequence, Status
from fovea.engine.step.events import Event
from fovea.engine.step.job import Job

log = logging.getLogger("fovea.engine")
STALL_S = 0.002
CALL_TIMEOUT_S = 60.0
FATAL_FAILURES = 10


class EngineLoop:
    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: ChatTokenizer) -> None:
        config = scheduler.config
        self.pace = Pace(config.pace, config.target_itl_ms / 1000, config.max_step_tokens)
        self.batch: BatchControl = DecodeBound(config.target_itl_ms / 1000, config.max_running)
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.steps = 0
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.encoded_images = 0
        self.encode_seconds = 0.0
        self.integrity_errors = 0
        self.failed_steps = 0
        self._failures_in_a_row = 0
        self._jobs: dict[str, Job] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fovea-engine", daemon=True)
        self._failure: BaseException | None = None
        self._closing = False

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._failure is None

    @property
    def unfinished(self) -> int:
        return len(self._jobs)

    def submit(self, jobs: list[Job]) -> None:
        """Thread-safe. Raises Unavailable when the loop is gone."""
        self._put(lambda: self._add(jobs))

    def cancel(self, sequence_ids: list[str]) -> None:
        """Thread-safe; ending what has ended is no error. The sinks hear finish_reason "abort"."""
        self._inbox.put(lambda: self._cancel(sequence_ids))

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` between two steps, on the loop's own thread; returns when it is done, or raises its error."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                done.put(error)
            else:
                done.put(None)

        self._put(run)
        try:
            error = done.get(timeout=CALL_TIMEOUT_S)
        except queue.Empty:
            raise EngineError(f"the engine did not answer within {CALL_TIMEOUT_S:g} s") from None
        if error is not None:
            raise error

    def _put(self, command: Callable[[], None]) -> None:
        """Checked again after the command is in: a loop that ended in between may never have seen it."""
        if self.alive and not self._closing:
            self._inbox.put(command)
        if not self.alive or self._closing:
            raise Unavailable("the engine has stopped")

    def close(self) -> None:
        """Abort what is left and stop the thread."""
        self._closing = True
        if self._thread.is_alive():
            self._inbox.put(lambda: self._cancel(list(self._jobs)))
            self._inbox.put(None)
            self._thread.join(timeout=60)

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                with stage("schedule"):  # what the step computes is within, in spans of its own
                    self._step()
        except BaseException as error:
            self._failure = error
            log.exception("the engine loop died")
            self._fail_all(EngineError("the engine stopped unexpectedly; see the server's log"))

    def _fail_all(self, error: EngineError) -> None:
        """Nobody may wait for an answer that will not come: not those that run, not those in the inbox."""
        with suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    with suppress(Exception):
                        command()
        for job in list(self._jobs.values()):
            self._say(job, Event(job.choice, finish_reason="error", error=error))
        self._jobs.clear()

    def _drain_inbox(self) -> bool:
        """Run the commands that wait; sleep while there is nothing else to do. False: stop."""
        block = self.scheduler.idle
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            with stage("schedule"):
                command()
            block = self.scheduler.idle

    def _step(self) -> None:
        now = time.monotonic()
        for seq in self.scheduler.expired(now):
            self._fail([seq.id], DeadlineExceeded("the request's timeout ran out", param="timeout"))
        if self.scheduler.idle:
            return
        readers, others = self.scheduler.readers, self.unfinished - self.scheduler.decodes
        tokens = self.pace.prompt_tokens(readers, others, encoding=self.runner.encoding)
        plan = self.scheduler.schedule(tokens, self.batch.allowed())
        if not plan:
            with stage("waiting"):
                time.sleep(STALL_S)
            return
        for seq_id in plan.done:
            job = self._jobs[seq_id]
            job.admitted, job.encoded_before_s, job.last_token = now, job.encode_s, now
            self._end(job, "length", Event(job.choice, finish_reason="length", timings=job.timings))
        self._mark_admitted(plan, now)
        decodes = plan.decodes
        started = time.perf_counter()
        try:
            result = self.runner.execute(plan, self.pace.encode_s(readers, others, plan.tokens - decodes))
        except Exception as error:
            log.exception("a step failed")
            involved = [item.seq.id for item in plan.work]
            involved += [holder for job in plan.encode for holder in job.holders]
            involved += [move.owner for move in plan.moves if move.owner]
            self.scheduler.abandon()
            self._fail(involved, EngineError(f"the step failed: {error}"))
            self._count_failure()
            return
        self._failures_in_a_row = 0
        self._learn(decodes, plan.tokens - decodes, time.perf_counter() - started, result.encode_s)
        self._account(plan, result)
        for seq_id, failure in result.failures.items():
            log.error("an image could not be encoded", exc_info=failure)
            self._fail([seq_id], failure)
        self.scheduler.update(plan, {seq_id: pick.token for seq_id, pick in result.sampled.items()})
        for seq_id, pick in result.sampled.items():
            try:
                self._tell(self._jobs[seq_id], pick)
            except Exception as error:
                log.exception("a token could not be told")
                self._fail([seq_id], EngineError(f"the request failed: {error}"))

    def _learn(self, decodes: int, tokens: int, seconds: float, encode_s: float) -> None:
        self.pace.observe(decodes, tokens, seconds, encode_s)
        self.batch.observe(decodes, seconds, encode_s + self.pace.prompt_s(tokens))

    def _count_failure(self) -> None:
        """A device that is gone fails every step at once; better a dead process, which is restarted, than that."""
        self.failed_steps += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FATAL_FAILURES:
            raise RuntimeError(f"{FATAL_FAILURES} steps in a row failed")

    def _mark_admitted(self, plan: StepPlan, now: float) -> None:
        for item in plan.work:
            job = self._jobs[item.seq.id]
            if job.admitted is None:
                job.admitted = now
                job.encoded_before_s = job.encode_s

    def _account(self, plan: StepPlan, result: StepResult) -> None:
        """The request that asked for an image first is charged for it."""
        self.steps += 1
        self.computed_tokens += plan.tokens
        self.encoded_images += len(result.encoded)
        self.encode_seconds += sum(result.encoded.values())
        for encode in plan.encode:
            self._jobs[encode.holders[0]].encode_s += result.encoded.get(encode.span.key, 0.0)

    def _add(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.seq.status is Status.FINISHED:
                continue
            if job.seq.id in self._jobs:
                name = job.seq.id.rpartition(":")[0]
                self._refuse(job, InvalidRequest(f"request {name!r} is running already", param="id"))
                continue
            try:
                self.runner.add(job.seq, job.choice, job.pixels, job.found)
            except Exception as error:
                log.exception("a request could not be taken in")
                self._refuse(job, EngineError(f"the request could not be taken in: {error}"))
                continue
            self._jobs[job.seq.id] = job
            self.runner.restore(job.seq)
            self.scheduler.add(job.seq)

    def _refuse(self, job: Job, error: FoveaError) -> None:
        """End a job that never came in; it must not be cancelled as another of its id."""
        job.seq.status, job.seq.finish_reason = Status.FINISHED, "error"
        self._say(job, Event(job.choice, finish_reason="error", error=error))

    def _cancel(self, sequence_ids: list[str]) -> None:
        for seq_id in sequence_ids:
            job = self._jobs.get(seq_id)
            if job is not None:
                self._end(job, "abort", Event(job.choice, finish_reason="abort"))

    def _fail(self, sequence_ids: list[str], error: Exception) -> None:
        if not isinstance(error, FoveaError):
            error = EngineError(f"the request failed: {error}")
        for seq_id in sequence_ids:
            job = self._jobs.get(seq_id)
            if job is not None:
                self._end(job, "error", Event(job.choice, finish_reason="error", error=error))

    def _tell(self, job: Job, pick: Sampled) -> None:
        """One new token: to text, to the one who waits, and perhaps the end."""
        now = time.monotonic()
        job.first_token = job.first_token or now
        job.last_token = now
        self.generated_tokens += 1
        seq = job.seq
        reason = self._reason(seq, pick.token)
        with stage("detokenize"):
            text = "" if reason == "stop" else job.text.push(pick.token)
            if reason is not None:
                text += job.text.finish()
        if job.text.stopped:
            reason = "stop"
        event = Event(
            job.choice,
            text=text,
            token_ids=(pick.token,),
            logprobs=self._logprobs(pick),
            finish_reason=reason,
            cached_tokens=seq.cached_tokens,
            timings=job.timings if reason else StageTimings(),
        )
        if reason is None:
            self._say(job, event)
        else:
            self._end(job, reason, event)

    def _reason(self, seq: Sequence, token: int) -> FinishReason | None:
        params = seq.sampling
        if len(seq.output_ids) >= params.min_tokens:
            if token in params.stop_token_ids:
                return "stop"
            if not params.ignore_eos and token in self.tokenizer.eos_ids:
                return "stop"
        return "length" if len(seq.output_ids) >= seq.max_tokens else None

    def _end(self, job: Job, reason: FinishReason, event: Event) -> None:
        self.scheduler.finish(job.seq, reason)
        self.runner.remove(job.seq)
        del self._jobs[job.seq.id]
        self._say(job, event)
        if not self._jobs:
            self._audit()

    def _say(self, job: Job, event: Event) -> None:
        """A listener that is gone (its event loop is closed) costs its own request, never the engine."""
        try:
            job.sink(event)
        except Exception:  # noqa: BLE001 - whatever a listener raises, the others go on
            log.warning("nobody listens to %s any more", job.seq.id)
            if event.finish_reason is None:
                self._cancel([job.seq.id])

    def _audit(self) -> None:
        """Nothing runs, so nothing may be held. A leak is logged and counted, never a reason to stop serving."""
        try:
            self.scheduler.check_integrity()
        except RuntimeError:
            self.integrity_errors += 1
            log.exception("the caches do not add up")

    def _logprobs(self, pick: Sampled) -> tuple[TokenLogprob, ...]:
        if pick.logprob is None:
            return ()
        top = tuple((token, self._written(token), value) for token, value in pick.top)
        return (TokenLogprob(pick.token, self._written(pick.token), pick.logprob, top),)

    def _written(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "surrogateescape")
