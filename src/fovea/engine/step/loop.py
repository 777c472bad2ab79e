"""The engine's thread: take commands, plan a step, execute it, apply its result, send events.

Everything that touches the scheduler or the model happens in this thread, so neither needs a lock. Other
threads put commands into the inbox and get events through sinks.

An error ends as few requests as possible. An error in one image or one token ends its own request. An error
of a whole step ends the one request that causes it: the step's sequences are tried again in smaller groups
until it is found (`FailureSearch`). If steps keep failing, a trivial sequence of the loop's own is tried
(`probe_job`). If that fails, too, the device is dead. Only this, and an error in the loop itself, ends all
requests, and `alive` becomes false.

On CUDA the device computes a step while the host finishes the one before it: its tokens are sent while the
next ones are computed. This is so as long as the next step is clear without them (`Stepper.follow`). A
command waits for the step that was launched last.

A step that does not fit into the device's memory is tried again in halves, and later steps stay smaller for
a while (`Stepper.retreat`). A request ends only if it does not fit even alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from fovea.core.errors import DeadlineExceeded, EngineError, OutOfMemory, Unavailable
from fovea.core.measure import stage
from fovea.core.sampling import SamplingParams
from fovea.engine.job import Event, Job, SequenceInputs
from fovea.engine.request.answer import AnswerReader
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import AsyncExecutor, LostRank, StepOutOfMemory, StepResult
from fovea.engine.step.job_board import JobBoard
from fovea.engine.step.stepper import Step, Stepper

PROBE = "fovea-probe:0"
"""Id of the job's sequence."""
log = logging.getLogger("fovea.engine")
STALL_S = 0.002
"""Pause after a step in which nothing could advance."""
CALL_TIMEOUT_S = 60.0
"""Seconds that `EngineLoop.call` waits for its action."""
FATAL_FAILURES = 10
"""Number of failed steps in a row after which a probe is computed. If it fails, too, the loop ends."""


