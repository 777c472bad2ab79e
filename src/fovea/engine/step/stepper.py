"""One step of the engine, without a clock and without a device.

    plan(now)                       which tokens, and how many seconds of encoding
    executor.execute(...)           computes the step, or estimates its duration
    apply(step, result, seconds)    notes computed and new tokens, and updates the pace's estimates
    abandon(step)                   in place of apply, if the step failed: who is to blame?

The engine's loop, the simulated server and the virtual clock of `fovea simulate` all run on this one class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fovea.core.types import FinishReason
from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.batch import BatchControl, DecodeBound
from fovea.engine.schedule.composition import Composition
from fovea.engine.schedule.pace import Pace
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import Executor, StepResult
from fovea.engine.step.suspects import Suspects
from fovea.engine.step.tallies import StepTallies


@dataclass(frozen=True, slots=True)
class Step:
    """The decision about one step.

    plan: tokens and images, from the scheduler.
    encode_s: seconds that the encoder may take.
    composition: the amounts of its work.
    expired: sequences whose deadline passed before the step; they are ended already.
    """

    plan: StepPlan
    encode_s: float = 0.0
    composition: Composition = Composition()
    expired: tuple[Sequence, ...] = ()

    @property
    def involved(self) -> set[str]:
        """Ids of all sequences for which the step computes or moves something."""
        return {
            *(item.seq.id for item in self.plan.work),
            *(holder for job in self.plan.encode for holder in job.holders),
            *(move.owner for move in self.plan.moves if move.owner),
        }


class Stepper:
    """Scheduler, pace and batch control over an executor. For one thread.

    sequences: all unfinished sequences, by id.
    suspects: the sequences of a failed step, until the guilty one is found.
    steps, computed_tokens, draft_tokens, accepted_drafts, encoded_images, encode_seconds: counters since the
        start. draft_tokens are the drafts that were computed.
    tallies: histograms of steps and images.
    times: predicts durations of steps.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, control: BatchControl | None = None) -> None:
        """control: limits the number of running sequences; None: `DecodeBound` with the configured target."""
        config = scheduler.config
        self.scheduler = scheduler
        self.executor = executor
        target_s = config.target_itl_ms / 1000
        self.times = StepTimes(config.target_percentile)
        self.pace = Pace(config.pace, target_s, config.max_step_tokens, self.times)
        self.batch: BatchControl = control or DecodeBound(target_s, config.max_running, self.times)
        self.sequences: dict[str, Sequence] = {}
        self.suspects = Suspects()
        self.steps = 0
        self.computed_tokens = 0
        self.draft_tokens = 0
        self.accepted_drafts = 0
        self.encoded_images = 0
        self.encode_seconds = 0.0
        self.tallies = StepTallies()

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return self.scheduler.idle

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Add a sequence. If the executor raises, nothing of the sequence is kept."""
        try:
            drafts = self.executor.add(seq, inputs)
        except BaseException:
            self.executor.remove(seq)
            raise
        self.sequences[seq.id] = seq
        self.scheduler.add(seq, drafts)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence at any time and free its blocks, images and inputs. Ending twice is no error."""
        self.scheduler.finish(seq, reason)
        if self.sequences.pop(seq.id, None) is not None:
            self.executor.remove(seq)

    def plan(self, now: float) -> Step:
        """Decide the next step.

        Expired sequences are ended first. The plan is empty when nothing can advance.

        now: time on the clock of arrivals and deadlines.
        """
        expired = tuple(self.scheduler.expired(now))
        for seq in expired:
            self.finish(seq, "error")
        if self.idle:
            return Step(StepPlan(), expired=expired)
        running = self.scheduler.running
        decodes = Composition.of_decodes(running)
        streams = self.scheduler.streams_to_protect
        allowance = self.pace.allow(decodes, streams, len(self.sequences) - decodes.decodes)
        room = self.pace.prompt_room(allowance, encoding=self.executor.encoding)
        most = self.batch.allowed(running, self.scheduler.waiting)
        plan = self.scheduler.schedule(room, most, self.suspects.group)
        if not plan:
            self.suspects.clear(())
        composition = Composition.of(plan)
        encode_s = self.pace.encode_s(allowance, composition)
        if plan.encode and plan.work and not allowance.forced and encode_s < self.executor.slice_s:
            plan = replace(plan, encode=())
        return Step(plan, encode_s, composition, expired)

    def apply(self, step: Step, result: StepResult, seconds: float, between_s: float = 0.0) -> None:
        """Take in the result of a step. Sequences that failed are ended.

        seconds: duration of the step.
        between_s: time since the end of the last step, if that one led to this one; otherwise 0.
        """
        self.suspects.clear(step.involved)
        self._observe(step.composition, result, seconds + between_s)
        self.draft_tokens += sum(item.draft for item in step.plan.work)
        self.accepted_drafts += sum(len(picks) - 1 for picks in result.sampled.values())
        self.steps += 1
        self.computed_tokens += step.plan.tokens
        self.encoded_images += len(result.encoded)
        self.encode_seconds += sum(result.encoded.values())
        self.tallies.add(step.plan.tokens, len(step.plan.work), result)
        for seq_id in result.failures:
            if seq_id in self.sequences:
                self.finish(self.sequences[seq_id], "error")
        tokens = {seq_id: [pick.token for pick in picks] for seq_id, picks in result.sampled.items()}
        self.scheduler.update(step.plan, tokens, result.drafts)

    def _observe(self, composition: Composition, result: StepResult, gap_s: float) -> None:
        """Learn from a step. gap_s: its duration with the time since the last one."""
        if composition.decodes:
            self.pace.late_steps.observe(gap_s > self.pace.target_s)
            self.batch.observe(gap_s)
        self.times.observe(composition, gap_s - result.encode_s)

    def abandon(self, step: Step) -> str | None:
        """Give up a step that failed as a whole. Its sequences continue, in smaller groups.

        Returns the id of the sequence that is to blame, which the caller then ends; None: not known yet.
        """
        self.scheduler.abandon(step.plan)
        involved = [self.sequences[name] for name in step.involved if name in self.sequences]
        return self.suspects.fail([seq.id for seq in sorted(involved, key=lambda s: (s.arrival, s.id))])