NO_ROOM = (
    "the request does not fit into the memory of the engine's device, even alone and in the smallest steps; "
    "accepted: a shorter prompt, or smaller images"
)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is being computed.

    started: time at which it was launched.
    finish: waits for its result.
    launched: the executor's own account of it; None: the executor has none.
    """

    step: Step
    started: float
    finish: Callable[[], StepResult]
    launched: Any = None


class EngineLoop:
    """The engine's thread and its inbox.

    stepper: scheduler and executor.
    board: the unfinished jobs.
    integrity_errors: how often a leak was found when the engine became idle.
    failed_steps: number of steps that raised.
    """

    def __init__(self, stepper: Stepper, tokenizer: ChatTokenizer) -> None:
        self.stepper = stepper
        self.board = JobBoard(stepper, tokenizer)
        self.integrity_errors = 0
        self.failed_steps = 0
        self._failures_in_a_row = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fovea-engine", daemon=True)
        self._failure: BaseException | None = None
        self._closing = False
        self._audited = True
        ahead = bool(getattr(stepper.executor, "runs_ahead", False))
        self._async = cast("AsyncExecutor[Any]", stepper.executor) if ahead else None
        self._flight: Flight | None = None
        self._ended = 0.0

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._failure is None

    def submit(self, jobs: list[Job]) -> None:
        """Add jobs. Thread-safe. Raises Unavailable when the loop has ended."""
        self._put(lambda: self._add(jobs))

    def cancel(self, sequence_ids: list[str]) -> None:
        """End sequences with finish_reason "abort"; ended ones are ignored. Thread-safe."""
        self._inbox.put(lambda: self.board.cancel(sequence_ids))

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the loop's thread, between two steps, and return when it is done. Thread-safe.

        Raises the error of `action`, Unavailable when the loop has ended, and EngineError if the action is
        not done after CALL_TIMEOUT_S.
        """
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
        """Put a command into the inbox. Raises Unavailable when the loop has ended.

        The state is checked again afterwards: a loop that ended in between may never run the command.
        """
        if self.alive and not self._closing:
            self._inbox.put(command)
        if not self.alive or self._closing:
            raise Unavailable("the engine has stopped")

    def end(self, error: Exception) -> None:
        """End the loop with an error, after the step that runs. All jobs fail. Thread-safe."""

        def fail() -> None:
            raise error

        self._inbox.put(fail)

    def close(self) -> None:
        """Abort the unfinished jobs and stop the thread."""
        self._closing = True
        if self._thread.is_alive():
            self._inbox.put(lambda: self.board.cancel(list(self.board.jobs)))
            self._inbox.put(None)
            self._thread.join(timeout=60)

    def _run(self) -> None:
        try:
            # Commands run between steps, when no step is launched.
            while self._flight is not None or self._drain_inbox():
                with stage("schedule"):  # the stages of the step itself are nested in this one
                    self._step()
        except BaseException as error:
            self._failure = error
            log.exception("the engine loop died")
            self._fail_all(EngineError("the engine stopped unexpectedly; see the server's log"))

    def _fail_all(self, error: EngineError) -> None:
        """Send an error to every job, also to those in the inbox, so that no client waits for ever."""
        with suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    with suppress(Exception):
                        command()
        self.board.fail_all(error)

    def _drain_inbox(self) -> bool:
        """Run the waiting commands; sleep while there is nothing to compute. False: stop."""
        self._audit()
        block = self.stepper.idle
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            with stage("schedule"):
                command()
            self._audit()
            block = self.stepper.idle

    def _add(self, jobs: list[Job]) -> None:
        self.board.add(jobs)
        self._audited = False

    def _step(self) -> None:
        flight = self._flight or self._launch()
        if flight is None:
            return
        self._flight = self._follow(flight)
        try:
            result = flight.finish()
        except Exception as error:  # noqa: BLE001 - any error is that of the step
            self._flight = None  # its tokens came after those of this step
            self._give_up(flight.step, error)
            return
        ended = time.perf_counter()
        # A step that was launched ahead began on the device when the one before it ended.
        seconds = ended - max(flight.started, self._ended)
        self._ended = ended
        self.stepper.drop_ended(result)
        self._finish_step(flight.step, result, seconds)

    def _launch(self) -> Flight | None:
        """Decide a step and begin to compute it; None: there is nothing to compute, or it failed."""
        now = time.monotonic()
        late = self.stepper.executor.late()
        if late is not None:
            self.stepper.settle(late, now)
            self.board.end_step(Step(StepPlan()), late, now)
        step = self.stepper.plan(now)
        expired = [seq.id for seq in step.expired]
        self.board.fail(expired, DeadlineExceeded("the request's timeout ran out", param="timeout"))
        if self.stepper.idle:
            return None
        if not step.plan:
            with stage("waiting"):
                time.sleep(STALL_S)
            return None
        self.board.begin_step(step, now)
        started, executor = time.perf_counter(), self._async
        if executor is None:
            return Flight(step, started, lambda: self.stepper.executor.execute(step.plan, step.encode_s))
        try:
            launched = executor.launch(step.plan, step.encode_s)
        except Exception as error:  # noqa: BLE001 - any error is that of the step
            self._give_up(step, error)
            return None
        return Flight(step, started, lambda: executor.finish(launched), launched)

    def _follow(self, flight: Flight) -> Flight | None:
        """Begin to compute the step after one that runs, if it is clear what it is."""
        executor = self._async
        if executor is None or flight.launched is None or not self._inbox.empty():
            return None
        step = self.stepper.follow(flight.step, time.monotonic())
        if step is None:
            return None
        started = time.perf_counter()
        try:
            launched = executor.follow(flight.launched, step.plan)
        except StepOutOfMemory:
            return None  # the step is tried again when the one before it has ended
        except Exception:
            # The step before it tells whether the device is well. If it is, these tokens are computed again.
            log.exception("a step could not be launched ahead; from now on each waits for the one before")
            self._async = None
            return None
        if launched is None:
            return None
        return Flight(step, started, lambda: executor.finish(launched), launched)

    def _give_up(self, step: Step, error: Exception) -> None:
        if isinstance(error, LostRank):
            raise DeadDevice(str(error)) from error
        if isinstance(error, StepOutOfMemory):
            self._retreat(step, error)
            return
        names = ", ".join(sorted(step.involved))
        log.error("a step failed; its sequences: %s", names, exc_info=error)
        self._abandon(step, error)

    def _finish_step(self, step: Step, result: StepResult, seconds: float) -> None:
        self.stepper.apply(step, result, seconds if result.seconds is None else result.seconds)
        self.board.end_step(step, result, time.monotonic())
        if PROBE in result.failures:
            raise DeadDevice from result.failures[PROBE]
        if result.encoded or any(item.seq.id not in result.failures for item in step.plan.work):
            self._failures_in_a_row = 0
        elif result.failures:
            self._count_failure()  # on a dead device, every image fails, each for itself

    def _abandon(self, step: Step, error: Exception) -> None:
        """Give up a failed step, and end the sequence that is to blame, if that is known.

        Requests alone never end the loop, however many of them make steps fail. It ends if the probe fails,
        so that the process can be restarted.
        """
        self.failed_steps += 1  # before a client gets its error, and may read the counter at once
        guilty = self.stepper.abandon(step)
        if guilty == PROBE:
            raise DeadDevice from error
        if guilty is not None:
            self.board.fail([guilty], error)
        self._count_failure()

    def _retreat(self, step: Step, error: StepOutOfMemory) -> None:
        """Give up a step that did not fit into memory. End its sequence if it does not fit even alone."""
        tokens, sequences = step.plan.tokens, len(step.involved)
        guilty = self.stepper.retreat(step)
        log.warning(
            "a step of %d tokens of %d sequences does not fit into the device's memory; the next ones have "
            "at most %d tokens: %s",
            tokens,
            sequences,
            self.stepper.memory.tokens,
            error,
        )
        if guilty == PROBE:
            raise DeadDevice from error
        if guilty is not None:
            self.board.fail([guilty], OutOfMemory(NO_ROOM))
            self._count_failure()

    def _count_failure(self) -> None:
        """Count a step in which nothing succeeded. After FATAL_FAILURES in a row, try the probe, alone.

        The probe counts as the oldest sequence, so that it need not wait and is not preempted.
        """
        self._failures_in_a_row += 1
        if self._failures_in_a_row < FATAL_FAILURES:
            return
        if PROBE not in self.board.jobs:
            arrivals = [seq.arrival for seq in self.stepper.sequences.values()]
            self.board.add([probe_job(self.board.tokenizer, min(arrivals, default=time.monotonic()) - 1)])
        self.stepper.failure_search.try_next(PROBE)

    def _audit(self) -> None:
        """Check once whenever the engine becomes idle that nothing is held.

        A leak is logged and counted; the engine keeps serving.
        """
        if self._audited or self.board.jobs:
            return
        self._audited = True
        try:
            self.stepper.scheduler.check_integrity()
        except RuntimeError:
            self.integrity_errors += 1
            log.exception("the caches do not add up")


def probe_job(tokenizer: ChatTokenizer, arrival: float) -> Job:
    """Return a job that computes one token after a prompt of one token. No client waits for it.

    arrival: time of arrival on the monotonic clock.
    """
    sampling = SamplingParams(temperature=0, max_tokens=1)
    seq = Sequence(PROBE, [0], sampling, 1, salt=PROBE, arrival=arrival)
    return Job(seq, SequenceInputs(), _ignore, AnswerReader(tokenizer, sampling))


def _ignore(event: Event) -> None:
    """A sink that nobody reads."""


class DeadDevice(Exception):
    """Steps fail for every sequence, also for a trivial one."""
